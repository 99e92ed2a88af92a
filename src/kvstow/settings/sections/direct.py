"""Settings of direct storage."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvstow.fields.kinds import Paths, PolicyName, Size

# A rank: what moves between two steps of the engine, of 50 ms and more.
FILE_STAGING_BYTES: Final = 256 << 20
RDS_STAGING_BYTES: Final = 2048 << 20  # a rank: rds_buffer_size of the RBLN documentation


class DirectSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Direct storage: KV between the device and NVMe, without a pool of host memory in between."""

    engine: Annotated[
        Literal["auto", "rds", "file"] | None,
        Meta(
            description="`rds`: RBLN NPUs and NVMe, past host memory; `file`: O_DIRECT files or block devices, through "
            "a staging area; `auto`: `rds` where it is available, else `file`. Unset: no direct storage. It takes the "
            "place of host memory, and has no lower tiers."
        ),
    ] = None
    path: Annotated[
        Paths | None,
        Meta(
            description="For `file`: a directory, in which each rank has a file; or a file or block device for each "
            "rank, in their order. Preallocated, on local NVMe."
        ),
    ] = None
    size: Annotated[
        Size | None,
        Meta(
            description="What direct storage holds, per engine: all ranks together. Needed with files. Unset: of block "
            "devices the whole; with `rds` NVMe until there is no more."
        ),
    ] = None
    staging_size: Annotated[
        Size | None,
        Meta(
            description="Memory through which KV passes, all ranks together: host memory with `file`, the device's "
            "with `rds`. Unset: of each rank 256MiB with `file`, 2GiB with `rds`, or four chunks if that is more."
        ),
    ] = None
    max_chunks: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 24)] | None,
        Meta(
            description="The most chunks that direct storage holds. Unset: what fits into `direct.size`."
        ),
    ] = None
    policy: Annotated[
        PolicyName,
        Meta(description="Which chunk makes room. After a restart the order is that of storing."),
    ] = "lru"
    failure_policy: Annotated[
        Literal["ignore", "raise"],
        Meta(
            description="What a failed read or write is. `ignore`: logged, and a miss. `raise`: the engine ends with "
            "an error, for tests of hardware."
        ),
    ] = "ignore"
    format: Annotated[
        bool,
        Meta(
            description="Use a file or block device in `direct.path` that holds something else: what is on it is "
            "lost. Without it only empty files and kvstow's own are used."
        ),
    ] = False
    threads: Annotated[
        int,
        Meta(ge=1, le=64, description="With `file`: reads and writes of a rank at the same time."),
    ] = 4
