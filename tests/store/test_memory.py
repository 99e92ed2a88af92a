from pathlib import Path

from kvstow.backends.base import REJECTED, Done, Store
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import StoreSuite, make_key, write_one


class TestMemoryStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return MemoryStore()


def test_a_full_store_rejects_and_takes_again_after_a_delete() -> None:
    store = MemoryStore(capacity_bytes=10)
    assert write_one(store, make_key(0), b"123456") == Done(6)
    assert write_one(store, make_key(1), b"12345") == REJECTED
    assert store.contains([make_key(0), make_key(1)]) == [True, False]
    store.delete([make_key(0)])
    assert store.used_bytes == 0
    assert write_one(store, make_key(1), b"12345") == Done(5)
