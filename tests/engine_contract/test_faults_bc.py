"""Fault catalogue B3 and B4 (adapters), C6 and C7 (stores that never happen), F6 (hooks that fail)."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.testing.manual import ManualExecutor
from kvstow.vllm import fingerprint
from kvstow.vllm.scheduler import SKIP_LOAD, SKIP_STORE
from tests.engine_contract.scenario import Traffic
from tests.engine_contract.sim import Sim, prompt
from tests.engine_contract.stack import Shape, build_stack, make_request
from tests.engine_contract.vllm_scheduler import IDLE_STEPS, Driver
from tests.rigs.sim_requests import SimRequest


def adapter(path: Path, weights: bytes | None, name: str = "x") -> Any:
    """A LoRA request for an adapter directory; without weights there is no directory."""
    if weights is not None:
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_bytes(weights)
    number = int.from_bytes((weights or b"").ljust(8)[:8], "big")
    return SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=str(path), content=number)


def content(lora: Any) -> int:
    """What the adapter does to KV: another number for other files."""
    return int(lora.content)


def test_b3_b4_adapters_of_one_name_never_meet(tmp_path: Path) -> None:
    sim = Sim(Shape(prefix_caching=False, pool_slots=64), adapter_of=content)
    one, two = adapter(tmp_path / "1", b"one"), adapter(tmp_path / "2", b"two")
    tokens = prompt(100)
    for number, lora in enumerate((None, one, two)):
        sim.serve(f"cold {number}", tokens, 2, lora_request=lora)
    assert sim.loads() == 0, "three disjoint sets of keys"
    assert sim.stack.counter("stored_chunks") == 18
    for number, lora in enumerate((None, one, two)):
        sim.serve(f"warm {number}", tokens, 2, lora_request=lora)
    assert sim.loads() == 3
    sim.close()


def test_m5_an_adapters_files_are_not_read_on_the_schedulers_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_remembered", {})
    sim = Sim(Shape(prefix_caching=False), adapter_of=content)
    reader = ManualExecutor(sim.stack.clock)
    sim.stack.side._adapters = fingerprint.Adapters(reader, sim.stack.clock)
    lora, tokens = adapter(tmp_path / "1", b"one"), prompt(40)
    waiting = sim.add("waits", tokens, lora_request=lora)
    sim.add("other", prompt(40, 1))
    for _ in range(5):
        sim.step(work=True)
    assert waiting.num_computed_tokens == 0
    assert sim.requests["other"].is_finished(), "others go on"
    reader.run_all()
    sim.settle()
    assert waiting.is_finished()
    sim.serve("again", tokens, lora_request=lora)
    assert sim.loads() == 1

    late = sim.add("late", tokens, lora_request=adapter(tmp_path / "2", b"two"))
    sim.step(work=True)
    sim.stack.clock.advance(fingerprint.MAX_READING_S)
    sim.settle()
    assert late.is_finished(), "it goes on without the cache"
    assert sim.loads() == 1
    reader.run_all()
    sim.close()


def test_b4_an_adapter_that_changed_in_place(tmp_path: Path) -> None:
    sim = Sim(Shape(prefix_caching=False), adapter_of=content)
    tokens = prompt(100)
    sim.serve("before", tokens, lora_request=adapter(tmp_path / "1", b"one"))
    sim.serve("after", tokens, lora_request=adapter(tmp_path / "1", b"another"))
    assert sim.loads() == 0
    assert sim.stack.counter("stored_chunks") == 6, (
        "its KV may be of either: nothing of it is stored"
    )
    sim.close()


def test_b4_an_adapter_that_changed_between_its_digest_and_its_load(tmp_path: Path) -> None:
    """vLLM may load an adapter only when it computes, and may have waited long for that."""
    sim = Sim(Shape(prefix_caching=False), adapter_of=content)
    waiting = sim.add("waits", prompt(100), lora_request=adapter(tmp_path / "1", b"one"))
    sim.step()
    adapter(tmp_path / "1", b"another")
    sim.settle()
    assert waiting.is_finished()
    sim.stack.side._adapters = fingerprint.Adapters()  # a later engine, with the first files again
    sim.serve("later", prompt(100), lora_request=adapter(tmp_path / "1", b"one"))
    assert sim.loads() == 0
    sim.close()


def test_b3_without_a_digest_neither_loaded_nor_stored(tmp_path: Path) -> None:
    sim = Sim(Shape(prefix_caching=False), adapter_of=content)
    nowhere, tokens = adapter(tmp_path / "nowhere", None), prompt(100)
    for turn in range(2):
        sim.serve(f"turn {turn}", tokens, 2, lora_request=nowhere)
    assert sim.loads() == sim.stores() == 0
    assert sim.stack.pool.free == sim.stack.pool.slots
    sim.close()


def test_c6_asking_again_changes_nothing() -> None:
    sim = Sim(Shape(prefix_caching=False), rules={"queries": 300})
    tokens = prompt(100)
    sim.serve("cold", tokens[:50])
    sim.engine.rules.refuse_allocation = 1.0
    request = sim.add("warm", tokens)
    for _ in range(20):
        sim.step(work=True)
    sim.engine.rules.refuse_allocation = 0.0
    sim.settle()
    assert sim.held(request) == 6
    assert sim.engine.loaded_tokens == 48
    sim.close()


@pytest.mark.parametrize("per_chunk", [1, 2])
def test_c7_every_budget_stores_every_chunk(per_chunk: int) -> None:
    for budget in range(1, per_chunk * 16 + 8):
        sim = Sim(Shape(blocks_per_chunk=per_chunk, batched_tokens=budget, max_seqs=1))
        request = sim.serve("cold", prompt(5 * sim.shape.chunk + 3))
        assert sim.held(request) == 5, f"with {budget} tokens a step"
        sim.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_c7_in_vllms_scheduler(asynchronous: bool) -> None:
    for budget in (1, 2, 3, 5, 7, 11, 15, 16, 17, 19, 23):
        driver = Driver(
            Shape(
                batched_tokens=budget, max_seqs=1, async_scheduling=asynchronous, save_decode=True
            )
        )
        request = driver.add("cold", prompt(5 * 16 + 3), 32)
        driver.run()
        driver.settle()
        keys = driver.stack.keys(request)
        assert len(keys) == 7
        assert driver.stack.cache.missing(keys) == [], f"with {budget} tokens a step"
        driver.close()


METHODS = ("fetch", "hold", "forget", "missing", "reserve", "commit", "poll", "busy", "origins")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("call", [0, 3, 9])
def test_f6_a_fault_nobody_foresaw_fails_no_request(name: str, call: int) -> None:
    """From its ``call``-th call on a method of the engine raises: requests are computed as without kvstow."""
    shape = Shape(prefix_caching=False, num_blocks=40)
    driver = Driver(shape, 1)
    driver.may_break = True
    target, calls = driver.stack.cache, 0
    works = getattr(target, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > call:
            raise ZeroDivisionError(name)
        return works(*args, **kwargs)

    setattr(target, name, broken)
    traffic = Traffic(random.Random(5), shape, 120)
    for number in range(14):
        driver.add(f"r{number}", traffic.prompt(), 6)
        driver.stack.work(0.5)
        driver.step()
    driver.run()
    for _ in range(IDLE_STEPS):
        driver.stack.work(1.0)
        if not driver.step():
            break
    else:
        raise AssertionError("the engine never gets to sleep")
    assert not driver.scheduler.requests
    assert driver.stack.side._broken == (calls > call)
    setattr(target, name, works)
    driver.close()


def test_f6_without_a_scheduler_side_every_hook_does_nothing() -> None:
    stack = build_stack(Shape())
    connector = stack.connector
    connector._scheduler = None
    request = SimRequest("a", prompt(40), 1, 16)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.request_finished(request, []) == (False, None)
    assert connector.has_pending_push_work() is False
    assert connector.get_kv_connector_stats() is None
    connector.reset_cache()
    stack.close()


def test_a_rank_that_cannot_map_the_pool() -> None:
    """Its requests are computed at once, none of them waits for the pool."""
    driver = Driver(Shape(tp=2))
    driver.may_break = True
    side = driver.stack.worker_sides[1]
    side._mount = lambda mount: side._report_error("no memory to map")  # type: ignore[method-assign]
    driver.add("a", prompt(40), 2)
    for _ in range(6):
        driver.stack.work(1.0)
        driver.step()
    assert driver.finished("a")
    assert not driver.stack.connector.has_pending_push_work()
    driver.close()


SENT = [
    *(
        {"kv_transfer_params": value}
        for value in ("x", "", 7, 0.0, True, ["kvstow.skip_load"], [], {})
    ),
    *(
        {"kv_transfer_params": {SKIP_LOAD: value, SKIP_STORE: value}}
        for value in ("no", ["a"], [], {}, {"a": 1}, 0.5)
    ),
    *(
        {"lora_request": SimpleNamespace(lora_name=name, lora_path=name)}
        for name in ("", "\0", "~nobody", "\ud800")
    ),
    {"lora_request": SimpleNamespace(lora_name="a" * 9999, lora_path="a" * 9999)},
    {"cache_salt": "\0"},
    {"cache_salt": "한" * 9999},
]


@pytest.mark.parametrize("options", SENT, ids=lambda options: repr(options)[:60])
def test_whatever_a_client_sends_concerns_only_its_request(options: dict[str, Any]) -> None:
    sim = Sim(Shape(prefix_caching=False))
    tokens = prompt(50)
    sim.serve("odd\x1b\n", tokens, **options)
    sim.serve("odd again", tokens, **options)
    sim.serve("plain", tokens)
    loads = sim.engine.loaded_tokens
    sim.serve("plain again", tokens)
    assert sim.engine.loaded_tokens == loads + 48
    sim.close()


@pytest.mark.parametrize("value", ["x", 7, ["kvstow.skip_load"]])
def test_transfer_parameters_that_are_none_by_any_reading(value: Any) -> None:
    """As vLLM 0.30 passes them on; later versions fail such a request themselves."""
    shape = Shape(prefix_caching=False)
    driver = Driver(shape)
    tokens = prompt(50)
    for number in range(2):
        request = make_request(shape, f"r{number}", tokens)
        request.kv_transfer_params = {}
        driver.requests[request.request_id], driver.outputs[request.request_id] = request, []
        driver.scheduler.add_request(request)
        request.kv_transfer_params = value
        driver.run()
    driver.settle()
    assert driver.stack.workers[0].device.loads == 1
    driver.close()
