import threading
from pathlib import Path

import pytest

from kvstow.backends.base import Done, Store
from kvstow.errors import StoreUnavailable
from kvstow.testing.faults import Fault, FaultStore, Gate, unavailable
from kvstow.testing.memory_store import MemoryStore
from kvstow.testing.store_suite import StoreSuite, make_key, read_one, write_one
from tests.store.wrappers import check_forwards


class TestFaultStoreWithoutFaults(StoreSuite):
    def make_store(self, tmp_path: Path) -> Store:
        return FaultStore(MemoryStore())


def test_it_forwards_every_method() -> None:
    check_forwards(FaultStore)


def test_a_fault_hits_its_operation_key_and_calls_only() -> None:
    store = FaultStore(MemoryStore(), [unavailable("read", make_key(1), range(1, 2))])
    for i in range(2):
        write_one(store, make_key(i), b"v%d" % i)
    assert read_one(store, make_key(1), 4)[1] == b"v1"
    assert read_one(store, make_key(0), 4)[1] == b"v0"
    with pytest.raises(StoreUnavailable):
        read_one(store, make_key(1), 4)
    assert read_one(store, make_key(1), 4)[1] == b"v1"
    assert store.contains([make_key(1)]) == [True]


def test_bytes_are_cut_and_flipped() -> None:
    inner = MemoryStore()
    store = FaultStore(inner, [Fault("read", short_by=1), Fault("read", flip_at=0)])
    write_one(store, make_key(0), b"\x00bc")
    assert read_one(store, make_key(0), 4) == (Done(2), b"\xffb")
    store.faults = [Fault("write", make_key(1), short_by=2, error=StoreUnavailable("half"))]
    with pytest.raises(StoreUnavailable):
        write_one(store, make_key(1), b"abcd")
    assert read_one(inner, make_key(1), 4)[1] == b"ab"


def test_a_gate_holds_calls_until_released() -> None:
    gate = Gate()
    store = FaultStore(MemoryStore(), [Fault("write", delay=gate)])
    thread = threading.Thread(target=write_one, args=(store, make_key(0), b"x"))
    thread.start()
    assert gate.wait_arrived()
    assert store.contains([make_key(0)]) == [False]
    gate.release()
    thread.join()
    assert store.contains([make_key(0)]) == [True]
