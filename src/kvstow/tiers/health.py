"""What the calls of a tier show of its store's health, as the owner's thread sees it."""

from __future__ import annotations

import logging
from typing import Final

from kvstow.errors import StoreRefused, StoreUnavailable, WorkDropped
from kvstow.metrics import Metrics
from kvstow.text import printable
from kvstow.tiers.breaker import Breaker, BreakerState, NotAsked

ERROR_CHARACTERS: Final = 300  # of a store's error that are logged
MAX_LOGGED_FAILURES: Final = 32  # kinds of failures, of which the first of each is logged
LOOK_UP: Final = "look-up"
READ: Final = "read"
WRITE: Final = "write"

logger = logging.getLogger("kvstow")


class TierHealth:
    """The state of a tier: of its ``breaker``, and of its calls that hang, which a breaker can't
    notice.

    It counts failures, logs the first of each kind and every change of state, and shows the state
    as a gauge.
    """

    def __init__(self, name: str, breaker: Breaker, metrics: Metrics) -> None:
        self._name = name
        self._breaker = breaker
        self._metrics = metrics
        self.hung_calls = 0
        self._shown = BreakerState.CLOSED
        self._last_errors: dict[str, str] = {}  # by operation
        self._logged_failures: set[tuple[str, str, int | None]] = set()
        self._bypassed = False  # as logged: trials in between, half-open, are not news
        self._not_written = False  # as logged
        metrics.gauge("tier_state", self._shown, tier=name)

    @property
    def state(self) -> BreakerState:
        """The worse of reads and writes; OPEN also while a call hangs."""
        return BreakerState.OPEN if self.hung_calls else self._breaker.state

    @property
    def settled(self) -> bool:
        """Whether everything works, and the gauge says so."""
        return self._shown is BreakerState.CLOSED

    @property
    def usable(self) -> bool:
        """Whether the tier may be looked up and read."""
        return not self.hung_calls and self._breaker.read_state is not BreakerState.OPEN

    @property
    def writable(self) -> bool:
        """Whether the tier may be written. A tier that can't be read is not written either."""
        return self.usable and self._breaker.write_state is not BreakerState.OPEN

    def failed(self, operation: str, chunks: int, error: BaseException | None) -> None:
        """Count a failed call of ``chunks`` chunks, and log the first of its kind."""
        reason = "error"
        if isinstance(error, StoreUnavailable):
            reason = "unavailable"
        elif isinstance(error, StoreRefused):
            reason = "refused"
        self._metrics.count("failed_chunks", chunks, tier=self._name, reason=reason)
        if error is None or isinstance(error, NotAsked | WorkDropped):
            return
        text = printable(str(error)[:ERROR_CHARACTERS])
        self._last_errors[operation] = text
        cause = error.__cause__ or error
        code = cause.errno if isinstance(cause, OSError) else None
        kind = (operation, type(error).__name__, code)
        if kind not in self._logged_failures and len(self._logged_failures) < MAX_LOGGED_FAILURES:
            self._logged_failures.add(kind)
            logger.warning(
                "Tier %s: a %s failed: %s (more failures of this kind are counted, not logged)",
                self._name,
                operation,
                text,
            )

    def show(self) -> None:
        """Log what has changed, and bring the gauge up to date."""
        self._log_reads()
        self._log_writes()
        state = self.state
        if state is not self._shown:
            self._shown = state
            self._metrics.gauge("tier_state", state, tier=self._name)

    def _log_reads(self) -> None:
        if not self._bypassed and not self.usable:
            self._bypassed = True
            error = self._last_errors.get(READ) or self._last_errors.get(LOOK_UP, "")
            why = "a call hangs" if self.hung_calls else f"its calls fail: {error}"
            logger.warning("Tier %s is bypassed: %s", self._name, why)
        elif (
            self._bypassed
            and not self.hung_calls
            and self._breaker.read_state is BreakerState.CLOSED
        ):
            self._bypassed = False
            logger.warning("Tier %s is in use again", self._name)

    def _log_writes(self) -> None:
        state = self._breaker.write_state
        if state is BreakerState.OPEN and not self._not_written and not self._bypassed:
            self._not_written = True
            logger.warning(
                "Tier %s is not written, it is still read: its writes fail: %s",
                self._name,
                self._last_errors.get(WRITE, ""),
            )
        elif state is BreakerState.CLOSED and self._not_written:
            self._not_written = False
            logger.warning("Tier %s is written again", self._name)
