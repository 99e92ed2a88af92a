"""How many seeds the random tests run. ``KVSTOW_TEST_SEEDS`` multiplies them, for long runs."""

from __future__ import annotations

import os


def seeds(count: int) -> range:
    return range(int(count * float(os.environ.get("KVSTOW_TEST_SEEDS", "1"))))
