"""Digests of files: a model's weights by samples, an adapter's files whole. BLAKE3, remembered by inode, size and
modification time, so that asking again costs a ``stat`` a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from blake3 import blake3

from kvstow.runtime import Clock, Executor, SystemClock

SAMPLE_BYTES: Final = 4096
SAMPLES: Final = 1024  # of a file whose tensors are not known
MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own limit
READ_BYTES: Final = 1 << 20
MAX_ADAPTER_BYTES: Final = 4 << 30
MAX_READING_S: Final = (
    10.0  # a request waits so long for its adapter's files to be read; vLLM reads them too
)
MAX_REMEMBERED: Final = 4096  # files; some 200 bytes each

WEIGHTS: Final = (
    ".safetensors",
    ".bin",
    ".pt",
    ".gguf",
)  # the first kind that is there is what vLLM loads
_TRAINING: Final = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)
_ADAPTER: Final = (".json", ".safetensors", ".bin", ".pt")

_remembered: dict[tuple[object, ...], bytes] = {}


class Weights(NamedTuple):
    """``digest`` over the names and samples of ``files`` files of ``size_bytes`` bytes in all."""

    digest: str
    files: int
    size_bytes: int


def weights_digest(path: str, load_format: str = "auto") -> Weights | None:
    """Digest of the weight files at ``path``, a directory or one file. None: there are none.

    Of each file its size, its header and 4 KiB from the middle of every tensor (safetensors; other formats: evenly
    spaced samples and both ends), so that a fine-tune that changes a few layers differs, in seconds. Not a proof:
    whoever can write the files can change bytes between the samples. Raises OSError.
    """
    files = _weight_files(path, load_format)
    if not files:
        return None
    hasher, size = blake3(), 0
    for name, file in files:
        hasher.update(f"{len(name.encode())}:{name}".encode())
        hasher.update(_remember(file, _sampled))
        size += os.stat(file).st_size
    return Weights(hasher.hexdigest(), len(files), size)


def lora_digest(path: str) -> bytes | None:
    """Digest of the content of an adapter's files. None: not a local directory with an adapter, unreadable, or larger
    than ``MAX_ADAPTER_BYTES`` (then its KV has no identity, and is neither loaded nor stored)."""
    try:
        files = _adapter_files(path)
        if not files:
            return None
        hasher = blake3()
        for name, file in files:
            hasher.update(f"{len(name.encode())}:{name}".encode())
            hasher.update(_remember(file, _whole))
    except (OSError, ValueError):  # ValueError: a path with a NUL in it
        return None
    return hasher.digest()


def _adapter_files(path: str) -> list[tuple[str, str]]:
    """Name and path of each of an adapter's files; none if it isn't one, or too large."""
    folder = os.path.expanduser(path)
    names = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_file() and entry.name.endswith(_ADAPTER)
    )
    files = [(name, os.path.join(folder, name)) for name in names]
    if (
        "adapter_config.json" not in names
        or sum(os.stat(file).st_size for _, file in files) > MAX_ADAPTER_BYTES
    ):
        return []
    return files


def _unread(path: str) -> bool:
    """Whether an adapter's digest takes more than a ``stat`` a file."""
    try:
        return any(
            _remembered_as(_whole, os.stat(file)) not in _remembered
            for _, file in _adapter_files(path)
        )
    except (OSError, ValueError):
        return False


class Adapters:
    """Digests of adapters, as they were when first asked for. None ever after for one whose files have changed since:
    which of the two vLLM computes with can't be known from here, and its own cache, which goes by name and path, may
    give out KV of the older one.

    With an ``executor`` files are read there, never by the caller, who asks ``reading`` first."""

    def __init__(self, executor: Executor | None = None, clock: Clock | None = None) -> None:
        self._first: dict[tuple[str, str], bytes] = {}
        self._executor = executor
        self._clock = clock or SystemClock()
        self._reading: dict[str, float] = {}  # paths, and since when

    def reading(self, path: str) -> bool:
        """Whether the adapter's files are being read: ask again. For ``MAX_READING_S``; then it has no digest yet."""
        if self._executor is None:
            return False
        self._executor.poll()
        now = self._clock.monotonic()
        if path not in self._reading:
            done = partial(self._read, path)
            if not _unread(path) or not self._executor.submit(partial(lora_digest, path), done):
                return False
            self._reading[path] = now
        return now - self._reading[path] < MAX_READING_S

    def _read(self, path: str, _digest: bytes | None, _error: BaseException | None) -> None:
        del self._reading[path]

    def digest(self, name: str, path: str) -> bytes | None:
        """``lora_digest`` of ``path``, if it is what it was."""
        digest = None if self._executor is not None and _unread(path) else lora_digest(path)
        if digest is None:
            return None
        if len(self._first) >= MAX_REMEMBERED and (name, path) not in self._first:
            del self._first[next(iter(self._first))]
        return digest if self._first.setdefault((name, path), digest) == digest else None


def _weight_files(path: str, load_format: str) -> list[tuple[str, str]]:
    """Name and path of each weight file, in order of name."""
    if os.path.isfile(path):
        return [(os.path.basename(path), path)]
    kinds: tuple[str, ...] = {"pt": (".pt",), "npcache": (".bin",)}.get(load_format, WEIGHTS)
    found = [
        (os.path.relpath(os.path.join(folder, name), path), os.path.join(folder, name))
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(kinds) and name not in _TRAINING
    ]
    for kind in kinds:
        if chosen := sorted(file for file in found if file[1].endswith(kind)):
            return chosen
    return []


def _remembered_as(digest: Callable[[int, int], bytes], stat: os.stat_result) -> tuple[object, ...]:
    return (digest, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _remember(path: str, digest: Callable[[int, int], bytes]) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        key = _remembered_as(digest, stat)
        value = _remembered.get(key)
        if value is None:
            value = digest(fd, stat.st_size)
            if len(_remembered) >= MAX_REMEMBERED:
                _remembered.clear()
            _remembered[key] = value
        return value
    finally:
        os.close(fd)


def _whole(fd: int, size: int) -> bytes:
    hasher = blake3(size.to_bytes(8, "little"))
    at = 0
    while piece := os.pread(fd, READ_BYTES, at):
        hasher.update(piece)
        at += len(piece)
    return hasher.digest()


def _sampled(fd: int, size: int) -> bytes:
    hasher = blake3(size.to_bytes(8, "little"))
    header = _safetensors_header(fd, size)
    if header is None:
        for piece in (
            os.pread(fd, READ_BYTES, 0),
            os.pread(fd, READ_BYTES, max(0, size - READ_BYTES)),
        ):
            hasher.update(piece)
        middles: Iterator[int] = iter(range(0, size, max(SAMPLE_BYTES, size // SAMPLES)))
    else:
        hasher.update(header)
        middles = _tensor_middles(header)
    for middle in middles:
        hasher.update(os.pread(fd, SAMPLE_BYTES, middle))
    return hasher.digest()


def _safetensors_header(fd: int, size: int) -> bytes | None:
    """Length and JSON header of a safetensors file; None if it isn't one."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        return None
    header = os.pread(fd, 8 + length, 0)
    return header if header[8:9] == b"{" else None


def _tensor_middles(header: bytes) -> Iterator[int]:
    """File offset of the sample of each tensor, in file order. Of a tensor of up to 4 KiB that is all of it."""
    try:
        entries = json.loads(header[8:])
        offsets = sorted(
            tuple(entry["data_offsets"])
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OSError(f"a safetensors header that cannot be read: {error}") from error
    for begin, end in offsets:
        yield len(header) + max(begin, (begin + end - SAMPLE_BYTES) // 2)
