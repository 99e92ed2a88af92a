"""Threads are held at gates, so the order of events is the test's and nothing waits for time to pass."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from kvstow.errors import WorkDropped
from kvstow.runtime import Clock, SystemClock, ThreadExecutor, run_within

PATIENCE_S = 30.0  # how long a test waits for what must come


class Held:
    """Work that has begun and ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return threading.current_thread().name


@pytest.fixture
def executor() -> Iterator[ThreadExecutor]:
    executor = ThreadExecutor("test", threads=1, queue_limit=4)
    yield executor
    executor.close(PATIENCE_S)


def hold(executor: ThreadExecutor) -> Held:
    """Keep the only thread busy."""
    held = Held()
    assert executor.submit(held, lambda value, error: None)
    assert held.begun.wait(PATIENCE_S)
    return held


def drain(executor: ThreadExecutor) -> None:
    while executor.outstanding:
        assert executor.wait(PATIENCE_S)
        executor.poll()


def test_clocks() -> None:
    clock: Clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall() > 1_700_000_000


def test_then_runs_in_poll_on_the_callers_thread(executor: ThreadExecutor) -> None:
    names: list[tuple[str | None, str]] = []
    executor.submit(
        lambda: threading.current_thread().name,
        lambda value, error: names.append((value, threading.current_thread().name)),
    )
    assert executor.wait(PATIENCE_S)
    assert names == []
    assert executor.outstanding == 1
    assert executor.poll() == 1
    assert names == [("kvstow-test-0", threading.current_thread().name)]
    assert executor.outstanding == 0
    assert executor.poll() == 0


def test_urgent_work_overtakes_what_waits(executor: ThreadExecutor) -> None:
    held = hold(executor)
    ran: list[str] = []
    for name in "abcd":
        executor.submit(
            lambda name=name: ran.append(name), lambda value, error: None, urgent=name in "bd"
        )
    held.go.set()
    drain(executor)
    assert ran == ["b", "d", "a", "c"]


def test_the_queue_is_bounded(executor: ThreadExecutor) -> None:
    held = hold(executor)
    accepted = [
        executor.submit(lambda: None, lambda value, error: None, urgent=i % 2 == 0)
        for i in range(6)
    ]
    assert accepted == [True] * 4 + [False] * 2
    assert executor.outstanding == 5
    held.go.set()
    drain(executor)
    assert executor.submit(lambda: None, lambda value, error: None)


@pytest.mark.parametrize("fault", [ValueError, SystemExit, KeyboardInterrupt, MemoryError])
def test_any_exception_reaches_then_and_the_thread_lives_on(
    executor: ThreadExecutor, fault: type[BaseException]
) -> None:
    ends: list[tuple[object, BaseException | None]] = []

    def fail() -> None:
        raise fault("here")

    executor.submit(fail, lambda value, error: ends.append((value, error)))
    executor.submit(lambda: "alive", lambda value, error: ends.append((value, error)))
    drain(executor)
    assert ends[0][0] is None
    assert isinstance(ends[0][1], fault)
    assert ends[1] == ("alive", None)


def test_an_exception_that_cannot_be_printed_is_replaced(executor: ThreadExecutor) -> None:
    class Mute(BaseException):
        def __str__(self) -> str:
            raise ValueError

    def fail() -> None:
        raise Mute

    ends: list[BaseException | None] = []
    executor.submit(fail, lambda value, error: ends.append(error))
    drain(executor)
    assert [str(error) for error in ends] == ["Mute, which can't be printed"]


def test_a_then_that_raises_loses_no_other_end(executor: ThreadExecutor) -> None:
    held = hold(executor)
    ends: list[str | None] = []

    def bad(value: object, error: BaseException | None) -> None:
        raise RuntimeError("a bug of the owner's")

    executor.submit(lambda: None, bad)
    executor.submit(lambda: "kept", lambda value, error: ends.append(value))
    held.go.set()
    with pytest.raises(RuntimeError):
        drain(executor)
    drain(executor)
    assert ends == ["kept"]


def test_what_a_then_submits_is_a_later_polls(executor: ThreadExecutor) -> None:
    ends: list[str] = []

    def again(value: object, error: BaseException | None) -> None:
        ends.append("first")
        executor.submit(lambda: None, lambda value, error: ends.append("second"))

    executor.submit(lambda: None, again)
    assert executor.wait(PATIENCE_S)
    assert executor.poll() == 1
    assert ends == ["first"]
    drain(executor)
    assert ends == ["first", "second"]


def test_wait_says_no_when_nothing_ends(executor: ThreadExecutor) -> None:
    held = hold(executor)
    assert not executor.wait(0.0)
    held.go.set()
    assert executor.wait(PATIENCE_S)


def test_close_drops_what_waits_and_tells_its_then(executor: ThreadExecutor) -> None:
    held = hold(executor)
    ends: list[BaseException | None] = []
    executor.submit(lambda: None, lambda value, error: ends.append(error))
    assert not executor.close(0.0)  # a thread is still at work: the deadline is kept
    assert not executor.submit(lambda: None, lambda value, error: None)
    held.go.set()
    assert executor.close(PATIENCE_S)
    executor.poll()
    assert executor.outstanding == 0
    assert len(ends) == 1
    assert isinstance(ends[0], WorkDropped)


def test_threads_are_named_daemons() -> None:
    executor = ThreadExecutor("io", threads=3)
    mine = {
        thread.name: thread.daemon
        for thread in threading.enumerate()
        if thread.name.startswith("kvstow-io-")
    }
    assert mine == {f"kvstow-io-{i}": True for i in range(3)}
    assert executor.close(PATIENCE_S)


def test_g7_an_idle_executor_keeps_nothing_of_its_last_work_alive(executor: ThreadExecutor) -> None:
    class Buffer:
        pass

    buffer = Buffer()
    alive = weakref.ref(buffer)
    executor.submit(lambda buffer=buffer: buffer, lambda value, error: None)
    del buffer
    drain(executor)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"queue_limit": 0}])
def test_no_threads_or_no_queue_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        ThreadExecutor("x", **arguments)


def test_every_end_comes_once_under_load() -> None:
    """Four threads, a switch interval that makes them cut in on each other anywhere."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        executor = ThreadExecutor("load", threads=4, queue_limit=64)
        ends: list[int] = []
        sent = 0
        while sent < 5000 or executor.outstanding:
            while sent < 5000 and executor.submit(
                lambda n=sent: n, lambda value, error: ends.append(value), urgent=sent % 3 == 0
            ):
                sent += 1
            assert executor.wait(PATIENCE_S)
            executor.poll()
        assert sorted(ends) == list(range(5000))
        assert executor.close(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval)


def test_work_within_a_time_ends_with_its_value_or_its_error_or_is_left_behind() -> None:
    assert run_within("test", lambda: 3, 20.0) == (3, None)
    fault = ValueError("no")

    def fail() -> int:
        raise fault

    assert run_within("test", fail, 20.0) == (None, fault)
    release = threading.Event()
    assert run_within("test", lambda: release.wait(20.0), 0.0) is None
    release.set()
