from pathlib import Path

from kvstow.runtime import SystemClock
from kvstow.store.base import Store
from kvstow.store.breaker import Breaker
from kvstow.store.memory import MemoryStore
from kvstow.testing.store_suite import StoreSuite
from tests.store.wrappers import check_forwards


class TestBreakerOverMemory(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return Breaker(MemoryStore(), SystemClock())


def test_it_forwards_every_method() -> None:
    check_forwards(lambda inner: Breaker(inner, SystemClock()))
