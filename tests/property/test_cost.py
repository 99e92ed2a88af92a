"""The decision against an oracle that tries every number of chunks, and estimates of tiers of any speed."""

from __future__ import annotations

import random
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.fetch.decide import MARGIN, worthwhile_chunks
from kvstow.fetch.estimates import LinearEstimate
from kvstow.fetch.snapshot import FetchRules, Snapshot
from tests.unit.rig import FRAME_BYTES, TOKENS, Rig

seconds = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))


def first_token(ready: list[float], count: int, chunk: Fraction, backlog: Fraction) -> Fraction:
    """Until the whole run is there when the first ``count`` chunks are loaded and the others computed, computing taken
    at a discount; computing begins when the backlog is done, and loading has ended."""
    loaded = max([Fraction(0), *map(Fraction, ready[:count])])
    return max(loaded, backlog) + chunk * (len(ready) - count)


@settings(max_examples=400, deadline=None)
@given(st.lists(seconds, max_size=12), st.floats(1e-6, 0.1), st.sampled_from([0, 0, 100, 5000]))
def test_the_plan_is_the_best_of_all(ready: list[float], prefill_s: float, backlog: int) -> None:
    chunk = Fraction(MARGIN) * Fraction(prefill_s) * 16
    begins = Fraction(prefill_s) * backlog
    times = [first_token(ready, count, chunk, begins) for count in range(len(ready) + 1)]
    snapshot = Snapshot(FetchRules(16), (), (), prefill_s=prefill_s, backlog_tokens=backlog)
    chosen = worthwhile_chunks(snapshot, ready)
    assert float(times[chosen] - min(times)) <= 1e-9 * float(max(times))
    if chosen:
        assert times[chosen] < times[0], "a load that saves nothing was chosen"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(["memory", "below", "below", "nowhere"]), min_size=1, max_size=10),
    st.floats(1e-5, 1e-2),
    st.floats(0.0, 0.1),
    st.floats(1e-5, 0.05),
)
def test_what_is_read_is_what_pays(
    places: list[str], prefill_s: float, fixed_s: float, chunk_s: float
) -> None:
    """The engine itself: a prompt whose chunks are in memory, below, or nowhere; one tier, whose line is known."""
    rig = Rig(slots=40, max_fetch_share=1.0)
    below = [i for i, place in enumerate(places) if place == "below"]
    if below:
        rig.put_below(*below)
    rig.put(*(i for i, place in enumerate(places) if place == "memory"))
    rig.settle()
    estimates = rig.engine.estimates
    rig.engine.observe_step(1024, 1024 * prefill_s)
    line = estimates.reads[0]
    for _ in range(60):
        for size in (1, 8):
            line.observe(size * FRAME_BYTES, fixed_s + size * chunk_s)
    each = estimates.prefill_s
    assert each is not None

    run = places.index("nowhere") if "nowhere" in places else len(places)
    start = next((i for i in range(len(places)) if places[i] != "memory"), len(places))
    ready, read = [], 0
    for place in places[start:run]:
        read += place == "below"
        ready.append(line.seconds(read * FRAME_BYTES) if place == "below" else 0.0)
    chunk = Fraction(MARGIN) * Fraction(each) * TOKENS
    times = [first_token(ready, count, chunk, Fraction(0)) for count in range(len(ready) + 1)]
    best = min(range(len(times)), key=lambda count: times[count])
    missing = sum(place != "memory" for place in places[start:])
    hopeless = line.seconds(missing * FRAME_BYTES) > MARGIN * each * TOKENS * (len(places) - start)

    rig.fetch("r", *range(len(places)))
    rig.settle()
    got = rig.found(*range(len(places)))
    want = start if hopeless else start + best
    while want < len(places) and places[want] == "memory":
        want += 1
    explored = rig.counter("fetch_decisions", decision="explore")
    if explored:
        assert want <= got
    else:
        assert got == want or abs(float(times[best] - times[got - start])) <= 1e-9


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 0.05), st.floats(1e-10, 1e-7), st.integers(0, 1000))
def test_a_line_comes_near_any_tier(fixed_s: float, byte_s: float, seed: int) -> None:
    rng = random.Random(seed)
    line = LinearEstimate()
    for _ in range(80):
        size = rng.randrange(1 << 20, 64 << 20)
        line.observe(size, (fixed_s + byte_s * size) * rng.uniform(0.8, 1.2))
    for size in (4 << 20, 16 << 20, 48 << 20):
        true = fixed_s + byte_s * size
        assert abs(line.seconds(size) - true) <= 0.4 * true + 0.06 * byte_s * (64 << 20)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0.001, 0.01, 0.1, 10.0, 100.0, 1000.0]), st.integers(0, 1000))
def test_a_change_of_speed_is_noticed_within_a_few_reads(factor: float, seed: int) -> None:
    rng = random.Random(seed)
    line = LinearEstimate()
    for _ in range(50):
        size = rng.randrange(1 << 20, 64 << 20)
        line.observe(size, 0.001 + 1e-9 * size)
    for count in range(1, 41):
        size = (4 << 20, 16 << 20)[count % 2]  # as an engine explores
        line.observe(size, factor * (0.001 + 1e-9 * size))
        if 0.4 <= line.seconds(32 << 20) / (factor * (0.001 + 1e-9 * (32 << 20))) <= 2.5:
            break
    assert count <= (32 if factor > 1 else 10), (
        f"{count} reads to learn that it is {factor} times as slow"
    )
