"""``kvstow verify-offload``: ``client`` asks, ``readings`` are what it heard, ``judge`` says what they mean."""

from kvstow.cli.verify.command import verify_offload

__all__ = ["verify_offload"]
