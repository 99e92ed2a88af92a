import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstow.backends.base import Store
from kvstow.runtime import SystemClock
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import StoreSuite
from kvstow.tiers.breaker import Breaker
from kvstow.tiers.limit import WriteLimit
from kvstow.tiers.retry import Retry
from tests.store.wrappers import check_forwards

WRAPPERS: list[Callable[[Store], Store]] = [
    lambda inner: Breaker(inner, SystemClock()),
    lambda inner: Retry(inner, SystemClock(), random.Random(0)),
    lambda inner: WriteLimit(inner, SystemClock(), bytes_s=1e12),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_it_forwards_every_method(wrap: Callable[[Store], Store]) -> None:
    check_forwards(wrap)


class TestAllOfThem(StoreSuite):
    """As they are composed for a remote tier."""

    rounds = 10

    def make_store(self, tmp_path: Path) -> Store:
        store: Store = MemoryStore()
        for wrap in reversed(WRAPPERS):
            store = wrap(store)
        return store
