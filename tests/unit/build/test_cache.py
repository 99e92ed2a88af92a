"""The composition root: what every setting does to what is built, and what this host refuses."""

from __future__ import annotations

import ast
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstow import build
from kvstow.build import cache as engine_of
from kvstow.errors import SettingsError
from kvstow.layout import HEADER_BYTES, ChunkLayout
from kvstow.metrics import Metrics
from kvstow.pool.policy import POLICIES
from kvstow.pool.pool import HostPool, PoolError
from kvstow.runtime import ThreadExecutor
from kvstow.settings import HostFacts, Settings, leaves, parse
from kvstow.settings.machine import Memory as HostMemory
from kvstow.testing.manual import ManualClock, ManualExecutor

SOURCE = Path(build.__file__).parent.parent
BLOCK_BYTES = 8192
LAYOUT = build.chunk_layout(Settings(), 16, [BLOCK_BYTES])


class Spy:
    """Stands in for what ``build_cache`` makes, and keeps what it was made with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.engine: dict[str, Any] = {}
        self.pool: dict[str, Any] = {}
        spy = self

        def engine(**arguments: Any) -> object:
            spy.engine = arguments
            return object()

        def create(layout: ChunkLayout, capacity_bytes: int, **arguments: Any) -> Any:
            spy.pool = {"layout": layout, "capacity_bytes": capacity_bytes, **arguments}
            return FakePool(0)

        monkeypatch.setattr(engine_of, "Cache", engine)
        monkeypatch.setattr(engine_of.HostPool, "create", create)
        self.metrics, self.clock = Metrics(), ManualClock()
        effective = parse(
            None, {}, {key.replace("__", "."): value for key, value in settings.items()}
        )
        build.build_cache(
            effective.settings,
            LAYOUT,
            name="x",
            key=None,
            clock=self.clock,
            metrics=self.metrics,
            sealer=ManualExecutor(),
            background=ManualExecutor(),
        )


class FakePool:
    """Counts ``prefault``; piece ``fails`` raises."""

    def __init__(self, pieces: int, fails: int | None = None) -> None:
        self.pieces = pieces
        self.fails = fails
        self.done: list[int] = []
        self.closed = threading.Event()

    def prefault(self, piece: int, available_bytes: object) -> None:
        if piece == self.fails:
            raise PoolError("memory.size: nothing is left")
        self.done.append(piece)


# --- O2: every setting does something -------------------------------------------------------------------------------


def test_o2_memory_settings_reach_the_pool_and_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(
        monkeypatch, memory__size="123456789", memory__pool_dir="/some/dir", memory__policy="s3fifo"
    )
    assert spy.pool == {
        "layout": LAYOUT,
        "capacity_bytes": 123456789,
        "name": "kvstow-x",
        "pool_dir": "/some/dir",
    }
    assert type(spy.engine["policy"]) is POLICIES["s3fifo"]
    assert type(Spy(monkeypatch).engine["policy"]) is POLICIES["lru"]
    assert Spy(monkeypatch).pool["pool_dir"] is None


def test_o2_the_deadline_reaches_the_engine_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Spy(monkeypatch, fetch__deadline_ms=321).engine["fetch_deadline_s"] == pytest.approx(
        0.321
    )
    assert Spy(monkeypatch).engine["fetch_deadline_s"] is None


def test_o2_the_least_tokens_to_load_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Spy(monkeypatch, fetch__min_tokens=0).engine["fetch_min_tokens"] == 0
    assert Spy(monkeypatch, fetch__min_tokens=512).engine["fetch_min_tokens"] == 512
    assert Spy(monkeypatch).engine["fetch_min_tokens"] is None


def test_what_is_passed_in_is_what_the_engine_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    assert spy.engine["metrics"] is spy.metrics
    assert spy.engine["clock"] is spy.clock
    assert spy.engine["layout"] is LAYOUT


def test_o2_chunk_size_reaches_the_layout() -> None:
    layout = build.chunk_layout(Settings(chunk_size=48), 16, [BLOCK_BYTES, 4096])
    assert layout.chunk_tokens == 48
    assert layout.groups[0].blocks_per_chunk == 3
    assert layout.max_frame_bytes == HEADER_BYTES + 3 * BLOCK_BYTES + 3 * 4096
    with pytest.raises(SettingsError, match="chunk_size 50 is not a multiple"):
        build.chunk_layout(Settings(chunk_size=50), 16, [BLOCK_BYTES])


def test_every_policy_that_may_be_set_can_be_built() -> None:
    policy = next(leaf for leaf in leaves() if leaf.key == "memory.policy")
    assert policy.accepts == " or ".join(POLICIES)


OWN_SECTION = ("section", "options", "self._options", "self")  # in a backend's folder


@pytest.mark.parametrize("key", [leaf.key for leaf in leaves()])
def test_o2_every_setting_is_read_by_the_product(key: str) -> None:
    """By its attribute, beyond where settings are declared: one that is only parsed does nothing."""
    section, _, name = key.rpartition(".")
    for path in SOURCE.rglob("*.py"):
        if path.name in ("schema.py", "sources.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == name:
                of = ast.unparse(node.value)
                own = path.parent.name == section
                if "settings" in of or of == section or (own and of in OWN_SECTION):
                    return
            if name == "codec" and isinstance(node, ast.Constant) and node.value == name:
                return  # ``ConfiguredBackend.codec``
    pytest.fail(f"nothing reads {key}")


# --- checks ----------------------------------------------------------------------------------------------------------


def test_o3_a_slot_below_a_chunk_is_refused_at_start() -> None:
    small = parse(None, {}, {"memory.size": 3 * LAYOUT.max_frame_bytes}).settings
    with pytest.raises(SettingsError, match=r"memory\.size"):
        build.check(small, LAYOUT, facts=HostFacts(None))


def test_h9_a_pool_above_memory_is_refused_before_anything_is_allocated() -> None:
    memory = HostMemory(10**9, 10**8, "this machine")
    settings = parse(None, {}, {"memory.size": "200MB"}).settings
    with pytest.raises(SettingsError, match=r"200MB is more than the 100MB"):
        build.check(settings, LAYOUT, facts=HostFacts(memory))
    roomy = HostFacts(memory._replace(available_bytes=10**9))
    build.check(settings, LAYOUT, facts=roomy)
    with pytest.raises(SettingsError, match=r"200MB for each of 8 engines"):
        build.check(settings, LAYOUT, facts=roomy, engines=8)


def test_this_hosts_own_facts_are_the_default() -> None:
    with pytest.raises(SettingsError, match=r"memory\.size 1000PB"):
        build.check(parse(None, {}, {"memory.size": "1000PB"}).settings, LAYOUT)
    with pytest.raises(SettingsError, match=r"memory\.pool_dir /no/such is not a directory"):
        build.check(
            parse(None, {}, {"memory.size": "1MB", "memory.pool_dir": "/no/such"}).settings, LAYOUT
        )


# --- the pool's memory -----------------------------------------------------------------------------------------------


def test_an_idle_engine_takes_the_whole_pool_though_nobody_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstow.pool.pool.PIECE_BYTES", 1 << 20)
    settings = parse(None, {}, {"memory.size": "5MB"}).settings
    sealer, background = ManualExecutor(), ManualExecutor()
    pool, engine = build.build_cache(
        settings,
        LAYOUT,
        name="x",
        key=None,
        clock=ManualClock(),
        metrics=Metrics(),
        sealer=sealer,
        background=background,
    )
    assert pool.pieces == 5
    assert not engine.busy(), "an idle vLLM would spin for it"
    assert (sealer.outstanding, background.outstanding) == (0, 1)
    assert os.fstat(pool.ref.fd).st_blocks == 0
    background.run_all()
    assert os.fstat(pool.ref.fd).st_blocks * 512 >= pool.capacity_bytes
    engine.close(0)


def test_it_is_done_on_a_thread_of_its_own() -> None:
    executor, pool = ThreadExecutor("test"), FakePool(1000)
    executor.submit(lambda: engine_of._prefault(pool, ManualClock()), lambda *_: None)  # type: ignore[arg-type]
    assert executor.wait(30.0)
    assert pool.done == list(range(1000))
    executor.close(1.0)


def test_taking_the_pool_stops_where_memory_ends_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = FakePool(5, fails=2)
    engine_of._prefault(pool, ManualClock())  # type: ignore[arg-type]
    assert pool.done == [0, 1]
    assert "memory.size: nothing is left" in caplog.text


class Ticking(ManualClock):
    """Each look takes a second."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_the_first_pieces_are_taken_at_once_and_a_close_ends_the_rest() -> None:
    pool = FakePool(100)
    pool.closed.set()
    engine_of._prefault(pool, Ticking())  # type: ignore[arg-type]
    assert pool.done == list(range(engine_of.PREFAULT_AT_ONCE + 1))


def test_a_pool_closed_meanwhile_takes_nothing_more() -> None:
    settings = parse(None, {}, {"memory.size": "1MB"}).settings
    background = ManualExecutor()
    _, engine = build.build_cache(
        settings,
        LAYOUT,
        name="x",
        key=None,
        clock=ManualClock(),
        metrics=Metrics(),
        sealer=ManualExecutor(),
        background=background,
    )
    engine.close(0)
    ends: list[object] = []
    background.submit(lambda: None, lambda _, error: ends.append(error))
    background.run_all()
    background.poll()
    assert ends == [None]


def test_a_real_engine_is_built_and_closed() -> None:
    settings = parse(None, {}, {"memory.size": "1MB"}).settings
    metrics = Metrics()
    pool, engine = build.build_cache(
        settings, LAYOUT, name="x", key=None, clock=ManualClock(), metrics=metrics
    )
    assert isinstance(pool, HostPool)
    assert pool.slots == 10**6 // LAYOUT.max_frame_bytes
    taken = metrics.take()
    assert taken is not None
    assert taken["gauges"]["pool_capacity_bytes"] == pool.capacity_bytes
    engine.close(0)
