"""What a setting holds beyond its type: how it is read and shown."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from kvstow.fields.values import Secret

SIZE: Final = "size"
SECRET: Final = "secret"
PATHS: Final = "paths"
NAMES: Final = "names"
OPTIONS: Final = "options"

PolicyName = Literal["lru", "s3fifo"]  # of kvstow.build.POLICIES

Size: TypeAlias = Annotated[int, Meta(extra={"kind": SIZE})]
"""Bytes, which users write with a unit."""

SecretText: TypeAlias = Annotated[Secret, Meta(extra={"kind": SECRET})]
"""Text that is never shown."""

Paths: TypeAlias = Annotated[tuple[str, ...], Meta(extra={"kind": PATHS})]
"""Absolute paths."""

Threads: TypeAlias = Annotated[
    int, Meta(ge=1, le=64, description="Reads and writes at the same time.")
]
