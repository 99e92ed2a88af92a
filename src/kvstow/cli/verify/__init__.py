"""``kvstow verify-offload``.

``client`` asks the server, ``snapshot`` reads its metrics, ``diagnosis`` finds the likeliest cause.
"""

from kvstow.cli.verify.command import verify_offload

__all__ = ["verify_offload"]
