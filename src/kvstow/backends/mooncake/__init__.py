"""The Mooncake tier: see ``store`` for what it is, ``connect`` for how its client is started.

Importing this package needs no client library; ``kvstow.backends.mooncake.connect`` needs Mooncake's.
"""

from kvstow.backends.mooncake.options import OLD_PORTS, P2P, MooncakeOptions, rpc_ports

__all__ = ["OLD_PORTS", "P2P", "MooncakeOptions", "rpc_ports"]
