"""The descriptor of the Mooncake tier."""

from __future__ import annotations

from typing import Final

from kvstow.backends.descriptor import Backend
from kvstow.backends.mooncake.checks import checks
from kvstow.backends.mooncake.open import check, open_store
from kvstow.backends.mooncake.settings import MooncakeSettings

BACKEND: Final = Backend(
    name="mooncake",
    section=MooncakeSettings,
    switch="master",
    check=check,
    open=open_store,
    checks=checks,
    pins_memory=lambda section: section.protocol == "rdma",
)
