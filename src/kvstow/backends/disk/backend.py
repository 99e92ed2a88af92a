"""The descriptor of the Disk tier."""

from __future__ import annotations

from typing import Final

from kvstow.backends.descriptor import Backend
from kvstow.backends.disk.checks import checks
from kvstow.backends.disk.open import check, open_store
from kvstow.backends.disk.settings import DiskSettings

BACKEND: Final = Backend(
    name="disk", section=DiskSettings, switch="paths", check=check, open=open_store, checks=checks
)
