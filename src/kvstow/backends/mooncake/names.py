"""Names that calls of this process are using now."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstow.errors import StoreUnavailable


class NamesInUse:
    """Keeps calls apart that must not use a name at the same time. Thread-safe.

    A name is never read while it is deleted, and is written and deleted by one call at a time.

    Args:
        limit_s: The longest that a call waits for others, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._readers: Counter[str] = Counter()
        self._writing: set[str] = set()
        self._deleting: set[str] = set()

    @contextmanager
    def reading(self, names: Sequence[str]) -> Iterator[None]:
        """Waits until none of ``names`` is being deleted.

        Raises ``StoreUnavailable`` after ``limit_s``.
        """
        with self._changed:
            self._wait_until(lambda: self._deleting.isdisjoint(names))
            self._readers.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._readers.subtract(names)
                self._readers = +self._readers  # drops the names that are read no more
                self._changed.notify_all()

    @contextmanager
    def writing(self, names: Sequence[str]) -> Iterator[list[int]]:
        """Yields the positions of the names that no other call writes now."""
        mine: list[int] = []
        with self._changed:
            for i, name in enumerate(names):
                if name not in self._writing:
                    self._writing.add(name)
                    mine.append(i)
        try:
            yield mine
        finally:
            with self._changed:
                self._writing.difference_update([names[i] for i in mine])

    @contextmanager
    def deleting(self, names: Sequence[str]) -> Iterator[None]:
        """Waits until no other call reads or deletes ``names``. Raises as ``reading`` does."""
        with self._changed:
            self._wait_until(lambda: self._deleting.isdisjoint(names))
            self._deleting.update(names)
        try:
            with self._changed:
                self._wait_until(lambda: not any(name in self._readers for name in names))
            yield
        finally:
            with self._changed:
                self._deleting.difference_update(names)
                self._changed.notify_all()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        if not self._changed.wait_for(condition, self._limit_s):
            raise StoreUnavailable(f"another call has used the chunk for {self._limit_s:g} s")
