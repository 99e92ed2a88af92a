"""The Store contract over Mooncake, from any memory and from a pool's."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvstow.backends.base import REJECTED, Buffer, Done, Outcome, Store
from kvstow.key import ChunkKey
from kvstow.pool.hostmem import HostMemory
from kvstow.testing.store_suite import StoreSuite, make_key, read_one, value_of, write_one
from tests.rigs.mooncake_server import MooncakeServer
from tests.store.mooncake_rig import need_mooncake, open_store

need_mooncake()

REGION = 9 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake")).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def shared(server: MooncakeServer) -> Iterator[Any]:
    """One client serves all tests, because closing one takes seconds."""
    store = open_store(server.master)
    yield store
    store.close()


def another(store: Any) -> Any:
    """Returns a store over the same client, with a prefix of its own, which does not close it."""
    from kvstow.backends.mooncake.store import MooncakeStore

    store.ping()
    mine = MooncakeStore(
        replace(store._options, prefix=f"t{os.urandom(6).hex()}/"),
        store._clock,
        lambda: (store._client, store._replicas),
    )
    mine._memory = store._memory
    mine.close = lambda: None  # type: ignore[method-assign]
    return mine


class TestMooncake(StoreSuite):
    """Values go through the client's buffer."""

    rounds = 10

    @pytest.fixture(autouse=True)
    def _shared(self, shared: Any) -> None:
        self.shared = shared

    def make_store(self, tmp_path: Path) -> Store:
        store: Store = another(self.shared)
        return store


class FromPool:
    """Moves every value through registered memory, as an engine does with its slots."""

    def __init__(self, store: Any, regions: queue.Queue[memoryview]) -> None:
        self._store, self._regions = store, regions
        self.contains, self.delete, self.close = store.contains, store.delete, store.close

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        region, at = self._regions.get(), 0
        slots = []
        for _, buffer in items:
            slots.append(region[at : at + len(buffer)])
            at += len(buffer)
        outcomes: list[Outcome] = self._store.read(
            [(key, slot) for (key, _), slot in zip(items, slots, strict=True)]
        )
        for (_, buffer), slot, outcome in zip(items, slots, outcomes, strict=True):
            if isinstance(outcome, Done):
                buffer[: outcome.length] = slot[: outcome.length]
        self._regions.put(region)
        return outcomes

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        region, at, slots = self._regions.get(), 0, []
        for key, parts in items:
            value = b"".join(parts)
            region[at : at + len(value)] = value
            slots.append((key, [region[at : at + len(value)]]))
            at += len(value)
        outcomes: list[Outcome] = self._store.write(slots)
        self._regions.put(region)
        return outcomes


@pytest.fixture(scope="module")
def regions() -> queue.Queue[memoryview]:
    memory = HostMemory.anonymous(8 * REGION, "regions").view
    regions: queue.Queue[memoryview] = queue.Queue()
    for i in range(8):
        regions.put(memory[i * REGION : (i + 1) * REGION])
    return regions


class TestMooncakeFromAPool(StoreSuite):
    """Values go directly from and into registered memory."""

    rounds = 10

    @pytest.fixture(autouse=True)
    def _shared(self, shared: Any, regions: queue.Queue[memoryview]) -> None:
        self.shared, self.regions = shared, regions

    def make_store(self, tmp_path: Path) -> Store:
        return FromPool(another(self.shared), self.regions)  # type: ignore[no-any-return]


def test_the_pool_is_registered_once_whatever_slot_comes_first(
    shared: Any, regions: queue.Queue[memoryview]
) -> None:
    store = another(shared)
    seen: list[int] = []
    client = store._connect()[0]
    store._client, store._replicas = _Watched(client, seen), shared._replicas
    store._memory = type(shared._memory)()
    memory = HostMemory.anonymous(64 << 10, "pool")
    for i in (3, 0, 2):
        slot = memory.view[i * 16384 : (i + 1) * 16384]
        slot[:] = value_of(i, 16384)
        assert store.write([(make_key(i), [slot])]) == [Done(16384)]
        slot[:] = bytes(16384)
        assert store.read([(make_key(i), slot)]) == [Done(16384)]
        assert slot == value_of(i, 16384)
    assert seen == [64 << 10]
    store._memory.clear(client)
    del slot
    memory.close()
    assert f" {memory.ref.inode} " not in Path("/proc/self/maps").read_text(), (
        "somebody still holds the mapping"
    )


class _Watched:
    def __init__(self, client: Any, seen: list[int]) -> None:
        self._client, self._seen = client, seen

    def register_buffer(self, address: int, length: int) -> int:
        self._seen.append(length)
        code: int = self._client.register_buffer(address, length)
        return code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_read_only_memory_is_copied(shared: Any) -> None:
    store = another(shared)
    mapped = mmap.mmap(-1, 8192)
    mapped[:] = value_of(1, 8192)
    assert store.write([(make_key(0), [memoryview(mapped).toreadonly()])]) == [Done(8192)]
    assert read_one(store, make_key(0), 8192)[1] == value_of(1, 8192)


def test_what_one_engine_stored_another_finds(server: MooncakeServer, shared: Any) -> None:
    mine = another(shared)
    assert write_one(mine, make_key(0), b"hello") == Done(5)
    other = open_store(server.master, prefix=mine._options.prefix, buffer_size=16 << 20)
    assert other.contains([make_key(0), make_key(1)]) == [True, False]
    assert read_one(other, make_key(0), 16) == (Done(5), b"hello")
    slot = memoryview(mmap.mmap(-1, 4096))
    assert other.write([(make_key(0), [slot])]) == [REJECTED], "the first stays"
    assert read_one(mine, make_key(0), 16) == (Done(5), b"hello")
    other.close()


def test_the_log_says_once_that_its_client_listens_everywhere(
    server: MooncakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(server.master)
    for _ in range(2):
        store.ping()
    assert caplog.text.count("listens on two ports of every interface") == 1
    assert len(_ports_open_to_all()) >= 2, "Mooncake has changed: correct the log and the docs"
    store.close()


def test_its_client_logs_errors_only(
    server: MooncakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    store = open_store(server.master)
    store.ping()
    store.close()
    assert not re.search(r"^[IW]\d{4} ", capfd.readouterr().err, re.MULTILINE)


def _ports_open_to_all() -> list[int]:
    """Returns the ports on which this process listens on every interface."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed already
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and not address.strip("0") and f"socket:[{fields[9]}]" in own:
                ports.append(int(port, 16))
    return ports
