"""The disk tier's store: ``store`` is its entry, ``names`` its files, ``ledger`` its size limit."""

from kvstow.backends.disk.check import frame_check
from kvstow.backends.disk.store import DiskOptions, DiskStore

__all__ = ["DiskOptions", "DiskStore", "frame_check"]
