"""Digests of files: a model's weights by samples, an adapter's files whole.

Digests are BLAKE3. They are remembered by inode, size and time stamps, so that a second digest of
a file costs one ``stat``.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from stat import S_ISLNK
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Final, NamedTuple

from blake3 import blake3

from kvstow.runtime import Clock, Executor, SystemClock
from kvstow.vllm import plugin

logger = logging.getLogger("kvstow")

SAMPLE_BYTES: Final = 4096
SAMPLES: Final = 1024  # of a file whose tensors are not known
MAX_HEADER_BYTES: Final = 100 << 20  # safetensors' own limit
READ_BYTES: Final = 1 << 20
MAX_ADAPTER_BYTES: Final = 4 << 30
# A request waits this long for its adapter's files to be read. vLLM reads them too.
MAX_READING_S: Final = 10.0
MAX_LINKS: Final = 40  # in a path, as in Linux
MAX_REMEMBERED: Final = 4096  # files; some 200 bytes each
# File systems stamp changes with a clock that lags behind by a tick, and file servers have clocks
# of their own.
CLOCK_SKEW_NS: Final = 1_000_000_000

# vLLM loads the files of the first kind that a model's directory holds.
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
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
    """Digest over the names and samples of a model's weight files, and their size in all."""

    digest: str
    files: int
    size_bytes: int


def loading_began_ns(clock: Clock) -> int:
    """A time before which vLLM has read no file for this engine, in nanoseconds since the epoch.

    It is the start of this process, which runs the engine core, or the time when vLLM loaded its
    plug-ins in it if that was later. Workers are started after both.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot, as is the next
    uptime_s = clock_gettime(CLOCK_BOOTTIME)  # a container may have a /proc/uptime of its own
    process_began_s = clock.wall() - max(0.0, uptime_s - started_s)
    return int(max(process_began_s, plugin.registered_s) * 1e9)


def _is_immutable(folder: str) -> bool:
    """Whether ``folder`` is a snapshot in a Hugging Face cache.

    Its files are links to blobs that are named by their content and never rewritten. vLLM may
    download them while the engine starts.
    """
    snapshots, _ = os.path.split(folder.rstrip("/"))
    repository, name = os.path.split(snapshots)
    return name == "snapshots" and os.path.basename(repository).startswith("models--")


def weights_digest(path: str, load_format: str = "auto") -> Weights | None:
    """Digest the weight files at ``path``, a directory or one file. None if there are none.

    Each file counts with its size, its header and 4 KiB from the middle of every tensor. Formats
    other than safetensors count with evenly spaced samples and both ends. So a fine-tune that
    changes a few layers has another digest, which takes seconds. It is no proof: a writer of the
    files can change bytes between the samples. Raises OSError.
    """
    files = _weight_files(path, load_format)
    if not files:
        return None
    hasher = blake3()
    for name, file in files:
        hasher.update(f"{len(name.encode())}:{name}".encode())
        hasher.update(_remember(file, _sampled))
    size_bytes = sum(os.stat(file).st_size for _, file in files)
    return Weights(hasher.hexdigest(), len(files), size_bytes)


def weights_changed_since(path: str, load_format: str, since_ns: int) -> bool:
    """Whether weight or Python files at ``path`` may have changed after ``since_ns``.

    Raises OSError.
    """
    code = [(file.name, str(file)) for file in sorted(Path(path).glob("*.py"))]
    return _changed_since(path, _weight_files(path, load_format) + code, since_ns)


def file_digest(path: str) -> str:
    """Hexadecimal digest of one whole file. Raises OSError."""
    return _remember(path, _whole).hex()


def code_digest(folder: str) -> str:
    """Hexadecimal digest of the Python files in ``folder``, which a model's repository may bring."""
    hasher = blake3()
    for file in sorted(Path(folder).glob("*.py")):
        hasher.update(f"{len(file.name.encode())}:{file.name}".encode())
        hasher.update(_remember(str(file), _whole))
    return hasher.hexdigest()


def lora_digest(path: str) -> bytes | None:
    """Digest the content of an adapter's files.

    None if ``path`` is no local directory with an adapter, cannot be read, or holds more than
    ``MAX_ADAPTER_BYTES``. Such an adapter's KV has no identity.
    """
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


def adapter_changed_since(path: str, since_ns: int) -> bool:
    """Whether an adapter's files may have changed after ``since_ns``, or cannot be read."""
    try:
        return _changed_since(os.path.expanduser(path), _adapter_files(path), since_ns)
    except (OSError, ValueError):
        return True


def _changed_since(folder: str, files: Sequence[tuple[str, str]], since_ns: int) -> bool:
    """Whether any of these files may have been written, renamed, added or removed since then.

    A file's ctime, which no program can set, moves with its content and with a rename over it. A
    directory's mtime moves when an entry is added or removed.
    """
    limit_ns = since_ns - CLOCK_SKEW_NS
    if _path_changed_since(os.path.abspath(folder), limit_ns):
        return True
    if _is_immutable(folder):
        if _branch_moved_since(Path(folder), limit_ns):
            return True
        files = [(name, path) for name, path in files if not os.path.islink(path)]
        if not files:
            return False
    paths = [path for _, path in files]
    changes = [os.stat(path).st_ctime_ns for path in paths]
    changes += [os.stat(parent).st_mtime_ns for parent in {os.path.dirname(p) for p in paths}]
    return not changes or max(changes) > limit_ns


def _branch_moved_since(snapshot: Path, limit_ns: int) -> bool:
    """Whether a branch may have led to another snapshot in a Hugging Face cache before then.

    With one snapshot it cannot have: that was downloaded during the start.
    """
    if len(os.listdir(snapshot.parent)) < 2:
        return False
    branches = (snapshot.parent.parent / "refs").rglob("*")
    return any(
        ref.is_file() and ref.stat().st_ctime_ns > limit_ns and ref.read_text() == snapshot.name
        for ref in branches
    )


def _path_changed_since(path: str, limit_ns: int) -> bool:
    """Whether ``path`` may have led elsewhere before ``limit_ns``.

    That is so if a symbolic link on the way is new, or a directory was renamed. A rename moves a
    directory's ctime alone; an entry that comes or goes moves its mtime to the same time.
    """
    for _ in range(MAX_LINKS):
        link = None
        for part in (path, *map(str, Path(path).parents)):
            stat = os.lstat(part)
            is_link = S_ISLNK(stat.st_mode)
            if stat.st_ctime_ns > limit_ns and (is_link or stat.st_ctime_ns != stat.st_mtime_ns):
                return True
            link = part if is_link else link
        if link is None:
            return False
        # The link nearest to the root was the last one found.
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        path = os.path.normpath(os.path.join(target, os.path.relpath(path, link)))
    return True


def _adapter_files(path: str) -> list[tuple[str, str]]:
    """Name and path of each of an adapter's files. Empty if it isn't one, or is too large."""
    folder = os.path.expanduser(path)
    names = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_file() and entry.name.endswith(_ADAPTER)
    )
    files = [(name, os.path.join(folder, name)) for name in names]
    if "adapter_config.json" not in names:
        return []
    if sum(os.stat(file).st_size for _, file in files) > MAX_ADAPTER_BYTES:
        return []
    return files


def _unread(path: str) -> bool:
    """Whether an adapter's digest takes more than one ``stat`` a file."""
    try:
        return any(
            _remembered_as(_whole, os.stat(file)) not in _remembered
            for _, file in _adapter_files(path)
        )
    except (OSError, ValueError):
        return False


class _FirstSeen(NamedTuple):
    """An adapter as it was when first asked for.

    ``number`` is vLLM's for an adapter whose ``identity`` holds for this process only; else None.
    """

    content: bytes
    identity: bytes
    number: int | None


class Adapters:
    """Digests of LoRA adapters, as they were when first asked for.

    An adapter whose files have changed since then has no digest any more, not even when they change
    back. kvstow cannot know which version vLLM computes with, and vLLM's own cache may give out KV
    of the older one.

    An adapter whose files changed after ``since_ns`` may have been loaded before the change. Its
    digest holds for this process only: ``process_key`` is mixed into it. It ends
    when the adapter is loaded again, which vLLM does under another number.

    ``options`` is text that names the settings that decide how vLLM applies an adapter.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        clock: Clock | None = None,
        *,
        options: str = "",
        since_ns: int | None = None,
        process_key: bytes = b"",
        hashes_have_path: bool = True,
    ) -> None:
        """``executor`` reads the files, and callers ask ``reading`` first. None: callers read them.

        ``since_ns`` is the time before which vLLM had loaded nothing; None: no file is too new.
        ``hashes_have_path``: vLLM's block hashes contain an adapter's path. Without it vLLM's own cache
        gives out KV of an older adapter of the same name, so a name stands for one content only.
        """
        self._hashes_have_path = hashes_have_path
        # By name, and path if hashes have it; None: the files have changed.
        self._first: dict[tuple[str, str], _FirstSeen | None] = {}
        self._executor = executor
        self._clock = clock or SystemClock()
        self._options = options.encode()
        self._since_ns = since_ns
        self._process_key = process_key
        self._reading: dict[str, float] = {}  # path to the time when its reading began

    def reading(self, path: str) -> bool:
        """Whether the adapter's files are being read, and the caller shall ask again.

        False after ``MAX_READING_S``, when the adapter has no digest yet.
        """
        if self._executor is None:
            return False
        self._executor.poll()
        now = self._clock.monotonic()
        if path not in self._reading:
            if not _unread(path):
                return False
            if not self._executor.submit(partial(lora_digest, path), partial(self._read, path)):
                return False
            self._reading[path] = now
        return now - self._reading[path] < MAX_READING_S

    def _read(self, path: str, _digest: bytes | None, _error: BaseException | None) -> None:
        del self._reading[path]

    def digest(self, lora_request: object) -> bytes | None:
        """The adapter's digest. None if its KV has no identity, or its files are not read yet."""
        name = str(getattr(lora_request, "lora_name", ""))
        path = str(getattr(lora_request, "lora_path", ""))
        if getattr(lora_request, "tensorizer_config_dict", None):
            return None  # the weights come from elsewhere
        if self._executor is not None and _unread(path):
            return None
        found = lora_digest(path)
        if found is None:
            return None
        number = getattr(lora_request, "lora_int_id", None)
        key = (name, path if self._hashes_have_path else "")
        if key not in self._first:
            if len(self._first) >= MAX_REMEMBERED:
                del self._first[next(iter(self._first))]
            self._first[key] = self._see(lora_request, name, path, found)
        first = self._first[key]
        if first is None:
            return None
        if first.content != found or first.number not in (None, number):
            self._first[key] = None
            return None
        return first.identity

    def _see(self, lora_request: object, name: str, path: str, content: bytes) -> _FirstSeen:
        hasher = blake3(content)
        # How vLLM reads the files of a mixture of experts, and what it applies of them.
        hasher.update(b"3d" if getattr(lora_request, "is_3d_lora_weight", False) else b"2d")
        hasher.update(self._options)
        number = None
        if self._since_ns is not None and adapter_changed_since(path, self._since_ns):
            logger.warning(
                "The files of adapter %s (%s) changed after this engine started, so vLLM may have "
                "loaded them before the change. Its KV is found by this engine only, until a "
                "restart.",
                name,
                path,
            )
            hasher.update(self._process_key)
            number = getattr(lora_request, "lora_int_id", None)
        return _FirstSeen(content, hasher.digest(), number)


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
        chosen = sorted(file for file in found if file[1].endswith(kind))
        if chosen:
            return chosen
    return []


def _remembered_as(digest: Callable[[int, int], bytes], stat: os.stat_result) -> tuple[object, ...]:
    times = (stat.st_mtime_ns, stat.st_ctime_ns)
    return (digest, stat.st_dev, stat.st_ino, stat.st_size, *times)


def _remember(path: str, digest: Callable[[int, int], bytes]) -> bytes:
    """The file's digest, computed only if the file is not remembered."""
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
        hasher.update(os.pread(fd, READ_BYTES, 0))
        hasher.update(os.pread(fd, READ_BYTES, max(0, size - READ_BYTES)))
        samples: Iterator[int] = iter(range(0, size, max(SAMPLE_BYTES, size // SAMPLES)))
    else:
        hasher.update(header)
        samples = _tensor_middles(header)
    for offset in samples:
        hasher.update(os.pread(fd, SAMPLE_BYTES, offset))
    return hasher.digest()


def _safetensors_header(fd: int, size: int) -> bytes | None:
    """Length and JSON header of a safetensors file; None if it isn't one."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        return None
    header = os.pread(fd, 8 + length, 0)
    return header if header[8:9] == b"{" else None


def _tensor_middles(header: bytes) -> Iterator[int]:
    """File offset of each tensor's sample, in file order. A tensor of up to 4 KiB is one sample."""
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
