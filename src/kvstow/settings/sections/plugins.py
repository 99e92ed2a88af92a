"""Settings of tiers that other packages bring."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvstow.fields.kinds import NAMES, OPTIONS, Threads
from kvstow.fields.values import Options


class PluginsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tiers of other packages, below kvstow's own."""

    stores: Annotated[
        tuple[str, ...] | None,
        Meta(
            extra={"kind": NAMES},
            description="Stores of other packages, each a tier: a name that an installed package has registered as "
            "entry point of group `kvstow.stores`, or `name=module:function`. They are asked in this order, after all "
            "others.",
        ),
    ] = None
    options: Annotated[
        Options | None,
        Meta(
            extra={"kind": OPTIONS},
            description="What each of them is given, under its name: `{sqlite: {path: /mnt/nvme/chunks.db}}`. In a "
            "variable it is JSON. It may hold secrets and is never shown.",
        ),
    ] = None
    threads: Threads = 4
