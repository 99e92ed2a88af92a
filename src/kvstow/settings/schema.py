"""Every setting: its type, default and meaning. One struct a section; nothing here reads or checks anything.

A section is a field of ``Settings`` whose type is a struct; a key is ``chunk_size`` or ``memory.size``. To add
a setting, add a field: sources, ``kvstow config`` and the reference page follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from kvstow.settings.values import Secret, format_size, parse_paths, parse_size

SIZE: Final = "size"
SECRET: Final = "secret"
PATHS: Final = "paths"
DEFAULT_MEMORY_BYTES: Final = 5_000_000_000
DEFAULT_MIN_FREE_BYTES: Final = 1_000_000_000
DEFAULT_SCRUB_BYTES_S: Final = 10_000_000  # a terabyte in 28 hours
DEFAULT_PART_BYTES: Final = 16 << 20


class Memory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host-memory tier: shared memory that all ranks of one engine copy to and from."""

    size: Annotated[
        int,
        Meta(
            extra={"kind": SIZE},
            description="Host memory for KV, per engine: all tensor and pipeline parallel ranks together, not each. "
            "Several data parallel engines on one host take this much each.",
        ),
    ] = DEFAULT_MEMORY_BYTES
    policy: Annotated[
        Literal["lru", "s3fifo"],
        Meta(description="Which chunk makes room: the least recently used, or S3-FIFO, which keeps chunks used again."),
    ] = "lru"
    pool_dir: Annotated[
        str | None,
        Meta(
            description="Directory for the pool's file, such as /dev/shm or a hugetlbfs mount. "
            "Unset: anonymous shared memory, which leaves no file and doesn't count against /dev/shm.",
        ),
    ] = None


class Disk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk tier: files that outlive the engine, in directories that several engines may share."""

    paths: Annotated[
        tuple[str, ...] | None,
        Meta(
            extra={"kind": PATHS},
            description="Directories for chunks, on local NVMe, one for each disk. Unset: no disk tier.",
        ),
    ] = None
    size: Annotated[
        int | None,
        Meta(
            extra={"kind": SIZE},
            description="The most that all directories together hold, each an even part; needed with `disk.paths`. It "
            "holds for the directories: for all engines that share them, and for what earlier ones left there.",
        ),
    ] = None
    min_free: Annotated[
        int,
        Meta(
            extra={"kind": SIZE},
            description="What stays free on each directory's filesystem: chunks make room when others fill it.",
        ),
    ] = DEFAULT_MIN_FREE_BYTES
    spread: Annotated[
        Literal["key", "device"],
        Meta(
            description="Which of several directories a chunk goes to: by its key, or all of an engine's to one, "
            "chosen by its data parallel rank on the host."
        ),
    ] = "key"
    policy: Annotated[
        Literal["lru", "s3fifo"],
        Meta(description="Which chunk makes room, in each directory. After a restart the order is that of last use."),
    ] = "lru"
    admission: Annotated[
        Literal["all", "second_sight"],
        Meta(
            description="What is written: every chunk, or one that is offered a second time after memory dropped it, "
            "so that prompts that come once don't wear the disk."
        ),
    ] = "all"
    scrub_rate: Annotated[
        int,
        Meta(
            extra={"kind": SIZE},
            description="Bytes a second that are read and verified in the background, each directory; 0: none.",
        ),
    ] = DEFAULT_SCRUB_BYTES_S
    threads: Annotated[
        int, Meta(ge=1, le=64, description="Chunks that are read or written at the same time.")
    ] = 4


class Redis(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Redis or Valkey tier: a server that several engines, on several hosts, share."""

    url: Annotated[
        Secret | None,
        Meta(
            extra={"kind": SECRET},
            description="`redis://`, `rediss://` (TLS) or `unix://`, with user and password percent-encoded: "
            "`redis://user:password@host:6379/0`. Several hosts, with commas between them, for Sentinels or a "
            "Cluster's nodes. Unset: no Redis tier.",
        ),
    ] = None
    topology: Annotated[
        Literal["single", "sentinel", "cluster"],
        Meta(description="What the URL's hosts are: a server, Sentinels that know it, or nodes of a Cluster."),
    ] = "single"
    sentinel_service: Annotated[str, Meta(description="What the Sentinels call the server.")] = "mymaster"
    sentinel_username: Annotated[
        str | None, Meta(description="User at the Sentinels; the URL's is the server's.")
    ] = None
    sentinel_password: Annotated[
        Secret | None,
        Meta(extra={"kind": SECRET}, description="Password at the Sentinels; the URL's is the server's."),
    ] = None
    tls_ca: Annotated[
        str | None,
        Meta(description="File of the authorities that the server's certificate may be of. Unset: the system's."),
    ] = None
    tls_cert: Annotated[str | None, Meta(description="File of the client's certificate.")] = None
    tls_key: Annotated[str | None, Meta(description="File of the client's key.")] = None
    tls_check_hostname: Annotated[
        bool, Meta(description="The server's certificate must be of the host's name in the URL.")
    ] = True
    prefix: Annotated[
        str,
        Meta(description="Begins the name of every key. Engines share what they store under the same prefix."),
    ] = "kvstow:"
    ttl: Annotated[
        Annotated[int, Meta(ge=1, le=10**9)] | None,
        Meta(description="Seconds after which a chunk is gone. Unset: until the server evicts it."),
    ] = None
    part_size: Annotated[
        int,
        Meta(
            extra={"kind": SIZE},
            description="What is larger is stored in parts of this size; it must be below the server's "
            "proto-max-bulk-len (512MiB unless changed).",
        ),
    ] = DEFAULT_PART_BYTES
    timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="The longest that a command may take, its bytes included.")
    ] = 2000
    connect_timeout_ms: Annotated[
        int, Meta(ge=1, le=60_000, description="The longest that connecting to a server may take.")
    ] = 1000
    threads: Annotated[
        int, Meta(ge=1, le=64, description="Connections, each moving chunks at the same time as the others.")
    ] = 4


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine."""

    chunk_size: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=1 << 20)],
        Meta(
            description="Tokens that are stored, found and restored together: a multiple of vLLM's block size. "
            "`auto` is the smallest multiple whose KV is at least 4 MiB, at most 128 tokens or one block.",
        ),
    ] = "auto"
    save_decode: Annotated[
        bool,
        Meta(description="Store chunks of generated tokens too, not only of prompts; for conversations that continue."),
    ] = False
    fetch_deadline_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=60_000,
            description="The longest that a request waits, in all, for chunks that only a lower tier holds. "
            "Then it goes on with what has arrived and computes the rest.",
        ),
    ] = 200
    memory: Memory = Memory()
    disk: Disk = Disk()
    redis: Redis = Redis()


class Leaf(NamedTuple):
    """One setting. ``kind`` is empty, ``size``, ``secret`` or ``paths``."""

    key: str
    section: str
    name: str
    type: Any
    default: Any
    kind: str
    description: str

    @property
    def variable(self) -> str:
        return "KVSTOW_" + self.key.replace(".", "_").upper()

    @property
    def accepts(self) -> str:
        """What may be written, in words."""
        if self.kind == SIZE:
            return "size"
        if self.kind == SECRET:
            return "secret text"
        if self.kind == PATHS:
            return "paths, a list or comma-separated"
        return " or ".join(_words(self.type))

    @property
    def nullable(self) -> bool:
        return "null" in _words(self.type)

    def show(self, value: Any) -> str:
        """A value as users write it; secrets masked."""
        if value is None:
            return "null"
        if self.kind == SIZE:
            return format_size(value)
        if self.kind == PATHS:
            return ",".join(value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    def parse(self, raw: object, *, from_text: bool) -> Any:
        """The checked value of ``raw``. With ``from_text`` text stands for any type, ``null`` for none.

        Raises ValueError with what was expected, never with the value.
        """
        if self.nullable and (raw is None or (from_text and raw == "null")):
            return None
        if isinstance(raw, str) and not raw.strip():
            raise ValueError("it is empty")
        if self.kind == SIZE:
            return parse_size(raw)
        if self.kind == PATHS:
            return parse_paths(raw)
        if self.kind == SECRET:
            if not isinstance(raw, str):
                raise ValueError("expected text")
            return Secret(raw)
        try:
            return msgspec.convert(raw, self.type, strict=not from_text)
        except msgspec.ValidationError as error:
            raise ValueError(f"expected {self.accepts}") from error


def leaves(root: type[Struct] = Settings, section: str = "") -> Iterator[Leaf]:
    """Every setting of ``root``, in the order of its fields."""
    hints = get_type_hints(root, include_extras=True)
    for field in msgspec.structs.fields(root):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from leaves(hint, field.name)
            continue
        metas = [m for m in get_args(hint)[1:] if isinstance(m, Meta)] if get_origin(hint) is Annotated else []
        text = next((m.description for m in metas if m.description), "")
        kind = next((str(m.extra["kind"]) for m in metas if m.extra), "")
        key = f"{section}.{field.name}" if section else field.name
        yield Leaf(key, section, field.name, hint, field.default, kind, text)


def _words(hint: Any) -> list[str]:
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        limits = [m for m in metas if isinstance(m, Meta) and m.ge is not None and m.le is not None]
        return [f"{word} from {m.ge} to {m.le}" for word in _words(inner) for m in limits] or _words(inner)
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    if get_args(hint):
        return [word for part in get_args(hint) for word in _words(part)]
    names = {int: "integer", bool: "true or false", str: "text", float: "number", type(None): "null"}
    return [names.get(hint, str(hint))]
