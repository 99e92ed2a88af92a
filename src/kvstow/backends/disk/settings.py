"""Settings of the disk tier."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from kvstow.fields.codec import RAW, Codec
from kvstow.fields.kinds import Paths, PolicyName, Size, Threads

DEFAULT_MIN_FREE_BYTES: Final = 1_000_000_000
DEFAULT_SCRUB_BYTES_S: Final = 10_000_000  # a terabyte in 28 hours


class DiskSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk tier: files that outlive the engine, in directories that several engines may share."""

    paths: Annotated[
        Paths | None,
        Meta(
            description="Directories for chunks, on local NVMe, one for each disk. Unset: no disk tier."
        ),
    ] = None
    size: Annotated[
        Size | None,
        Meta(
            description="The most that all directories together hold, each an even part; needed with `disk.paths`. It "
            "holds for the directories: for all engines that share them, and for what earlier ones left there."
        ),
    ] = None
    min_free: Annotated[
        Size,
        Meta(
            description="What stays free on each directory's filesystem: chunks make room when others fill it."
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
        PolicyName,
        Meta(
            description="Which chunk makes room, in each directory. After a restart the order is that of last use."
        ),
    ] = "lru"
    admission: Annotated[
        Literal["all", "second_sight"],
        Meta(
            description="What is written: every chunk, or one that is offered a second time after memory dropped it, "
            "so that prompts that come once don't wear the disk."
        ),
    ] = "all"
    scrub_rate: Annotated[
        Size,
        Meta(
            description="Bytes a second that are read and verified in the background, each directory; 0: none."
        ),
    ] = DEFAULT_SCRUB_BYTES_S
    codec: Codec = RAW
    threads: Threads = 4
