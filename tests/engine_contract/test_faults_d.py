"""Fault catalogue D: the scheduler's contract. Preemption, full hits, block arithmetic."""

from __future__ import annotations

import logging
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig, PoolerConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from kvstow.errors import UnsupportedError
from kvstow.vllm.groups import block_geometry, refuse_unserved_model
from kvstow.vllm.metadata import JobReport, WorkerMeta
from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import MAX_MODEL_LEN, Shape, kv_cache_config, vllm_config
from tests.rigs.sim_requests import SimBlocks, SimCached, SimNew, SimOutput, SimRequest


@pytest.mark.parametrize("per_chunk", [1, 2, 4])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_d1_full_hit_leaves_a_token_or_is_asynchronous(per_chunk: int, extra: int) -> None:
    sim = Sim(Shape(blocks_per_chunk=per_chunk))
    tokens = prompt(4 * sim.shape.chunk + extra)
    sim.serve("cold", tokens)
    request = SimRequest("warm", tokens, 1, 16)
    for local_blocks in range(len(tokens) // 16 + 1):
        external, is_async = sim.stack.connector.get_num_new_matched_tokens(
            request, local_blocks * 16
        )
        assert external >= 0
        assert is_async or external == 0
        assert local_blocks * 16 + external <= len(tokens)
    sim.stack.connector.request_finished(request, [])
    sim.engine.pool.forget_cached()
    sim.serve("warm", tokens, 3)
    assert sim.engine.loaded_tokens == len(tokens) // sim.shape.chunk * sim.shape.chunk
    sim.close()


def test_d2_what_is_computed_locally_is_subtracted() -> None:
    rng = random.Random(2)
    sim = Sim(Shape(blocks_per_chunk=2, pool_slots=64))
    connector, tokens, chunk = sim.stack.connector, prompt(12 * 32, seed=1), 32
    sim.serve("cold", tokens[: 9 * chunk])
    for case in range(300):
        length, local_blocks = rng.randint(1, len(tokens)), rng.randint(0, 24)
        local = min(local_blocks * 16, (length - 1) // 16 * 16)
        request = SimRequest(f"q{case}", tokens[:length], 1, 16)
        expected = max(0, min(9, length // chunk) * chunk - local)
        for _ in range(3):
            external, is_async = connector.get_num_new_matched_tokens(request, local)
            assert (external, is_async) == (expected, expected > 0)
        connector.request_finished(request, [])
    sim.settle()
    sim.close()


def test_d3_resumed_with_other_blocks() -> None:
    sim = Sim(
        Shape(
            blocks_per_chunk=2,
            batched_tokens=24,
            max_seqs=3,
            prefix_caching=False,
            save_decode=True,
        )
    )
    for name in "abc":
        sim.add(name, prompt(90, seed=ord(name)), 40)
    for number in range(60):
        if number % 7 == 3 and sim.engine.running:
            sim.engine.preempt_now.add(sim.engine.rng.choice(sim.engine.running).request_id)
        sim.step(work=number % 3 == 0)  # Sim checks that tokens and blocks of every copy match
    sim.settle()
    assert sim.loads() > 0
    assert all(
        sim.held(request) == (request.num_tokens - 1) // 32 for request in sim.requests.values()
    )
    sim.close()


def _stored(sim: Sim, request: SimRequest, computed: int, scheduled: int, *, new: bool) -> int:
    """Chunks that a step of ``scheduled`` tokens stores.

    ``new``: vLLM shows all of the request's blocks.
    """
    blocks = (list(range(1, 21)),)
    output = SimOutput(num_scheduled_tokens={request.request_id: scheduled})
    if new:
        output.scheduled_new_reqs = [
            SimNew(request.request_id, request.prompt_token_ids, blocks, computed)
        ]
    else:
        output.scheduled_cached_reqs = SimCached(
            [request.request_id], set(), {}, [None], [computed]
        )
    meta = sim.stack.connector.build_connector_meta(output)
    return sum(len(job.copies) for job in meta.stores)


def test_d3_a_session_that_goes_on_stores_what_is_new() -> None:
    sim = Sim()
    request = SimRequest("session", prompt(40), 1, 16)
    request.resumable = True
    sim.stack.connector.get_num_new_matched_tokens(request, 0)
    assert _stored(sim, request, 0, 40, new=True) == 2
    request.append(prompt(60, seed=1))
    request.num_prompt_tokens = request.num_tokens
    assert _stored(sim, request, 40, 4, new=True) == 0, "no chunk is complete"
    assert _stored(sim, request, 44, 56, new=False) == 4
    sim.stack.close()


def test_d3_resumed_as_if_it_were_new() -> None:
    sim = Sim()
    request = SimRequest("resumed", prompt(40), 1, 16)
    sim.stack.connector.get_num_new_matched_tokens(request, 0)
    assert _stored(sim, request, 0, 40, new=True) == 2
    sim.stack.side.update_from_workers(
        WorkerMeta(jobs={0: JobReport(1, {0, 1}, 0, 0.1)})
    )  # the copy failed
    assert _stored(sim, request, 0, 40, new=True) == 2, (
        "as vLLM's second model runner shows it after a preemption"
    )
    sim.stack.close()


def test_d4_preempted_while_it_is_stored() -> None:
    sim = Sim(Shape(num_blocks=6, prefix_caching=False), rules={"resume_last": True})
    victim = sim.add("victim", prompt(60), 6)
    assert sim.step().stores
    assert sim.stack.copies[0].pending, "the copy has not run"
    blocks = set(victim.blocks)
    other = sim.add("other", prompt(60, seed=9), 2)
    sim.engine.preempt_now.add("victim")
    assert sim.step().preempted == {"victim"}
    assert blocks & set(other.blocks), "the other request got the victim's blocks in the same step"
    sim.settle()
    assert sim.held(victim) == 3
    sim.serve("again", prompt(60))
    assert sim.engine.loaded_tokens >= 48
    sim.close()


def evict(sim: Sim, count: int) -> None:
    """Push ``count`` chunks out of the pool."""
    other = SimRequest("filler", prompt(16 * sim.shape.blocks_per_chunk * count, seed=77), 1, 16)
    for key in sim.stack.keys(other):
        lease = sim.stack.cache.reserve(key, b"", sim.shape.chunk)
        assert lease is not None
        sim.stack.cache.commit(lease)
        lease.release()


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("evicted", [1, 2, 4])
@pytest.mark.parametrize("local_blocks", [0, 1])
def test_d5_evicted_between_lookup_and_allocation(
    per_chunk: int, evicted: int, local_blocks: int
) -> None:
    sim = Sim(Shape(blocks_per_chunk=per_chunk, pool_slots=4))
    tokens = prompt(4 * sim.shape.chunk + 5)
    sim.serve("cold", tokens)
    hit = sim.engine._local_hit
    sim.engine._local_hit = lambda request: hit(request)[:local_blocks]  # type: ignore[method-assign]
    promise = sim.stack.connector.update_state_after_alloc

    def evict_first(request: Any, blocks: Any, external: int) -> None:
        if external:
            evict(sim, evicted)
        promise(request, blocks, external)

    sim.stack.connector.update_state_after_alloc = evict_first
    warm = sim.add("warm", tokens, 3)
    meta = sim.step()
    [job] = meta.loads
    assert job.lost
    assert not set(job.lost) & set(warm.blocks[:local_blocks]), "blocks of a local hit are not lost"
    sim.settle()
    assert sim.loads() == 1, "no second try for this request"
    sim.close()


@pytest.mark.parametrize("block", [16, 32, 64])
def test_d6_loads_that_start_inside_a_chunk(block: int) -> None:
    per_chunk = 256 // block
    sim = Sim(
        Shape(
            num_blocks=80, block=block, blocks_per_chunk=per_chunk, batched_tokens=512, pool_slots=4
        )
    )
    tokens = prompt(512 + 3)
    sim.serve("cold", tokens)
    hit = sim.engine._local_hit
    for local_blocks in range(2 * per_chunk):
        sim.engine._local_hit = lambda request, n=local_blocks: hit(request)[:n]  # type: ignore[method-assign]
        before = sim.engine.loaded_tokens
        sim.serve(f"warm{local_blocks}", tokens, 2)
        assert sim.engine.loaded_tokens - before == 512 - local_blocks * block
    sim.close()


def test_d6_block_sizes_that_do_not_divide_are_refused() -> None:
    config = kv_cache_config(Shape())
    config.hash_block_size = 24
    with pytest.raises(UnsupportedError, match="hash block size 24"):
        block_geometry(vllm_config(Shape()), config)


SPEC = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (SlidingWindowSpec(**SPEC, sliding_window=MAX_MODEL_LEN - 1), "--max-model-len 1023"),
        (ChunkedLocalAttentionSpec(**SPEC, attention_chunk_size=64), "ChunkedLocalAttentionSpec"),
        (CrossAttentionSpec(**SPEC), "CrossAttentionSpec"),
        (type("Recycled", (FullAttentionSpec,), {})(**SPEC), "Recycled"),
    ],
)
def test_d_blocks_that_a_live_request_gives_back_are_refused(spec: Any, why: str) -> None:
    config = kv_cache_config(Shape())
    config.kv_cache_groups[0].kv_cache_spec = spec
    with pytest.raises(UnsupportedError, match=f"layer.0: .*{why}"):
        block_geometry(vllm_config(Shape()), config)


def test_d_a_window_as_long_as_the_context_is_served() -> None:
    config = kv_cache_config(Shape())
    config.kv_cache_groups[0].kv_cache_spec = SlidingWindowSpec(
        **SPEC, sliding_window=MAX_MODEL_LEN
    )
    assert block_geometry(vllm_config(Shape()), config).block_tokens == 16


def test_d_models_without_prefix_caching_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(Shape())
    refuse_unserved_model(config)
    monkeypatch.setattr(ModelConfig, "attn_type", "decoder")
    for kind, refused in (("LAST", False), ("MEAN", True), ("CLS", True)):
        monkeypatch.setattr(
            config.model_config, "pooler_config", PoolerConfig(seq_pooling_type=kind)
        )
        with (
            pytest.raises(UnsupportedError, match="no prefix caching") if refused else nullcontext()
        ):
            refuse_unserved_model(config)


def test_d7_every_slot_is_pinned() -> None:
    sim = Sim(Shape(pool_slots=4))
    first = sim.serve("first", prompt(64))
    pins = sim.stack.cache.hold("test", sim.stack.keys(first))
    assert len(pins) == 4
    for number in range(54):
        sim.add(f"r{number}", prompt(17, seed=1 + number))
    while sim.engine.requests:
        sim.step(work=True)
    assert sim.stack.counter("refused_chunks") == 54
    assert sim.held(first) == 4
    for pin in pins:
        pin.release()
    sim.serve("later", prompt(17, seed=99))
    assert sim.held(sim.requests["later"]) == 1
    sim.close()


def test_d8_aborted_before_all_was_computed() -> None:
    sim = Sim(Shape(batched_tokens=7 * 16))
    request = sim.add("half", prompt(160))
    sim.step(work=True)
    assert request.num_computed_tokens == 7 * 16
    assert len(request.block_hashes) == 10
    sim.engine.abort("half")
    sim.settle()
    assert sim.held(request) == 7
    sim.close()


@pytest.mark.parametrize("seed", range(6))
def test_d8_rejected_drafts_are_not_stored(seed: int) -> None:
    sim = Sim(Shape(save_decode=True, defer_save=True, prefix_caching=False), rules={"drafts": 5})
    first = sim.serve("first", prompt(30, seed=seed), 60)
    known = first.num_tokens - 1  # the last sampled token has no KV
    assert sim.held(first) == known // 16
    sim.serve("second", [*first.all_token_ids, 1, 2, 3], 4)  # reads every stored byte
    assert sim.engine.loaded_tokens == known // 16 * 16
    sim.close()


def test_d9_another_connector_wins_the_load() -> None:
    sim = Sim(rules={"ignore_hit": 1.0})
    tokens = prompt(100)
    sim.serve("cold", tokens)
    sim.engine.pool.forget_cached()
    request = sim.add("warm", tokens, 2)
    meta = sim.step()
    assert not meta.loads
    assert request.num_computed_tokens > 0
    assert sim.stack.pool.leased == 0
    sim.settle()
    sim.close()


def test_d10_never_admitted(caplog: pytest.LogCaptureFixture) -> None:
    sim = Sim(Shape(lower_tier=True), rules={"queries": 5})
    tokens = prompt(400)
    sim.serve("cold", tokens)
    sim.engine.pool.forget_cached()
    sim.engine.rules.refuse_allocation = 1.0
    lookups = 0
    look = sim.stack.cache.index.lookup

    def counted(*args: Any) -> Any:
        nonlocal lookups
        lookups += 1
        return look(*args)

    sim.stack.cache.index.lookup = counted  # type: ignore[method-assign]
    sim.add("big", tokens)
    caplog.set_level(logging.INFO, logger="kvstow")
    for _ in range(2000):
        sim.step(work=True)
        sim.stack.clock.advance(0.01)
    assert lookups <= 3, "a query that is repeated is answered from memory"
    assert len(caplog.records) <= 1
    assert sim.stack.pool.leased == 0
    sim.engine.rules.refuse_allocation = 0.0
    sim.settle()
    assert sim.engine.loaded_tokens == 400
    sim.close()


def test_d11_asked_not_to_read_the_cache() -> None:
    sim = Sim(Shape(prefix_caching=False))
    tokens = prompt(100)
    sim.serve("logprobs", tokens, skip_reading_prefix_cache=True)
    assert sim.held(sim.requests["logprobs"]) == 6, "still stored"
    assert sim.stack.connector.get_num_new_matched_tokens(sim.requests["logprobs"], 0) == (0, False)
    sim.stack.side._tracked.clear()
    sim.serve("again", tokens, skip_reading_prefix_cache=True)
    assert sim.loads() == 0
    for name in ("requested_tokens", "miss_chunks", "hit_tokens", "hit_chunks"):
        assert sim.stack.counter(name) == 0, "neither a hit nor a miss"
    sim.close()


def test_d12_results_of_what_is_forgotten() -> None:
    rng = random.Random(12)
    sim = Sim(Shape(num_blocks=40), rules={"max_seqs": 8})
    for number in range(12):
        sim.add(f"r{number}", prompt(40, seed=number), 2)
    while sim.engine.requests:
        if rng.random() < 0.4:
            sim.engine.abort(f"r{rng.randrange(12)}")
        sim.step(work=rng.random() < 0.3)
        sim.stack.work(0.3)
    late = WorkerMeta(jobs={number: JobReport(1, {0}, 10, 0.1) for number in (0, 1, 2, 999)})
    for _ in range(3):
        sim.stack.side.update_from_workers(late)
    sim.stack.connector.request_finished(SimRequest("never seen", [1], 1, 16), [])
    sim.stack.connector.update_state_after_alloc(
        SimRequest("never seen", [1], 1, 16), SimBlocks([1]), 16
    )
    assert not sim.stack.side._broken
    sim.settle()
    sim.close()
