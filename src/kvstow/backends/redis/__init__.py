"""The Redis and Valkey tier: ``store`` is the store, ``envelope`` the form of its values, ``session`` its commands.

Importing this package needs no client library; ``kvstow.backends.redis.store`` needs redis-py.
"""

from kvstow.backends.redis.options import (
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    RedisOptions,
    Tls,
    parse_address,
)

__all__ = ["MAX_PART_BYTES", "MIN_PART_BYTES", "RedisOptions", "Tls", "parse_address"]
