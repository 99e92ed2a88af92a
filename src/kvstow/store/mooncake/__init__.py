"""The Mooncake tier: see ``store`` for what it is, ``connect`` for how its client is started.

Importing this package needs no client library; ``kvstow.store.mooncake.connect`` needs Mooncake's.
"""

from kvstow.store.mooncake.options import P2P, MooncakeOptions

__all__ = ["P2P", "MooncakeOptions"]
