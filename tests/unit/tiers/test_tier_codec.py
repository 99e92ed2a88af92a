"""Tiers with codecs: what is stored, what comes back, and which copy is used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("backports.zstd")

from kvstow import frame
from kvstow.key import ChunkKey
from kvstow.metrics import Metrics, merge
from kvstow.pool.index import Index, ReadOutcome
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier
from kvstow.tiers.store_wrapper import StoreWrapper
from tests.unit.codec.kv import (
    CODED,
    FRAME_BYTES,
    GROUP,
    LAYOUT,
    TOKENS,
    coder,
    filled,
    key,
    near,
    payload,
    spans_of,
)

KEY = b"k" * 32


class SettingAside(StoreWrapper):
    """A store that says what it was told to set aside."""

    def __init__(self, store: MemoryStore, removed: list[object]) -> None:
        super().__init__(store)
        self._removed = removed

    def set_aside(self, keys: Sequence[ChunkKey]) -> None:
        self._removed.extend(keys)


class One:
    """A tier over ``store``, with a codec."""

    def __init__(
        self, name: str | None, store: MemoryStore | None = None, integrity_key: bytes | None = None
    ) -> None:
        self.clock, self.metrics, self.executor = ManualClock(), Metrics(), ManualExecutor()
        self.store = store or MemoryStore()
        self.removed: list[object] = []
        self.pool = HostPool.create(LAYOUT, 8 * FRAME_BYTES, name="one")
        self.integrity_key = integrity_key
        self.tier = Tier(
            "t",
            SettingAside(self.store, self.removed),
            self.executor,
            layout=LAYOUT,
            clock=self.clock,
            metrics=self.metrics,
            coder=None if name is None else coder(name),
            integrity_key=integrity_key,
        )
        self.taken: dict[str, dict[str, float]] = {}

    def write(self, seed: int) -> bool:
        lease, wrote = self.pool.reserve(), []  # type: ignore[var-annotated]
        assert lease is not None
        filled(lease.view(), seed)
        frame.seal(
            lease.view(), key(seed), GROUP, TOKENS, b"", 0.0, integrity_key=self.integrity_key
        )
        assert self.tier.write(key(seed), lease, wrote.append) is not None
        self.executor.run_all()
        self.tier.poll()
        lease.release()
        return bool(wrote[0])

    def read(self, seed: int) -> tuple[ReadOutcome, tuple[bytes, ...]]:
        lease, got = self.pool.reserve(), []  # type: ignore[var-annotated]
        assert lease is not None
        self.tier.read([(key(seed), lease)], got.extend)
        self.executor.run_all()
        self.tier.poll()
        spans = spans_of(lease.view())
        lease.release()
        return got[0], spans

    def stored(self, seed: int) -> bytes:
        return self.store._values[key(seed)]

    def counter(self, series: str) -> float:
        self.taken = merge(self.taken, self.metrics.take() or {})
        return self.taken.get("counters", {}).get(series, 0)


@pytest.mark.parametrize("integrity_key", [None, KEY])
@pytest.mark.parametrize("name", ["raw", *CODED])
def test_what_a_tier_stores_and_gives_back(name: str, integrity_key: bytes | None) -> None:
    one = One(name, integrity_key=integrity_key)
    lossy = name not in ("raw", "lossless")
    assert one.write(1)
    assert one.tier.exact != lossy
    got, spans = one.read(1)
    assert got is (ReadOutcome.LOSSY if lossy else ReadOutcome.EXACT)
    assert near(spans, 1)
    assert lossy or spans == payload(1)
    size = len(one.stored(1))
    assert (size < FRAME_BYTES) == (name != "raw")
    assert one.counter("stored_bytes|t") == one.counter("loaded_bytes|t") == size
    assert one.counter("stored_raw_bytes|t") == FRAME_BYTES
    assert frame.parse_header(one.stored(1)[:4096]).lossy == lossy


@pytest.mark.parametrize("reader", ["raw", *CODED])
@pytest.mark.parametrize("writer", ["raw", *CODED])
def test_frames_of_another_setting_are_read_and_lossy_ones_in_exact_tiers_make_room(
    writer: str, reader: str
) -> None:
    store = MemoryStore()
    assert One(writer, store).write(1)
    one = One(reader, store)
    got, spans = one.read(1)
    lossy, exact = writer not in ("raw", "lossless"), reader in ("raw", "lossless")
    if lossy and exact:
        assert got is ReadOutcome.MISS
        assert one.counter("failed_chunks|t|lossy") == 1
        assert not store.contains([key(1)])[0]
        assert one.write(1), "stored anew, exactly"
        assert one.read(1) == (ReadOutcome.EXACT, payload(1))
    else:
        assert got is (ReadOutcome.LOSSY if lossy else ReadOutcome.EXACT)
        assert near(spans, 1)
    assert not one.removed
    assert not one.counter("corrupt_chunks|t")


def test_without_codecs_installed_a_coded_frame_is_a_miss_that_makes_room() -> None:
    store = MemoryStore()
    assert One("lossless", store).write(1)
    one = One(None, store)
    assert one.read(1)[0] is ReadOutcome.MISS
    assert one.counter("failed_chunks|t|codec") == 1
    assert not store.contains([key(1)])[0]


def test_a_forged_coded_frame_is_corrupt_and_set_aside() -> None:
    one = One("lossless")
    assert one.write(1)
    data = bytearray(one.stored(1))
    header = frame.parse_header(bytes(data[:4096]))
    data[4096:4100] = b"nope"
    checksum = frame.PayloadChecksum()
    for span in header.spans:
        checksum.update(bytes(data[span.offset : span.offset + span.length]))
    frame.write_header(memoryview(data), header, checksum, None)
    one.store._values[key(1)] = bytes(data)
    assert one.read(1)[0] is ReadOutcome.MISS
    assert one.counter("corrupt_chunks|t") == 1
    assert one.removed == [key(1)]


def test_what_a_tier_has_is_not_coded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = One("quantized")
    assert one.write(1)
    before = one.stored(1)
    monkeypatch.setattr(
        type(one.tier._transfers.coder), "encode", lambda *_: pytest.fail("coded again")
    )
    assert one.write(1)
    assert one.stored(1) == before
    assert one.counter("refused_chunks|t|rejected") == 1


def test_a15_a_codec_that_fails_is_a_failed_store_and_a_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = One("lossless")
    coding = one.tier._transfers.coder
    assert coding is not None
    encode = type(coding._codec).encode

    def broken(*_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(type(coding._codec), "encode", broken)
    assert not one.write(1)
    assert not one.tier.holds(key(1))
    assert one.counter("failed_chunks|t|error") == 1
    assert one.counter("stored_chunks|t") == 0
    monkeypatch.setattr(type(coding._codec), "encode", encode)
    monkeypatch.setattr(type(coding._codec), "decode", broken)
    assert one.write(1)
    assert one.read(1)[0] is ReadOutcome.MISS
    assert one.counter("failed_chunks|t|error") == 2


def test_seconds_of_coding_are_counted() -> None:
    one = One("lossless")
    coding = one.tier._transfers.coder
    assert coding is not None
    for method in ("encode", "decode"):
        work = getattr(coding, method)
        setattr(coding, method, lambda *args, work=work: (one.clock.advance(2.0), work(*args))[1])
    one.clock.advance(1.0)
    one.write(1)
    one.read(1)
    assert one.counter("encode_seconds|t") == one.counter("decode_seconds|t") == 2


# --- the pool's index -----------------------------------------------------------------------------------------------


def index(slots: int = 4) -> tuple[Index, HostPool]:
    pool = HostPool.create(LAYOUT, slots * FRAME_BYTES, name="index")
    return Index(pool, LRU(), Metrics()), pool


def put(index: Index, i: int, *, lossy: bool) -> None:
    lease = index.reserve(key(i), b"", TOKENS, fetching=lossy)
    assert lease is not None
    assert index.publish(lease, lossy=lossy) is not None
    lease.release()


def test_an_exact_copy_takes_a_lossy_ones_place_and_leases_stay_good() -> None:
    own, pool = index()
    put(own, 1, lossy=True)
    assert own.resident(key(1))
    assert own.lossy(key(1))
    assert own.absent([key(1), key(2)]) == [0, 1]
    pin = own.pin(key(1))
    assert pin is not None
    put(own, 1, lossy=False)
    assert not own.lossy(key(1))
    assert own.absent([key(1)]) == []
    assert len(own) == 1
    assert pool.leased == 1
    pin.release()
    assert pool.free == 3
    pool.check_integrity()


def test_a_lossy_copy_stays_when_the_exact_one_is_aborted_and_goes_when_evicted_or_reset() -> None:
    own, pool = index(slots=2)
    put(own, 1, lossy=True)
    lease = own.reserve(key(1), b"", TOKENS, fetching=False)
    assert lease is not None
    assert own.absent([key(1)]) == [], "on its way"
    lease.release()
    assert own.lossy(key(1))
    put(own, 2, lossy=False)
    put(own, 3, lossy=False)
    assert not own.resident(key(1))
    assert not own.lossy(key(1))
    put(own, 4, lossy=True)
    own.reset()
    assert not own.lossy(key(4))
    assert pool.free == 2


def test_a_lossy_copy_evicted_while_its_exact_one_is_filled() -> None:
    own, pool = index(slots=2)
    put(own, 1, lossy=True)
    exact = own.reserve(key(1), b"", TOKENS, fetching=False)
    assert exact is not None
    put(own, 2, lossy=False)
    assert not own.resident(key(1))
    assert own.publish(exact) is not None
    exact.release()
    assert own.resident(key(1))
    assert not own.lossy(key(1))
    pool.check_integrity()
