"""What a setting holds beyond its type: how it is read and shown."""

from __future__ import annotations

from typing import Final, Literal

SIZE: Final = "size"
SECRET: Final = "secret"
PATHS: Final = "paths"
NAMES: Final = "names"
OPTIONS: Final = "options"

PolicyName = Literal["lru", "s3fifo"]  # of kvstow.build.POLICIES
