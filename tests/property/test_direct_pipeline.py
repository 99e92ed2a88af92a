"""Random orders of a worker's transfers over NVMe that fails, hangs and answers late: each job ends once, no page is
touched after its job has ended, no staging area has two users, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstow.direct.base import Extent
from kvstow.direct.pipeline import BACKGROUND_PAUSE_S, HUNG_S, CopyEnd, JobEnd, Pipeline
from kvstow.errors import CopyError, FrameError
from kvstow.testing.manual import ManualClock, ManualExecutor

STEPS = 80
DEPTH = 2  # transfers that have begun and not returned, while the owner goes on
FAULTS = (OSError(5, "Input/output error"), CopyError("short"), FrameError("damaged"))


class Machine:
    """Mover, media and the pipeline's owner. ``copies``: area and job of each copy that runs; ``used``: areas that a
    transfer has."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.areas = rng.randint(1, 5)
        self.clock = ManualClock()
        self.executor = ManualExecutor(self.clock, queue_limit=rng.choice((1, 3, 100)))
        self.copies: dict[int, tuple[int, int]] = {}
        self.done: list[CopyEnd] = []
        self.used: set[int] = set()
        self.fenced: set[int] = set()
        self.open: dict[int, int] = {}  # job to its items
        self.tickets = self.depth = 0
        self.wrong: list[str] = []
        self.failed = self.fine = self.hangs = self.behind = 0
        self.heals = False
        self.items = 0  # each with an extent of its own
        self.stuck: Extent | None = None
        self.pipeline: Pipeline[int] = Pipeline(self, self, self.executor, self.clock)

    def expect(self, fact: bool, what: str) -> None:
        if not fact:  # an assertion in a piece of work would be taken for its error
            self.wrong.append(what)

    def expect_unused(self, area: int) -> None:
        self.expect(
            area not in self.used | {one for one, _ in self.copies.values()},
            f"area {area} has two users",
        )

    # --- the mover's part

    def start(self, ticket: int, item: int, area: int, *, load: bool, length: int) -> None:
        self.expect(item in self.open, f"job {item} has ended, and its pages are copied")
        self.expect(
            load or item not in self.fenced, f"job {item} copies pages that are others' by now"
        )
        self.expect_unused(area)
        self.copies[ticket] = area, item

    def ended(self) -> list[CopyEnd]:
        done, self.done = self.done, []
        return done

    def fence(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            self.finish(ticket, None)

    def finish(self, ticket: int, error: str | None) -> None:
        if self.copies.pop(ticket, None) is not None:
            self.done.append(CopyEnd(ticket, error, 0 if error else 1))

    # --- the media's part

    def read(self, area: int, extent: Extent) -> None:
        self.move(area)

    def write(self, area: int, extent: Extent) -> None:
        self.move(area)

    def probe(self, area: int, extent: Extent) -> None:
        self.expect(extent == self.stuck, f"{extent} is tried, {self.stuck} hung")
        self.move(area)

    def scrub(self, area: int) -> None:
        self.move(area)

    def move(self, area: int) -> None:
        self.expect_unused(area)
        self.used.add(area)
        if self.depth < DEPTH and not self.heals:
            self.depth += 1
            for _ in range(self.rng.randint(0, 6)):
                self.step()
            self.depth -= 1
        self.used.discard(area)
        if self.rng.random() < 0.1 and not self.heals:
            raise self.rng.choice(FAULTS)

    def close(self) -> None: ...

    # --- the owner's part

    def submit(self) -> None:
        self.tickets += 1
        items = self.rng.randint(1, 6)
        self.open[self.tickets] = items
        load = self.rng.random() < 0.5
        extents = [Extent(self.items + n, 1, b"") for n in range(items)]
        self.items += items
        self.pipeline.submit(
            self.tickets, [(self.tickets, extent) for extent in extents], load=load
        )

    def take(self) -> None:
        before, asked = (
            self.pipeline.hung,
            [(item.extent, item.began_s) for item in self.pipeline._moving],
        )
        for end in self.pipeline.ended():
            self.take_one(end)
        if self.pipeline.hung and not before:
            self.hangs += 1
            self.stuck = self.pipeline._hung
            begun = [extent for extent, began_s in asked if began_s is not None]
            self.behind += len(begun) < len(asked) and bool(begun)
            self.expect(
                self.stuck in (begun or [extent for extent, _ in asked]),
                f"{self.stuck} hung, of {asked}",
            )

    def take_one(self, end: JobEnd) -> None:
        items = self.open.pop(end.ticket, None)
        self.expect(items is not None, f"job {end.ticket} ended twice")
        self.expect(
            all(0 <= index < (items or 0) for index in end.failed),
            f"items {end.failed} of {items} failed",
        )
        self.expect(
            end.ticket not in {item for _, item in self.copies.values()},
            f"job {end.ticket} is being copied",
        )
        self.failed, self.fine = self.failed + bool(end.failed), self.fine + (not end.failed)

    def step(self) -> None:
        rng = self.rng
        kind = rng.randrange(7)
        if kind == 0:
            self.submit()
        elif kind == 1 and self.copies:
            self.finish(
                rng.choice(list(self.copies)), "the copy failed" if rng.random() < 0.1 else None
            )
        elif kind == 2 and self.executor.pending:
            self.executor.run(rng.randrange(self.executor.pending))
        elif kind == 3:
            self.clock.advance(rng.choice((0.1, 1.0, BACKGROUND_PAUSE_S, HUNG_S / 2, HUNG_S + 1)))
        elif kind == 4:
            fenced = rng.sample(sorted(self.open), min(len(self.open), 2))
            self.pipeline.fence(fenced)
            self.expect(
                {item for _, item in self.copies.values()}.isdisjoint(fenced),
                f"jobs {fenced} are copied yet",
            )
            self.fenced.update(fenced)
        else:
            self.take()
        free = self.pipeline._areas
        self.expect(len(set(free)) == len(free), f"free areas {free}")
        taken = self.used | {area for area, _ in self.copies.values()}
        self.expect(taken.isdisjoint(free), f"areas {taken} are used, {free} are free")

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        self.heals = True
        for _ in range(10 * STEPS):
            self.executor.run_all()
            for ticket in list(self.copies):
                self.finish(ticket, None)
            self.take()
            self.clock.advance(1.0)
        assert self.wrong == []
        assert self.open == {}
        assert not self.pipeline.hung
        self.executor.run_all()
        self.take()
        assert len(self.pipeline._areas) + self.pipeline._background_running == self.areas


@pytest.mark.parametrize("batch", range(4))
def test_random_orders(batch: int) -> None:
    failed = fine = hangs = behind = 0
    for seed in range(batch * 150, (batch + 1) * 150):
        machine = Machine(random.Random(seed))
        try:
            machine.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        failed, fine, hangs = failed + machine.failed, fine + machine.fine, hangs + machine.hangs
        behind += machine.behind
    assert min(failed, fine, hangs) > 100
    assert behind > 10, "others were queued behind what hung"
