"""The disk tier: see ``store`` for what it is, ``names`` for its files, ``ledger`` for its size limit."""

from kvstow.store.disk.check import frame_check
from kvstow.store.disk.store import DiskOptions, DiskStore

__all__ = ["DiskOptions", "DiskStore", "frame_check"]
