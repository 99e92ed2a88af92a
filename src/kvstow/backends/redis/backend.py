"""The descriptor of the Redis tier."""

from __future__ import annotations

from typing import Final

from kvstow.backends.descriptor import Backend
from kvstow.backends.redis.checks import checks
from kvstow.backends.redis.open import check, open_store
from kvstow.backends.redis.settings import RedisSettings

BACKEND: Final = Backend(
    name="redis", section=RedisSettings, switch="url", check=check, open=open_store, checks=checks
)
