"""A worker's pipeline, every event ordered: bounded staging, fences that do not wait for NVMe, ends once each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvstow.direct.base import Extent
from kvstow.direct.pipeline import (
    BACKGROUND_PAUSE_S,
    DRAIN_TIMEOUT_S,
    HUNG_S,
    CopyEnd,
    JobEnd,
    Pipeline,
)
from kvstow.errors import CopyError, FrameError
from kvstow.testing.manual import ManualClock, ManualExecutor


class FakeMover:
    """Copies end when the test says so."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[str, int, bool]] = {}
        self.done: list[CopyEnd] = []
        self.fenced: list[list[str]] = []

    def start(self, ticket: int, item: str, area: int, *, load: bool, length: int) -> None:
        assert area not in {other for _, other, _ in self.running.values()}
        self.running[ticket] = (item, area, load)

    def finish(self, item: str, error: str | None = None) -> None:
        [ticket] = [ticket for ticket, (name, _, _) in self.running.items() if name == item]
        del self.running[ticket]
        self.done.append(CopyEnd(ticket, error, 0 if error else 10))

    def ended(self) -> list[CopyEnd]:
        done, self.done = self.done, []
        return done

    def fence(self, tickets: Sequence[int]) -> None:
        items = [self.running[ticket][0] for ticket in tickets]
        self.fenced.append(items)
        for item in items:
            self.finish(item)

    def copying(self) -> list[str]:
        return [item for item, _, _ in self.running.values()]


class FakeMedia:
    name = "fake"

    def __init__(self, areas: int) -> None:
        self.areas = areas
        self.moves: list[str] = []
        self.fails: dict[int, Exception] = {}
        self.during: Callable[[], object] = lambda: None
        self.closed = 0

    def _move(self, what: str, extent: Extent) -> None:
        if extent.offset in self.fails:
            raise self.fails[extent.offset]
        self.moves.append(f"{what} {extent.offset}")
        self.during()

    def write(self, area: int, extent: Extent) -> None:
        self._move("write", extent)

    def read(self, area: int, extent: Extent) -> None:
        self._move("read", extent)

    def probe(self, area: int, extent: Extent) -> None:
        self._move("probe", extent)

    def scrub(self, area: int) -> None:
        self.moves.append("scrub")

    def close(self) -> None:
        self.closed += 1


class Rig:
    """``closed_within``: seconds that the executor was given to close."""

    def __init__(self, areas: int = 4, queue_limit: int = 100) -> None:
        self.clock = ManualClock()
        self.executor = ManualExecutor(self.clock, queue_limit=queue_limit, run_in_wait=True)
        self.mover, self.media = FakeMover(), FakeMedia(areas)
        self.closed_within: list[float] = []
        close = self.executor.close
        self.executor.close = lambda timeout_s: (
            self.closed_within.append(timeout_s) or close(timeout_s)
        )  # type: ignore[method-assign, func-returns-value]
        self.pipeline: Pipeline[str] = Pipeline(self.media, self.mover, self.executor, self.clock)

    def submit(self, ticket: int, *numbers: int, load: bool) -> None:
        name = "load" if load else "store"
        items = [(f"{name} {n}", Extent(n, 100, b"")) for n in numbers]
        self.pipeline.submit(ticket, items, load=load)

    def run(self) -> list[JobEnd]:
        """Everything to its end."""
        ended: list[JobEnd] = []
        for _ in range(100):
            for item in self.mover.copying():
                self.mover.finish(item)
            self.executor.run_all()
            ended += self.pipeline.ended()
        return ended

    def check_idle(self) -> None:
        assert sorted(self.pipeline._areas) == list(range(self.media.areas))
        assert not self.pipeline._jobs
        assert not self.pipeline._copying
        assert not self.pipeline._moving


def test_a_store_is_copied_then_written() -> None:
    rig = Rig()
    rig.submit(1, 5, load=False)
    assert rig.mover.copying() == ["store 5"]
    assert rig.executor.pending == 0
    rig.mover.finish("store 5")
    assert rig.pipeline.ended() == []
    rig.clock.advance(0.5)
    rig.executor.run_all()
    assert rig.media.moves == ["write 5"]
    assert rig.pipeline.ended() == [JobEnd(1, False, (), 0, None, 10, 0.5)]
    assert rig.pipeline.ended() == []
    rig.check_idle()


def test_a_load_is_read_then_copied() -> None:
    rig = Rig()
    rig.submit(1, 5, load=True)
    assert rig.mover.copying() == []
    rig.executor.run_all()
    assert rig.pipeline.ended() == []
    assert (rig.media.moves, rig.mover.copying()) == (["read 5"], ["load 5"])
    rig.mover.finish("load 5")
    assert rig.pipeline.ended() == [JobEnd(1, True, (), 0, None, 10, 0.0)]
    rig.check_idle()


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize("areas", [1, 2, 5])
def test_more_chunks_than_staging(areas: int, load: bool) -> None:
    rig = Rig(areas)
    rig.submit(1, *range(12), load=load)
    rig.submit(2, *range(20, 25), load=load)
    assert len(rig.mover.running) + rig.executor.pending <= areas
    assert {end.ticket: end.moved_bytes for end in rig.run()} == {1: 120, 2: 50}
    assert len(rig.media.moves) == 17
    rig.check_idle()


def test_a_quarter_of_the_staging_is_for_loads() -> None:
    rig = Rig(8)
    rig.submit(1, *range(10), load=False)
    assert len(rig.mover.copying()) == 6
    rig.submit(2, 90, 91, load=True)
    assert rig.executor.pending == 2
    rig.run()
    rig.check_idle()


def test_loads_are_read_before_stores_are_written() -> None:
    rig = Rig()
    rig.submit(1, 5, load=False)
    rig.mover.finish("store 5")
    rig.pipeline.ended()
    rig.submit(2, 6, load=True)
    rig.executor.run_all()
    assert rig.media.moves == ["read 6", "write 5"]


def test_what_fails_is_named_and_the_rest_goes_on() -> None:
    rig = Rig()
    rig.media.fails = {1: OSError(5, "Input/output error"), 3: CopyError("short")}
    rig.submit(1, 0, 1, 2, 3, load=True)
    [end] = rig.run()
    assert (end.failed, end.io_failed, end.moved_bytes) == ((1, 3), 2, 20)
    assert end.error == "OSError: [Errno 5] Input/output error"
    rig.submit(2, 7, 8, load=False)
    rig.mover.finish("store 7", "the copy failed")
    rig.mover.finish("store 8")
    [end] = rig.run()
    assert (end.failed, end.io_failed, end.error) == ((0,), 0, "the copy failed")
    assert rig.media.moves == ["read 0", "read 2", "write 8"]
    rig.check_idle()


def test_a_fence_waits_for_pages_not_for_nvme() -> None:
    rig = Rig(2)
    rig.submit(1, 1, 2, 3, load=False)
    rig.submit(2, 9, load=False)
    rig.mover.finish("store 1")
    rig.pipeline.ended()
    assert rig.executor.pending == 1
    rig.pipeline.fence([1])
    assert rig.mover.fenced == [["store 2"]]
    assert rig.executor.pending == 1, "NVMe was not waited for"
    ends = {end.ticket: end for end in rig.run()}
    assert ends[1].failed == (2,)
    assert "given up" in str(ends[1].error)
    assert ends[2].failed == ()
    rig.check_idle()


def test_unknown_and_ended_tickets_are_ignored_by_a_fence() -> None:
    rig = Rig()
    rig.pipeline.fence([1, 2])
    assert rig.mover.fenced == [[]]


def test_a_full_queue_fails_what_does_not_fit() -> None:
    rig = Rig(areas=8, queue_limit=2)
    rig.submit(1, *range(5), load=True)
    [end] = rig.run()
    assert end.failed == (2, 3, 4)
    rig.check_idle()


def test_closing_ends_everything_once() -> None:
    rig = Rig(2)
    rig.submit(1, 1, 2, 3, load=False)
    rig.submit(2, 5, 6, load=True)
    rig.pipeline.close()
    rig.pipeline.close()
    ends = {end.ticket: end.failed for end in rig.pipeline.ended()}
    assert set(ends) == {1, 2}
    assert ends[2] == (0, 1), "nothing is copied into pages any more"
    assert rig.media.closed == 1
    rig.check_idle()


def test_draining_waits_for_all_of_it() -> None:
    rig = Rig(2)
    rig.submit(1, 1, 2, 3, load=False)
    rig.submit(2, 5, 6, 7, load=True)
    rig.pipeline.drain()
    assert {end.ticket: end.failed for end in rig.pipeline.ended()} == {1: (), 2: ()}
    rig.check_idle()


def test_what_hangs_is_not_waited_for_without_end() -> None:
    rig = Rig()
    rig.executor._run_in_wait = False
    rig.submit(1, 1, load=True)
    before = rig.clock.monotonic()
    rig.pipeline.close()
    assert rig.clock.monotonic() - before == DRAIN_TIMEOUT_S


@pytest.mark.parametrize("load", [True, False])
def test_nvme_that_hangs_fails_what_waits_for_it(load: bool) -> None:
    rig = Rig(2)
    rig.submit(1, 1, 2, 3, load=load)
    for item in rig.mover.copying():
        rig.mover.finish(item)
    assert rig.pipeline.ended() == []
    rig.clock.advance(HUNG_S)
    assert rig.pipeline.ended() == []
    rig.clock.advance(0.5)
    [end] = rig.pipeline.ended()
    assert (end.failed, end.io_failed) == ((0, 1, 2), 3)
    assert "did not answer within 30 s" in str(end.error)
    assert rig.pipeline._areas == [], "it may yet use them"
    rig.submit(2, 4, load=load)
    [end] = rig.pipeline.ended()
    assert (end.ticket, end.failed, end.io_failed) == (2, (0,), 1)
    assert "not asked" in str(end.error)
    rig.executor.run_all()
    assert rig.media.moves == [], "what was given up before it began is not done"
    assert rig.pipeline.ended() == []
    rig.check_idle()


class Hanging(Rig):
    """NVMe did not answer for the load of extent 1, and has since: its thread is free again."""

    def __init__(self) -> None:
        super().__init__(4)
        self.submit(1, 1, load=True)
        self.clock.advance(HUNG_S + 1)
        assert [end.failed for end in self.pipeline.ended()] == [(0,)]
        assert self.pipeline.hung
        self.executor.run_all()
        assert self.pipeline.ended() == []
        self.check_idle()

    def trial(self) -> None:
        self.clock.advance(BACKGROUND_PAUSE_S)
        assert self.pipeline.ended() == []
        self.executor.run_all()
        assert self.pipeline.ended() == []

    def check_pending_trial(self) -> None:
        assert self.pipeline.ended() == []
        assert self.executor.pending == 1
        assert self.pipeline.hung

    def check_bypassed(self) -> None:
        """Loads and stores fail at once, none is tried."""
        moves = list(self.media.moves)
        for load in (True, False):
            self.submit(9, 7, 8, load=load)
            [end] = self.pipeline.ended()
            assert (end.failed, end.io_failed) == ((0, 1), 2)
        self.executor.run_all()
        assert self.media.moves == moves


def test_after_a_hang_nothing_waits_until_a_trial_is_answered() -> None:
    rig = Hanging()
    rig.check_bypassed()
    assert rig.executor.pending == 0, "no trial at once"
    rig.trial()
    assert rig.media.moves == ["probe 1"], "what hung is asked for"
    assert not rig.pipeline.hung
    rig.submit(2, 4, 5, load=True)
    [end] = rig.run()
    assert end.failed == ()
    rig.check_idle()


@pytest.mark.parametrize(
    "answer",
    [OSError(5, "Input/output error"), CopyError("short"), FrameError("another chunk's"), None],
)
def test_a_drive_that_answers_with_an_error_is_not_bypassed(answer: Exception | None) -> None:
    rig = Hanging()
    rig.media.fails = {} if answer is None else {1: answer}
    rig.trial()
    assert not rig.pipeline.hung
    rig.check_idle()


def test_a_trial_that_does_not_reach_the_drive_comes_again() -> None:
    rig = Hanging()
    rig.media.fails = {1: MemoryError()}
    rig.trial()
    assert rig.pipeline.hung
    rig.check_bypassed()
    rig.media.fails = {}
    rig.trial()
    assert not rig.pipeline.hung
    rig.check_idle()


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize("first", range(3))
def test_the_trial_is_of_what_hung_not_of_what_was_queued_behind_it(first: int, load: bool) -> None:
    rig, ends = Rig(4), []
    rig.submit(1, 0, 1, 2, load=load)
    for item in rig.mover.copying():
        rig.mover.finish(item)
    assert rig.pipeline.ended() == []

    def owner() -> None:
        rig.clock.advance(HUNG_S + 1)
        ends.extend(rig.pipeline.ended())
        rig.clock.advance(BACKGROUND_PAUSE_S)
        assert rig.pipeline.ended() == []

    rig.media.during = owner
    rig.executor.run(first)
    rig.media.during = lambda: None
    assert [(end.failed, end.io_failed) for end in ends] == [((0, 1, 2), 3)]
    rig.media.moves.clear()
    rig.executor.run_all()
    assert rig.media.moves == [f"probe {first}"]
    assert rig.pipeline.ended() == []
    assert not rig.pipeline.hung
    rig.check_idle()


def test_slow_copies_are_not_nvme_that_hangs() -> None:
    rig = Rig(4)
    rig.submit(1, 1, 2, 3, 4, load=False)
    rig.clock.advance(HUNG_S - 1)
    rig.submit(2, 9, load=True)
    rig.clock.advance(2)
    assert rig.pipeline.ended() == []
    assert not rig.pipeline.hung
    ends = {end.ticket: end for end in rig.run()}
    assert (ends[1].failed, ends[1].io_failed, ends[2].failed) == ((3,), 0, ())
    assert "no staging was free within 30 s" in str(ends[1].error)
    rig.check_idle()


def test_a_scrub_that_hangs() -> None:
    """It may have the only thread: requests do not wait for it one after another."""
    rig = Rig()
    rig.clock.advance(BACKGROUND_PAUSE_S)
    rig.pipeline.ended()
    rig.submit(1, 1, load=True)
    rig.clock.advance(HUNG_S + 1)
    assert [end.io_failed for end in rig.pipeline.ended()] == [1]
    assert rig.pipeline.hung
    rig.clock.advance(BACKGROUND_PAUSE_S)
    assert rig.pipeline.ended() == []
    assert rig.executor.pending == 2, "the scrub, and what was given up: no trial beside them"
    rig.run()
    rig.clock.advance(BACKGROUND_PAUSE_S)
    rig.run()
    assert not rig.pipeline.hung
    assert rig.media.moves == ["scrub", "probe 1"]
    rig.check_idle()


def test_a_trial_that_hangs_is_the_only_one() -> None:
    rig = Hanging()
    for _ in range(5):
        rig.clock.advance(BACKGROUND_PAUSE_S)
        rig.check_pending_trial()
    rig.executor.run_all()
    assert rig.pipeline.ended() == []
    assert not rig.pipeline.hung
    rig.check_idle()


def test_a_store_that_was_being_copied_when_nvme_hung() -> None:
    rig = Rig()
    rig.submit(1, 1, load=True)
    rig.submit(2, 2, load=False)
    rig.clock.advance(HUNG_S + 1)
    assert [end.ticket for end in rig.pipeline.ended()] == [1]
    rig.mover.finish("store 2")
    [end] = rig.pipeline.ended()
    assert (end.ticket, end.failed, end.moved_bytes) == (2, (0,), 10)
    rig.executor.run_all()
    assert rig.media.moves == []
    assert rig.pipeline.ended() == []
    rig.check_idle()


def test_closing_while_nvme_hangs() -> None:
    rig = Hanging()
    rig.clock.advance(BACKGROUND_PAUSE_S)
    rig.check_pending_trial()
    rig.pipeline.close()
    assert rig.closed_within == [0.0]
    rig.executor.poll()
    rig.check_idle()


@pytest.mark.parametrize("polled", [True, False])
def test_closing_after_nvme_that_hung_has_answered(polled: bool) -> None:
    rig = Rig()
    rig.submit(1, 1, load=True)
    rig.clock.advance(HUNG_S + 1)
    assert [end.failed for end in rig.pipeline.ended()] == [(0,)]
    rig.executor.run_all()
    if polled:
        assert rig.pipeline.ended() == []
    rig.pipeline.close()
    assert rig.closed_within == [DRAIN_TIMEOUT_S]
    assert rig.media.closed == 1
    rig.check_idle()


@pytest.mark.parametrize("load", [True, False])
def test_an_answer_that_comes_too_late(load: bool) -> None:
    rig, ends = Rig(1), []
    rig.submit(1, 1, load=load)
    for item in rig.mover.copying():
        rig.mover.finish(item)

    def owner() -> None:
        assert rig.pipeline.ended() == []
        rig.clock.advance(HUNG_S + 1)
        ends.extend(rig.pipeline.ended())
        assert rig.pipeline._areas == [], "its area is in use"

    rig.media.during = owner
    rig.pipeline.ended()
    rig.executor.run_all()
    rig.media.during = lambda: None
    assert [end.failed for end in ends] == [(0,)]
    assert rig.pipeline.ended() == []
    assert rig.mover.copying() == [], "its pages are another request's by now"
    rig.check_idle()


def test_slow_is_not_hung() -> None:
    rig = Rig(1)
    rig.submit(1, *range(9), load=True)
    ended: list[JobEnd] = []
    while not ended:
        rig.clock.advance(HUNG_S)
        rig.executor.run_next()
        ended += rig.pipeline.ended()
        for item in rig.mover.copying():
            rig.mover.finish(item)
    assert ended[0].failed == ()


def test_a_scrub_now_and_then_where_nothing_else_is_to_be_done() -> None:
    rig = Rig()
    rig.submit(1, 1, load=True)
    rig.clock.advance(BACKGROUND_PAUSE_S)
    assert rig.run()[0].failed == ()
    assert rig.media.moves == ["read 1", "scrub"]
    assert rig.run() == []
    assert rig.media.moves == ["read 1", "scrub"]
    rig.clock.advance(BACKGROUND_PAUSE_S)
    rig.run()
    assert rig.media.moves == ["read 1", "scrub", "scrub"]
    rig.check_idle()


def test_a_load_waits_for_one_scrub_at_most() -> None:
    rig = Rig(2)
    rig.clock.advance(BACKGROUND_PAUSE_S)
    rig.pipeline.ended()
    rig.submit(1, 1, 2, 3, load=True)
    rig.clock.advance(BACKGROUND_PAUSE_S)
    assert rig.run()[0].failed == ()
    assert rig.media.moves.count("scrub") == 1
    rig.check_idle()


def test_closing_waits_for_a_scrub() -> None:
    rig = Rig()
    rig.clock.advance(BACKGROUND_PAUSE_S)
    rig.pipeline.ended()
    assert rig.executor.pending == 1
    rig.pipeline.close()
    assert rig.closed_within == [DRAIN_TIMEOUT_S]
    assert rig.media.closed == 1


def test_nothing_is_begun_aside_once_it_closes() -> None:
    rig = Rig()
    rig.submit(1, 1, load=True)
    rig.clock.advance(BACKGROUND_PAUSE_S)
    rig.pipeline.close()
    assert "scrub" not in rig.media.moves
    rig.check_idle()
