"""The descriptor of the Objects tier."""

from __future__ import annotations

from typing import Final

from kvstow.backends.descriptor import Backend
from kvstow.backends.objects.checks import checks
from kvstow.backends.objects.open import check, open_store
from kvstow.backends.objects.settings import ObjectsSettings

BACKEND: Final = Backend(
    name="objects",
    section=ObjectsSettings,
    switch="url",
    check=check,
    open=open_store,
    checks=checks,
)
