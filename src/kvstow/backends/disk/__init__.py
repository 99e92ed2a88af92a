"""The disk tier: see ``store`` for what it is, ``names`` for its files, ``ledger`` for its size limit."""

from kvstow.backends.disk.check import frame_check
from kvstow.backends.disk.store import DiskOptions, DiskStore

__all__ = ["DiskOptions", "DiskStore", "frame_check"]
