"""Every hook of vLLM's connector: guarded, part of the start, or inherited on purpose.

And what a guard does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from kvstow.errors import FailurePolicyError
from kvstow.layout import Place
from kvstow.vllm import connector as connector_module
from kvstow.vllm.connector import GUARD, KVStowConnector
from kvstow.vllm.lmcache import LMCacheConnectorV1
from kvstow.vllm.metadata import Copy, Handshake, Job, StepMeta, WorkerMeta
from kvstow.vllm.rbln import RBLNLMCacheConnectorV1
from tests.engine_contract.sim import prompt
from tests.engine_contract.stack import (
    Shape,
    connector_of,
    kv_cache_config,
    make_request,
    vllm_config,
)
from tests.engine_contract.vllm_scheduler import Driver
from tests.rigs.sim_requests import SimOutput

pytestmark = pytest.mark.contract

# vLLM calls these while it starts: what is wrong is raised, and vLLM does not start.
START = {
    "get_handshake_metadata",
    "get_required_kvcache_layout",
    "register_kv_caches",
    "set_xfer_handshake_metadata_pp_aware",
    "supports_sleep_mode",
}
# These return a constant, or contain the errors of metrics (tests/unit/test_metrics.py).
CONSTANT = {
    "build_kv_connector_stats",
    "build_prom_metrics",
    "get_kv_connector_stats",
    "requires_kv_delivery",
    "save_kv_layer",
    "wait_for_layer_load",
}
# vLLM's own do nothing, return a constant or keep the metadata, and kvstow needs no more.
INHERITED = {
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "clear_connector_metadata",
    "finish_forward",
    "get_finished_count",
    "get_kv_connector_kv_cache_events",
    "get_loaded_kv_cache_group_ids",  # asked of connectors with several cache groups only
    "get_mem_pool_context",
    "get_transfer_results",  # calls get_finished
    "has_connector_metadata",
    "has_pending_block_frees",
    "on_new_request",
    "register_finished_partial_tail",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "role",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata",  # the form that knows pipeline ranks is overridden
    "supports_divergent_local_hybrid_hits",
    "take_events",
}
OUTPUT = KVConnectorOutput(kv_connector_worker_meta=WorkerMeta(step=1))
LOAD = StepMeta(loads=[Job(7, "r", [], [3, 4])])


class FakeBlocks:
    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([1, 2, 3, 4],)


def request() -> Any:
    return make_request(Shape(), "r", prompt(40))


# For each guarded hook: the side's method behind it, its arguments, and what vLLM must get when
# that method raises.
Case = tuple[str, Callable[[], tuple[Any, ...]], Any]
SCHEDULER: dict[str, Case] = {
    "get_num_new_matched_tokens": ("num_new_matched_tokens", lambda: (request(), 0), (0, False)),
    "get_external_cache_hit_sources": ("hit_sources", lambda: (request(), 16), {}),
    "update_state_after_alloc": (
        "update_state_after_alloc",
        lambda: (request(), FakeBlocks(), 32),
        None,
    ),
    "build_connector_meta": (
        "build_meta",
        lambda: (SimOutput(),),
        StepMeta(has_forward=False),
    ),
    "update_connector_output": ("update_from_workers", lambda: (OUTPUT,), None),
    "request_finished": ("request_finished", lambda: (request(), [1]), (False, None)),
    "has_pending_push_work": ("busy", tuple, False),
    "reset_cache": ("reset", tuple, False),
}
WORKER: dict[str, Case] = {
    "unregister_kv_caches": ("unregister_kv_caches", tuple, None),
    "restore_kv_caches": ("restore_kv_caches", tuple, None),
    "handle_preemptions": ("handle_preemptions", lambda: (LOAD,), None),
    "bind_connector_metadata": ("bind", lambda: (LOAD,), None),
    "start_load_kv": ("submit_loads", lambda: (None,), None),
    "wait_for_save": ("submit_stores", tuple, None),
    "get_finished": ("take_finished", lambda: (set(),), (None, None)),
    "get_block_ids_with_load_errors": ("take_lost_blocks", tuple, set()),
    "build_connector_worker_meta": ("take_report", tuple, None),
    "shutdown": ("close", tuple, None),
}
GUARDED = SCHEDULER.keys() | WORKER.keys()


def hooks() -> set[str]:
    return {name for name in vars(KVConnectorBase_V1) if not name.startswith("_")}


def test_each_hook_of_this_vllm_is_one_of_the_four_kinds() -> None:
    known = GUARDED | START | CONSTANT | INHERITED
    assert not hooks() - known, "a new hook: does kvstow need it, and is it guarded?"
    kinds = (GUARDED, START, CONSTANT, INHERITED)
    assert sum(map(len, kinds)) == len(known), "a hook is of two kinds"


@pytest.mark.parametrize("cls", [KVStowConnector, LMCacheConnectorV1, RBLNLMCacheConnectorV1])
def test_what_is_overridden_is_what_the_table_says(cls: type[KVStowConnector]) -> None:
    for name in hooks():
        hook = inspect.getattr_static(cls, name)
        overridden = hook is not inspect.getattr_static(KVConnectorBase_V1, name)
        own_no_op = cls is RBLNLMCacheConnectorV1 and name == "set_host_xfer_buffer_ops"
        assert overridden == (name not in INHERITED) or own_no_op, name
        assert bool(getattr(hook, GUARD, False)) == (name in GUARDED), name


class Fault(Exception):
    """Nobody foresaw it."""


def fail_once(owner: Any, method: str, error: Exception | None = None) -> None:
    """The next call of ``owner.method`` raises, later ones do not."""
    original = getattr(owner, method)

    def fail(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, method, original)
        raise error or Fault

    setattr(owner, method, fail)


@pytest.mark.parametrize("name", SCHEDULER)
def test_a_scheduler_hook_that_raises_switches_kvstow_off(name: str) -> None:
    if name == "get_external_cache_hit_sources":
        pytest.importorskip("vllm.v1.metrics.cache_hit_source")
    driver = Driver(Shape())
    method, arguments, answer = SCHEDULER[name]
    fail_once(driver.stack.side, method)
    assert getattr(driver.stack.connector, name)(*arguments()) == answer
    assert driver.stack.side._broken
    driver.close()


def test_metrics_that_fail_switch_nothing_off() -> None:
    driver = Driver(Shape())
    fail_once(driver.stack.side, "take_stats")
    assert driver.stack.connector.get_kv_connector_stats() is None
    assert not driver.stack.side._broken
    driver.close()


@pytest.mark.parametrize("name", WORKER)
def test_a_worker_hook_that_raises_switches_the_engine_off(name: str) -> None:
    driver = Driver(Shape())
    side, connector = driver.stack.worker_sides[0], driver.stack.workers[0].connector
    method, arguments, answer = WORKER[name]
    connector.bind_connector_metadata(LOAD)
    fail_once(side, method)
    assert getattr(connector, name)(*arguments()) == answer
    connector.start_load_kv(None)
    assert connector.get_finished(set()) == (None, {"r"})
    assert connector.get_block_ids_with_load_errors() == {3, 4}
    report = connector.build_connector_worker_meta()
    assert report.switched_off
    driver.stack.connector.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=report)
    )
    assert driver.stack.side._broken
    driver.close()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("method", ["copy_in", "copy_out", "finished", "fence"])
def test_a_device_that_raises_fails_no_request(method: str, tp: int) -> None:
    """Loads and stores are under way, on one of the ranks.

    Every request ends with the right tokens.
    """
    driver = Driver(Shape(prefix_caching=False, tp=tp))
    driver.may_break = True
    prompts = [prompt(100, seed) for seed in range(3)]
    for number, tokens in enumerate(prompts):
        driver.add(f"warm{number}", tokens)
    driver.run()
    for number, tokens in enumerate(prompts):
        driver.add(f"again{number}", [*tokens, 5], 4)
        driver.add(f"new{number}", prompt(60, 10 + number), 4)
    driver.step()
    fail_once(driver.stack.workers[-1].device, method)
    driver.run()
    if method != "fence":  # without a preemption nothing is fenced
        assert driver.stack.side._broken
    driver.close()


def test_a_device_that_cannot_be_closed_fails_no_request() -> None:
    driver = Driver(Shape(prefix_caching=False))
    driver.may_break = True
    driver.add("a", prompt(100))
    driver.run()
    driver.add("b", [*prompt(100), 5], 4)
    device = driver.stack.workers[0].device
    fail_once(device, "copy_in")
    fail_once(device, "close")
    driver.run()
    assert driver.stack.side._broken
    driver.close()


def test_a_failure_that_the_user_wants_to_end_vllm_passes() -> None:
    driver = Driver(Shape())
    connector = driver.stack.workers[0].connector
    connector.bind_connector_metadata(LOAD)
    wanted = FailurePolicyError("direct.failure_policy is raise")
    fail_once(driver.stack.worker_sides[0], "take_finished", wanted)
    with pytest.raises(FailurePolicyError):
        connector.get_finished(set())
    assert not driver.stack.worker_sides[0]._switched_off
    driver.close()


# --- sleep mode (vLLM 0.33) -----------------------------------------------------------------------


def test_sleeping_waits_for_copies_and_waking_goes_on() -> None:
    driver = Driver(Shape(prefix_caching=False))
    worker = driver.stack.workers[0]
    driver.add("a", prompt(100))
    while not driver.finished("a"):
        driver.step()
    assert worker.device.in_flight, "the test needs copies that run"
    for _ in range(2):
        worker.connector.unregister_kv_caches()
        assert not worker.device.in_flight
    worker.connector.bind_connector_metadata(
        StepMeta(loads=[Job(99, "r", [Copy(Place("pool", ()), [1])])])
    )
    worker.connector.start_load_kv(None)
    assert worker.connector.get_block_ids_with_load_errors() == {1}, "a copy while vLLM sleeps"
    for _ in range(2):
        worker.connector.restore_kv_caches()
    driver.stack.worker_sides[0]._received.clear()
    driver.settle()
    driver.add("b", [*prompt(100), 5])
    driver.run()
    driver.settle()
    assert worker.device.loads == 1
    driver.close()


def test_the_handshake_after_a_wake_up_builds_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = Shape()
    driver = Driver(shape)
    built: list[Any] = []

    def scheduler_side(*args: Any) -> Any:
        built.append(args)
        return driver.stack.side

    monkeypatch.setattr(connector_module.start, "scheduler_side", scheduler_side)
    connector = connector_of(vllm_config(shape), kv_cache_config(shape), KVConnectorRole.SCHEDULER)
    handshake = driver.stack.worker_sides[0].handshake()
    for _ in range(2):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): replace(handshake)})
    assert len(built) == 1
    assert not driver.stack.side._broken
    other: Handshake = replace(handshake, groups=())
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): other})
    assert len(built) == 1
    assert driver.stack.side._broken, "other pages than at the start"
    driver.close()


def test_sleep_mode_is_supported() -> None:
    transfer = vllm_config(Shape()).kv_transfer_config
    assert transfer is not None
    assert KVStowConnector.supports_sleep_mode(transfer)
