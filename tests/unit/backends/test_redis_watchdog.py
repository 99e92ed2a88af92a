"""The time limit of a call: it interrupts, again and again, and its error replaces whatever the call ended in."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstow.backends.redis.watchdog import Watchdog
from kvstow.runtime import SystemClock

SOON_S = 0.02
LONG_S = 10.0


class Calls:
    """An interruption that sets ``reached`` after ``enough`` calls."""

    def __init__(self, enough: int = 1) -> None:
        self._left = enough
        self.reached = threading.Event()

    def __call__(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.reached.set()
        raise ValueError("it raced with the call")


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    watchdog = Watchdog(SystemClock(), harmless=(ValueError,))
    yield watchdog
    watchdog.close()


def test_a_call_within_its_time_is_left_alone(watchdog: Watchdog) -> None:
    calls = Calls()
    for _ in range(3):
        with watchdog.limit(LONG_S, calls):
            pass
    assert not calls.reached.is_set()


def test_a_call_that_takes_longer_is_interrupted_until_it_ends(watchdog: Watchdog) -> None:
    calls = Calls(enough=3)
    with (
        pytest.raises(TimeoutError, match=r"not done in 0\.02 s"),
        watchdog.limit(SOON_S, calls),
    ):
        assert calls.reached.wait(LONG_S)


def fail_when_interrupted(calls: Calls, error: BaseException) -> None:
    calls.reached.wait(LONG_S)
    raise error


def test_the_errors_of_an_interrupted_call_are_its_time_out(watchdog: Watchdog) -> None:
    calls = Calls()
    with pytest.raises(TimeoutError) as caught, watchdog.limit(SOON_S, calls):
        fail_when_interrupted(calls, OSError("the socket is closed"))
    assert isinstance(caught.value.__cause__, OSError)


def test_an_interruption_of_the_thread_itself_passes(watchdog: Watchdog) -> None:
    calls = Calls()
    with pytest.raises(KeyboardInterrupt), watchdog.limit(SOON_S, calls):
        fail_when_interrupted(calls, KeyboardInterrupt())


def test_an_earlier_limit_than_the_one_that_is_waited_for_is_kept(watchdog: Watchdog) -> None:
    calls = Calls()
    with (
        watchdog.limit(LONG_S, Calls()),
        pytest.raises(TimeoutError),
        watchdog.limit(SOON_S, calls),
    ):
        assert calls.reached.wait(LONG_S)
