"""Settings of the host-memory tier."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from kvstow.fields.kinds import PolicyName, Size

DEFAULT_MEMORY_BYTES: Final = 5_000_000_000


class MemorySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host-memory tier: shared memory that all ranks of one engine copy to and from."""

    size: Annotated[
        Size,
        Meta(
            description="Host memory for KV, per engine: all tensor and pipeline parallel ranks together, not each. "
            "Several data parallel engines on one host take this much each."
        ),
    ] = DEFAULT_MEMORY_BYTES
    policy: Annotated[
        PolicyName,
        Meta(
            description="Which chunk makes room: the least recently used, or S3-FIFO, which keeps chunks used again."
        ),
    ] = "lru"
    pool_dir: Annotated[
        str | None,
        Meta(
            description="Directory for the pool's file, such as /dev/shm or a hugetlbfs mount. "
            "Unset: anonymous shared memory, which leaves no file and doesn't count against /dev/shm."
        ),
    ] = None
