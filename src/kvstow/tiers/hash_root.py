"""Notices engines that share a store and whose block hashes begin with another root.

Neither would ever find what the other stored, and a miss looks the same. So the first engine leaves an entry in the
store. Its key is derived from everything that KV depends on but the root, and its value is the root.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from kvstow.backends.base import Done, Store
from kvstow.backends.descriptor import HashRoot
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.key import ChunkKey, Namespace
from kvstow.runtime import Clock
from kvstow.text import printable
from kvstow.tiers.store_wrapper import StoreWrapper

A = TypeVar("A")
R = TypeVar("R")

CHECK_EVERY_S: Final = 30.0  # a server may be down at the start, or lose the entry
MAX_WORD_BYTES: Final = 200


def entry_key(root: HashRoot) -> ChunkKey:
    """Returns the key of the entry for the engines of ``root.group``."""
    return ChunkKey.build(Namespace.from_fields({"root of": root.group}), 0, b"root")


class RootCheck(StoreWrapper):
    """Forwards to ``store``; compares the hash root with the entry's before a call, every ``CHECK_EVERY_S``.

    ``on_difference`` is called once, with the other engines' root, on the thread of that call.
    """

    def __init__(
        self, store: Store, root: HashRoot, clock: Clock, on_difference: Callable[[str], None]
    ) -> None:
        super().__init__(store)
        self._key = entry_key(root)
        self._own = root.word.encode()[:MAX_WORD_BYTES]
        self._clock = clock
        self._on_difference = on_difference
        self._lock = threading.Lock()
        self._due_s = clock.monotonic()
        self._reported = False

    def check(self) -> None:
        """Compares now. Raises what the store raises when it can't be read."""
        self._due_s = self._clock.monotonic() + CHECK_EVERY_S
        first = self._read()
        if first is None:
            # A full store, or a user who may only read: other engines leave the entry.
            with suppress(StoreRefused, StoreUnavailable):
                self._store.write([(self._key, [memoryview(self._own)])])
            first = self._read()
        if first is not None and first != self._own and not self._reported:
            self._reported = True
            self._on_difference(printable(first.decode(errors="replace")))

    def _read(self) -> bytes | None:
        buffer = bytearray(MAX_WORD_BYTES)
        [found] = self._store.read([(self._key, memoryview(buffer))])
        return bytes(buffer[: found.length]) if isinstance(found, Done) else None

    def _call(self, method: Callable[[A], R], argument: A) -> R:
        if self._is_due():
            with suppress(StoreRefused, StoreUnavailable):
                self.check()
        return method(argument)

    def _is_due(self) -> bool:
        now_s = self._clock.monotonic()
        with self._lock:
            due = now_s >= self._due_s
            if due:
                self._due_s = now_s + CHECK_EVERY_S
        return due
