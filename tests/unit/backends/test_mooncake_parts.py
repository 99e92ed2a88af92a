"""Parts of the Mooncake tier that need no master: settings, names in use, codes of the client."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import pytest

from kvstow import build
from kvstow.backends.base import MISSING, REJECTED, Done
from kvstow.backends.mooncake.names import NamesInUse
from kvstow.backends.mooncake.open import check
from kvstow.backends.mooncake.settings import MooncakeSettings
from kvstow.backends.mooncake.store import MooncakeStore
from kvstow.errors import SettingsError, StoreUnavailable
from kvstow.key import ChunkKey, Namespace
from kvstow.metrics import Metrics
from kvstow.settings import Settings, parse
from kvstow.settings.variables import set_defaults
from kvstow.testing.manual import ManualClock
from tests.rigs.tiers import open_tier

LAYOUT = build.chunk_layout(Settings(), 16, [8192])


def settings(**own: Any) -> Settings:
    return parse(None, {}, {f"mooncake.{name}": value for name, value in own.items()}).settings


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"master": "h"}, r"mooncake\.master: expected host:port"),
        ({"master": "h:"}, r"mooncake\.master: expected host:port"),
        ({"master": ":1"}, r"mooncake\.master: expected host:port"),
        ({"master": "h:99999"}, r"mooncake\.master: expected host:port"),
        (
            {"master": "h:1", "buffer_size": "4KiB"},
            r"mooncake\.buffer_size 4.096kB is less than a chunk",
        ),
        (
            {"master": "h:1", "device": "mlx5_0"},
            r"mooncake\.device is set, and mooncake\.protocol isn't rdma",
        ),
    ],
)
def test_o1_settings_that_cannot_be_used_are_named_with_the_fix(
    own: dict[str, Any], says: str
) -> None:
    with pytest.raises(SettingsError, match=says):
        check(settings(**own).section(MooncakeSettings), LAYOUT.max_frame_bytes)


def tier(**own: Any) -> Any:
    return open_tier(settings(**own), LAYOUT, clock=ManualClock(), metrics=Metrics())


def test_without_a_master_there_is_no_tier() -> None:
    assert tier() is None


def test_the_client_is_loaded_only_for_the_tier_and_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "kvstow.backends.mooncake.connect", raising=False)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(
        SettingsError, match=r"pip install 'kvstow\[mooncake\]', and apt-get install libibverbs1"
    ):
        tier(master="h:1")


def test_h7_a_master_that_cannot_be_reached_does_not_hold_up_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tests.rigs.mooncake_server import missing

    if why := missing():
        pytest.skip(why)
    built = tier(master="127.0.0.1:1")
    assert built.close(5.0)
    assert "Mooncake (127.0.0.1:1) can't be used now, kvstow goes on without it" in caplog.text


def test_a_variable_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "7")
    monkeypatch.delenv("MC_RPC_CONNECT_TIMEOUT_MS", raising=False)
    set_defaults(MooncakeSettings(master="h:1", timeout_ms=1500).variables())
    assert (os.environ["MC_RPC_TIMEOUT_MS"], os.environ["MC_RPC_CONNECT_TIMEOUT_MS"]) == (
        "7",
        "1000",
    )
    assert (
        MooncakeSettings(master="h:1", timeout_ms=1500).variables()["MC_RPC_TIMEOUT_MS"] == "1500"
    )
    monkeypatch.delenv("MC_RPC_CONNECT_TIMEOUT_MS")


def test_a_name_is_never_read_and_deleted_at_the_same_time() -> None:
    names = NamesInUse(0.01)
    with names.reading(["a", "b"]), names.reading(["a"]):
        with pytest.raises(StoreUnavailable, match="another call"), names.deleting(["b"]):
            raise AssertionError("read meanwhile")
        with names.deleting(["c"]), names.reading(["b"]):
            pass
    with names.deleting(["a"]):
        with pytest.raises(StoreUnavailable, match="another call"), names.reading(["x", "a"]):
            raise AssertionError("deleted meanwhile")
        with pytest.raises(StoreUnavailable, match="another call"), names.deleting(["a"]):
            raise AssertionError("deleted meanwhile")
    with names.reading(["a", "x"]), names.writing(["a"]) as mine:
        assert mine == [0]


def test_a_name_is_written_by_one_at_a_time() -> None:
    names = NamesInUse(0.01)
    with names.writing(["a", "b", "a"]) as mine:
        assert mine == [0, 1]
        with names.writing(["b", "c"]) as others:
            assert others == [1]
    with names.writing(["b"]) as again:
        assert again == [0]


class _Client:
    """A client that answers every question with one code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [self.code] * len(names)

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, Any]:
        return {}  # also of a real client whose master is away

    def remove(self, name: str, force: bool) -> int:
        return self.code


@pytest.mark.parametrize("code", [-1, -800, -900, -901])
def test_k2_faults_of_the_client_are_unavailable(code: int) -> None:
    store = MooncakeStore(
        MooncakeSettings(master="h:1"), ManualClock(), lambda: (_Client(code), None)
    )
    one = ChunkKey.build(Namespace.from_fields({}), 0, b"x")
    for work in (
        lambda: store.contains([one]),
        lambda: store.read([(one, memoryview(bytearray(9)))]),
        lambda: store.write([(one, [memoryview(b"x")])]),
        lambda: store.delete([one]),
    ):
        with pytest.raises(StoreUnavailable, match=f"code {code}"):
            work()


class _Steps:
    """A client whose steps of a put end as told. A real one can't be made to fail step by step."""

    def __init__(self, **ends: Any) -> None:
        self.ends = ends
        self.there: list[str] = []
        self.taken_back: list[str] = []
        self.moved: list[str] = []
        self.started = 0

    def register_buffer(self, address: int, length: int) -> int:
        return 0

    def batch_put_session_start(self, names: list[str], sizes: list[int], config: Any) -> list[int]:
        self.started += 1
        codes: list[int] = self.ends.get(f"start_{self.started}", [0] * len(names))
        return list(codes)

    def batch_put_from_multi_buffer_ranges(
        self, names: list[str], at: Any, sizes: Any, offsets: Any
    ) -> list[int]:
        self.moved += names
        moved = self.ends.get("moved", [size for [size] in sizes])
        if isinstance(moved, BaseException):
            raise moved
        return list(moved)

    def batch_put_session_end(self, names: list[str]) -> list[int]:
        codes: list[int] = self.ends.get("end", [0] * len(names))
        self.there += [name for name, code in zip(names, codes, strict=True) if not code]
        return list(codes)

    def batch_put_session_revoke(self, names: list[str]) -> list[int]:
        self.taken_back += names
        return [-900] * len(names)


def put(client: _Steps, count: int = 2) -> Any:
    """Writes ``count`` values from one pool."""
    store = MooncakeStore(
        MooncakeSettings(master="h:1", prefix=""), ManualClock(), lambda: (client, None)
    )
    pool = memoryview(mmap.mmap(-1, count * 4096))
    return store.write([(KEYS[i], [pool[i * 4096 : (i + 1) * 4096]]) for i in range(count)])


KEYS = [ChunkKey.build(Namespace.from_fields({}), 0, bytes([i])) for i in range(3)]
NAMES = [key.digest().hex() for key in KEYS]


def test_a_put_in_its_steps() -> None:
    client = _Steps()
    assert put(client) == [Done(4096)] * 2
    assert (client.there, client.taken_back) == (NAMES[:2], [])


def test_a_name_that_is_taken_is_rejected_and_not_moved() -> None:
    client = _Steps(start_1=[-705, 0])
    assert put(client) == [REJECTED, Done(4096)]
    assert (client.moved, client.there, client.taken_back) == (NAMES[1:2], NAMES[1:2], [])


def test_without_room_nothing_is_moved() -> None:
    client = _Steps(start_1=[-200, -200])
    assert put(client) == [REJECTED] * 2
    assert (client.moved, client.there, client.taken_back) == ([], [], [])


@pytest.mark.parametrize("moved", [-800, 4095, 0])
def test_what_was_not_moved_whole_is_never_published(moved: int) -> None:
    client = _Steps(moved=[4096, moved])
    with pytest.raises(StoreUnavailable):
        put(client)
    assert (client.there, client.taken_back) == (NAMES[:1], NAMES[1:2])


@pytest.mark.parametrize("end", [-900, -901])
def test_what_could_not_be_published_is_taken_back(end: int) -> None:
    client = _Steps(end=[end, 0])
    with pytest.raises(StoreUnavailable, match=f"code {end}"):
        put(client)
    assert (client.there, client.taken_back) == (NAMES[1:2], NAMES[:1])


def test_an_exception_between_the_steps_takes_back_what_was_begun() -> None:
    client = _Steps(moved=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        put(client)
    assert (client.there, client.taken_back) == ([], NAMES[:2])


def test_a_write_that_could_not_be_taken_back_is_begun_anew() -> None:
    client = _Steps(start_1=[0, -600])
    assert put(client) == [Done(4096)] * 2
    assert (client.there, client.taken_back) == (NAMES[:2], NAMES[1:2])
    client = _Steps(start_1=[-600, 0], start_2=[-600])
    with pytest.raises(StoreUnavailable):
        put(client)
    assert (client.there, client.taken_back) == (NAMES[1:2], NAMES[:1])


class _OnDisk:
    """A client whose store moved a value to disk, where calls by ranges don't find it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def register_buffer(self, address: int, length: int) -> int:
        return 0

    def get_into_ranges(
        self, at: Any, names: Any, to: Any, of: Any, sizes: Any
    ) -> list[list[list[int]]]:
        return [[[-702, -702]] for _ in names]

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, Any]:
        return {}

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name == NAMES[0]) for name in names]

    def get_into(self, name: str, at: int, length: int) -> int:
        return self.length if self.length <= length else -600


@pytest.mark.parametrize(
    ("length", "outcome"), [(4096, Done(4096)), (7, Done(7)), (4097, REJECTED)]
)
def test_a_value_that_is_not_in_memory_is_read_all_the_same(length: int, outcome: Any) -> None:
    store = MooncakeStore(
        MooncakeSettings(master="h:1", prefix=""), ManualClock(), lambda: (_OnDisk(length), None)
    )
    pool = memoryview(mmap.mmap(-1, 8192))
    assert store.read([(KEYS[0], pool[:4096]), (KEYS[1], pool[4096:])]) == [outcome, MISSING]
