"""The manual clock and executor keep the contracts that the real ones do, in an order that the test chooses."""

import pytest

from kvstow.errors import WorkDropped
from kvstow.runtime import Clock, Executor
from kvstow.testing.manual import ManualClock, ManualExecutor

End = tuple[object, BaseException | None]


def collect(executor: Executor, names: str, *, urgent: str = "") -> list[object]:
    """Submit work named by each letter; returns the list that the letters arrive in as their ``then`` runs."""
    ends: list[object] = []
    for name in names:
        executor.submit(
            lambda name=name: name,
            lambda value, error: ends.append(error or value),
            urgent=name in urgent,
        )
    return ends


def test_time_passes_in_advance_only() -> None:
    clock: Clock = (manual := ManualClock())
    before = clock.monotonic(), clock.wall()
    manual.advance(2.5)
    assert (clock.monotonic() - before[0], clock.wall() - before[1]) == (2.5, 2.5)
    with pytest.raises(ValueError):
        manual.advance(-1)


def test_nothing_runs_until_told_and_then_runs_in_poll_only() -> None:
    executor = ManualExecutor()
    ends = collect(executor, "ab")
    assert (executor.pending, executor.outstanding, executor.poll(), ends) == (2, 2, 0, [])
    assert executor.run_next()
    assert (executor.pending, executor.outstanding, ends) == (1, 2, [])
    assert executor.poll() == 1
    assert (executor.outstanding, ends) == (1, ["a"])
    assert executor.run_all() == 1
    assert not executor.run_next()
    executor.poll()
    assert (executor.outstanding, ends) == (0, ["a", "b"])


def test_urgent_work_goes_first() -> None:
    executor = ManualExecutor()
    ends = collect(executor, "abcd", urgent="bd")
    executor.run_all()
    executor.poll()
    assert ends == ["b", "d", "a", "c"]


def test_any_order_can_be_forced() -> None:
    executor = ManualExecutor()
    ends = collect(executor, "abcd", urgent="b")
    for index in (3, 0, 1):  # of b, a, c, d
        executor.run(index)
    executor.poll()
    assert ends == ["d", "b", "c"]
    with pytest.raises(IndexError):
        executor.run(1)


def test_the_queue_is_bounded_by_what_has_not_run() -> None:
    executor = ManualExecutor(queue_limit=2)
    ends = collect(executor, "abc")
    assert executor.pending == 2
    executor.run_next()
    assert executor.submit(lambda: "d", lambda value, error: ends.append(value))
    executor.run_all()
    executor.poll()
    assert ends == ["a", "b", "d"]


def test_an_exception_is_an_end() -> None:
    executor = ManualExecutor()
    ends: list[End] = []
    executor.submit(lambda: 1 // 0, lambda value, error: ends.append((value, error)))
    executor.run_all()
    executor.poll()
    [(value, error)] = ends
    assert value is None
    assert isinstance(error, ZeroDivisionError)


def test_wait_passes_time_instead_of_blocking() -> None:
    clock = ManualClock()
    executor = ManualExecutor(clock)
    start = clock.monotonic()
    collect(executor, "a")
    assert not executor.wait(2.0)
    assert clock.monotonic() == start + 2
    executor.run_next()
    assert executor.wait(2.0)
    assert clock.monotonic() == start + 2


def test_wait_runs_one_piece_where_asked_to() -> None:
    executor = ManualExecutor(run_in_wait=True)
    ends = collect(executor, "ab")
    assert executor.wait(1.0)
    executor.poll()
    assert ends == ["a"]


def test_close_drops_what_has_not_run_and_says_so() -> None:
    executor = ManualExecutor()
    ends = collect(executor, "ab")
    executor.run_next()
    assert executor.close(1.0)
    assert not executor.submit(lambda: 1, lambda value, error: None)
    assert executor.poll() == 2
    assert ends[0] == "a"
    assert isinstance(ends[1], WorkDropped)
    assert executor.outstanding == 0
