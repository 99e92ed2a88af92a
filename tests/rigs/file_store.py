"""A slow, blocking Store of one file a value, for tests. The product's disk tier is another one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstow.backends.base import MISSING, REJECTED, Buffer, Done, Outcome
from kvstow.errors import StoreUnavailable
from kvstow.key import ChunkKey


class FileStore:
    """Values are files of mode 0600 in a directory of mode 0700, named by the key's digest.

    A value is written to a temporary file of its own and published with ``os.link``, which replaces nothing:
    no reader sees a part, the first one wins, and what is published outlives a SIGKILL of this process.
    ``before(op)`` runs first in each call, on the caller's thread: a gate, a delay, an exception.
    ``delay_s`` blocks each call for so long, where a hook cannot be passed.
    """

    def __init__(
        self, root: Path, *, before: Callable[[str], None] | None = None, delay_s: float = 0.0
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = root
        self._before = before
        self._delay_s = delay_s
        self._serial = 0
        self._lock = threading.Lock()

    def path(self, key: ChunkKey) -> Path:
        return self._root / key.digest().hex()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._block("contains")
        return [self.path(key).exists() for key in keys]

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        self._block("read")
        return [self._read(self.path(key), buffer) for key, buffer in items]

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        self._block("write")
        return [self._write(self.path(key), parts) for key, parts in items]

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._block("delete")
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is held between calls."""

    def _block(self, op: str) -> None:
        if self._before is not None:
            self._before(op)
        if self._delay_s > 0:
            threading.Event().wait(self._delay_s)

    @staticmethod
    def _read(path: Path, buffer: Buffer) -> Outcome:
        try:
            with path.open("rb", buffering=0) as file:
                length = os.fstat(file.fileno()).st_size
                if length > len(buffer):
                    return REJECTED
                at = 0
                while at < length and (got := file.readinto(buffer[at:length])):
                    at += got
                return Done(at)
        except FileNotFoundError:
            return MISSING
        except OSError as error:
            raise StoreUnavailable(f"reading {path}: {error}") from error

    def _write(self, path: Path, parts: Sequence[Buffer]) -> Outcome:
        with self._lock:
            self._serial += 1
            temporary = path.with_name(f".{os.getpid()}.{id(self)}.{self._serial}")
        try:
            length = 0
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb", buffering=0) as file:
                for part in parts:
                    at = 0
                    while at < len(part):
                        at += file.write(part[at:]) or 0
                    length += at
            os.link(temporary, path)
            return Done(length)
        except FileExistsError:
            return REJECTED
        except OSError as error:
            raise StoreUnavailable(f"writing {path}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)
