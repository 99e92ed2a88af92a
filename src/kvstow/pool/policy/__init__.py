"""Eviction policies, and the names that settings give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvstow.pool.policy.base import Policy
from kvstow.pool.policy.lru import LRU
from kvstow.pool.policy.s3fifo import S3FIFO

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {"lru": LRU, "s3fifo": S3FIFO}
