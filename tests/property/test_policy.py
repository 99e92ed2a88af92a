"""Policies against naive models of themselves, which share no code with them: plain lists, searched from the front."""

from collections.abc import Callable
from random import Random
from typing import Protocol

import pytest

from kvstow.key import ChunkKey, Namespace
from kvstow.pool.policy.base import Policy
from kvstow.pool.policy.lru import LRU
from kvstow.pool.policy.s3fifo import S3FIFO

NAMESPACE = Namespace.from_fields({})
KEYS = [ChunkKey.build(NAMESPACE, 0, i.to_bytes(4, "little")) for i in range(40)]


class Model(Protocol):
    """What a policy does, said as simply as possible."""

    def insert(self, key: ChunkKey, size: int) -> None: ...
    def touch(self, key: ChunkKey) -> None: ...
    def remove(self, key: ChunkKey) -> None: ...
    def victim(self, leased: set[ChunkKey]) -> ChunkKey | None: ...
    def held(self) -> list[ChunkKey]: ...


class LRUModel:
    """The time of each key's last use."""

    def __init__(self) -> None:
        self.last: dict[ChunkKey, int] = {}
        self.time = 0

    def insert(self, key: ChunkKey, size: int) -> None:
        self.time += 1
        self.last[key] = self.time

    def touch(self, key: ChunkKey) -> None:
        if key in self.last:
            self.insert(key, 0)

    def remove(self, key: ChunkKey) -> None:
        self.last.pop(key, None)

    def victim(self, leased: set[ChunkKey]) -> ChunkKey | None:
        oldest_first = sorted(self.last, key=lambda k: self.last[k])
        for key in oldest_first:
            if key not in leased:
                del self.last[key]
                return key
            self.insert(key, 0)
        return None

    def held(self) -> list[ChunkKey]:
        return list(self.last)


class Entry:
    def __init__(self, key: ChunkKey, size: int) -> None:
        self.key = key
        self.size = size
        self.freq = 0


class S3FIFOModel:
    """Algorithm 1 of the paper with leases: S and M are lists, tail (oldest) first, G holds keys."""

    def __init__(self) -> None:
        self.S: list[Entry] = []
        self.M: list[Entry] = []
        self.G: list[ChunkKey] = []

    def insert(self, key: ChunkKey, size: int) -> None:
        if key in self.G:
            self.G.remove(key)
            self.M.append(Entry(key, size))
        else:
            self.S.append(Entry(key, size))

    def touch(self, key: ChunkKey) -> None:
        for entry in self.S + self.M:
            if entry.key == key:
                entry.freq = min(entry.freq + 1, 3)

    def remove(self, key: ChunkKey) -> None:
        self.S = [entry for entry in self.S if entry.key != key]
        self.M = [entry for entry in self.M if entry.key != key]
        self.G = [other for other in self.G if other != key]

    def victim(self, leased: set[ChunkKey]) -> ChunkKey | None:
        passed_s = passed_m = 0
        while passed_s < len(self.S) or passed_m < 4 * len(self.M):
            size_s, size_m = sum(e.size for e in self.S), sum(e.size for e in self.M)
            s_is_over = 9 * size_s > size_m  # S has more than a tenth of all
            if passed_s < len(self.S) and (s_is_over or passed_m >= 4 * len(self.M)):
                entry = self.S.pop(0)
                if entry.freq > 1:
                    entry.freq = 0
                    self.M.append(entry)
                elif entry.key in leased:
                    self.S.append(entry)
                    passed_s += 1
                else:
                    self.G.append(entry.key)
                    self.G = self.G[-max(1, len(self.held())) :]
                    return entry.key
            else:
                entry = self.M.pop(0)
                if entry.freq > 0:
                    entry.freq -= 1
                    self.M.append(entry)
                elif entry.key in leased:
                    self.M.append(entry)
                    passed_m += 1
                else:
                    return entry.key
        return None

    def held(self) -> list[ChunkKey]:
        return [entry.key for entry in self.S + self.M]


def run(policy: Policy, model: Model, rng: Random, steps: int) -> None:
    """Equal victims after any history. Inserts outweigh the rest until some twenty keys are held."""
    leased: set[ChunkKey] = set()
    uniform = rng.random() < 0.5
    for _ in range(steps):
        held = model.held()
        action = rng.random()
        key = rng.choice(KEYS)
        if action < 0.4 and key not in held:
            size = 1 if uniform else rng.randint(1, 50)
            policy.insert(key, size)
            model.insert(key, size)
        elif action < 0.65:
            several = rng.sample(KEYS, rng.randint(0, 6))
            if len(several) == 1:
                policy.touch(several[0])
            else:
                policy.touch_many(several)
            for used in several:
                model.touch(used)
        elif action < 0.70:
            policy.remove(key)
            model.remove(key)
        elif action < 0.80:
            leased = set(rng.sample(KEYS, rng.choice((0, 3, 20, len(KEYS)))))
        elif len(held) > rng.randint(0, 20):
            victim = policy.victim(lambda k, leased=leased: k not in leased)
            assert victim == model.victim(leased)
            assert victim is None or victim not in leased
            assert victim is not None or set(held) <= leased, (
                "a key that is not leased was not found"
            )
        assert len(policy) == len(model.held())
        assert {k for k in KEYS if k in policy} == set(model.held())


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    ("policy", "model"), [(LRU, LRUModel), (S3FIFO, S3FIFOModel)], ids=["lru", "s3fifo"]
)
def test_a_policy_chooses_what_its_model_chooses(
    policy: Callable[[], Policy], model: Callable[[], Model], seed: int
) -> None:
    run(policy(), model(), Random(seed), 600)


def hit_ratio(policy: Policy, trace: list[int], capacity: int) -> float:
    hits = 0
    for number in trace:
        key = ChunkKey.build(NAMESPACE, 1, number.to_bytes(4, "little"))
        if key in policy:
            hits += 1
            policy.touch(key)
            continue
        if len(policy) >= capacity:
            assert policy.victim(lambda k: True) is not None
        policy.insert(key)
    return hits / len(trace)


def zipf(rng: Random, count: int, numbers: int) -> list[int]:
    return rng.choices(range(numbers), weights=[1 / (rank + 1) for rank in range(numbers)], k=count)


@pytest.mark.parametrize("seed", range(3))
def test_s3fifo_resists_keys_that_are_used_once(seed: int) -> None:
    """Half of the requests are for keys that never come again. Ratios here: lru 0.21, s3fifo 0.32, of 0.5 at most."""
    rng = Random(seed)
    once = iter(range(1_000_000, 2_000_000))
    trace = [number if rng.random() < 0.5 else next(once) for number in zipf(rng, 20_000, 1000)]
    lru, s3fifo = hit_ratio(LRU(), trace, 100), hit_ratio(S3FIFO(), trace, 100)
    assert s3fifo > lru * 1.3


@pytest.mark.parametrize("seed", range(3))
def test_s3fifo_keeps_its_working_set_through_a_scan(seed: int) -> None:
    rng = Random(seed)
    working_set = zipf(rng, 5000, 80)
    scan = list(range(1_000_000, 1_000_500))
    for policy, kept in ((S3FIFO(), True), (LRU(), False)):
        hit_ratio(policy, working_set, 100)
        hit_ratio(policy, scan, 100)
        hot = sum(
            ChunkKey.build(NAMESPACE, 1, n.to_bytes(4, "little")) in policy for n in range(40)
        )
        assert (hot >= 36) == kept, f"{hot} of the 40 most used keys are left"


@pytest.mark.parametrize("seed", range(3))
def test_s3fifo_is_no_worse_than_lru_without_a_scan(seed: int) -> None:
    trace = zipf(Random(seed), 20_000, 1000)
    assert hit_ratio(S3FIFO(), trace, 100) >= hit_ratio(LRU(), trace, 100)
