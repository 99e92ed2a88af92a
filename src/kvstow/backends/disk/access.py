"""Access to a data directory that may go away and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstow.backends.disk.ledger import LedgerGone
from kvstow.backends.disk.mount import MountedDirectory, attach
from kvstow.errors import StoreUnavailable


class DirectoryAccess:
    """Attaches to a data directory when an operation needs it, and again after it has gone.
    Thread-safe.

    ``on_attached`` is called each time, before any operation.
    """

    def __init__(self, path: str, *, direct: bool, on_attached: Callable[[], None]) -> None:
        self._path = path
        self._direct = direct
        self._on_attached = on_attached
        self._mount: MountedDirectory | None = None
        self._last_mount: MountedDirectory | None = None
        self._attaching = threading.Lock()

    def attach(self) -> MountedDirectory:
        """The directory, opened now if it is not. Raises ``OSError`` or a ``KVStowError``."""
        mount = self._mount
        if mount is not None:
            return mount
        if not self._attaching.acquire(blocking=False):
            raise StoreUnavailable(f"{self._path} is being attached")
        try:
            if self._mount is None:
                self._last_mount = attach(
                    self._path, direct=self._direct, previous=self._last_mount
                )
                self._on_attached()
                self._mount = self._last_mount
            return self._mount
        finally:
            self._attaching.release()

    def _attach_to_read(self) -> MountedDirectory:
        """The directory, as it was attached before if it is still in place: attaching anew needs to
        write.

        Raises what ``attach`` raises.
        """
        last = self._last_mount
        if self._mount is None and last is not None and last.in_place():
            return last
        return self.attach()

    @contextmanager
    def operation(self, doing: str, *, reads_only: bool = False) -> Iterator[MountedDirectory]:
        """Give one operation the directory, and raise its faults as ``StoreUnavailable``.

        ``doing`` names the operation in errors. One that ``reads_only`` works on a disk that
        refuses every write.
        """
        try:
            yield self._attach_to_read() if reads_only else self.attach()
        except LedgerGone:
            self._mount = None
            raise
        except StoreUnavailable:
            self.check_in_place()
            raise
        except OSError as error:
            self.check_in_place()
            raise StoreUnavailable(f"{doing} in {self._path}: {error}") from error

    def check_in_place(self) -> None:
        """Detach if the directory is no longer at its path: the next operation attaches to what is
        there then."""
        mount = self._mount
        if mount is not None and not mount.in_place():
            self._mount = None

    def close(self) -> None:
        """Leave the directory."""
        mount = self._mount
        self._mount = None
        if mount is not None:
            mount.detach()
