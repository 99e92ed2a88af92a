"""Fault injection: a Store wrapper that delays, blocks, raises, truncates and corrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstow.backends.base import Buffer, Done, Outcome, Store
from kvstow.errors import StoreUnavailable
from kvstow.key import ChunkKey

Op = Literal["contains", "read", "write", "delete", "close"]


class Gate:
    """Blocks its callers until ``release()``. A test waits for their arrival without sleeping."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._arrived = 0

    def __call__(self) -> None:
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open)

    def release(self) -> None:
        """Let all callers go on, later ones too."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_arrived(self, count: int = 1, timeout_s: float = 30.0) -> bool:
        """Wait for ``count`` callers. Returns False if they did not arrive within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._arrived >= count, timeout_s)


@dataclass(frozen=True)
class Fault:
    """A fault, and the calls in which it happens.

    It happens in calls of operation ``op`` with ``key``, of which ``calls`` selects some, counted
    from 0; None matches all. It calls ``delay`` (a ``Gate``, or any function) and then raises
    ``error``. With ``short_by`` or ``flip_at`` it also does the operation before it raises: with
    ``short_by`` bytes cut off and byte ``flip_at`` inverted, in the buffer of a read, or in what a
    write passes on. So ``Fault("write", short_by=n, error=...)`` is a write that leaves part of a
    value and fails.
    """

    op: Op | None = None
    key: ChunkKey | None = None
    calls: range | None = None
    delay: Callable[[], None] | None = None
    short_by: int = 0
    flip_at: int | None = None
    error: Exception | None = None

    @property
    def changes_bytes(self) -> bool:
        """Whether the operation is done with other bytes."""
        return self.short_by > 0 or self.flip_at is not None


def unavailable(
    op: Op | None = None, key: ChunkKey | None = None, calls: range | None = None
) -> Fault:
    """A fault that raises ``StoreUnavailable``."""
    return Fault(op, key, calls, error=StoreUnavailable("injected"))


class FaultStore:
    """Forwards to ``store`` with ``faults``, which may be changed between calls.

    ``calls`` counts the calls of each operation.
    """

    def __init__(self, store: Store, faults: Iterable[Fault] = ()) -> None:
        self.faults = list(faults)
        self.calls: dict[str, int] = {}
        self._store = store
        self._matched: dict[int, int] = {}
        self._lock = threading.Lock()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._before("contains", keys)
        return self._store.contains(keys)

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        due = self._before("read", [key for key, _ in items])
        outcomes = self._store.read(items)
        for fault in due:
            for i, (key, buffer) in enumerate(items):
                outcome = outcomes[i]
                if fault.key in (None, key) and isinstance(outcome, Done):
                    outcomes[i] = Done(max(0, outcome.length - fault.short_by))
                    if fault.flip_at is not None:
                        buffer[fault.flip_at] ^= 0xFF
        self._after(due)
        return outcomes

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        due = self._before("write", [key for key, _ in items])
        for fault in due:
            items = [
                (k, [_damaged(parts, fault)] if fault.key in (None, k) else parts)
                for k, parts in items
            ]
        outcomes = self._store.write(items)
        self._after(due)
        return outcomes

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._before("delete", keys)
        self._store.delete(keys)

    def close(self) -> None:
        self._before("close", ())
        self._store.close()

    def _before(self, op: Op, keys: Sequence[ChunkKey]) -> list[Fault]:
        """Delay and raise. Returns the faults that change the operation's bytes."""
        due = []
        with self._lock:
            self.calls[op] = self.calls.get(op, 0) + 1
            for fault in self.faults:
                if fault.op in (None, op) and (fault.key is None or fault.key in keys):
                    seen = self._matched[id(fault)] = self._matched.get(id(fault), -1) + 1
                    if fault.calls is None or seen in fault.calls:
                        due.append(fault)
        for fault in due:
            if fault.delay is not None:
                fault.delay()
            if fault.error is not None and not fault.changes_bytes:
                raise fault.error
        return [fault for fault in due if fault.changes_bytes]

    @staticmethod
    def _after(due: Iterable[Fault]) -> None:
        for fault in due:
            if fault.error is not None:
                raise fault.error


def _damaged(parts: Sequence[Buffer], fault: Fault) -> Buffer:
    value = bytearray(b"".join(parts))
    if fault.flip_at is not None:
        value[fault.flip_at] ^= 0xFF
    return memoryview(value)[: max(0, len(value) - fault.short_by)]
