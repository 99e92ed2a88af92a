"""The connector for vllm-rbln without an engine: registration, and a loud failure for each trap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

vllm = pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import SlidingWindowSpec  # noqa: E402

from kvstow.device.base import Transfer  # noqa: E402
from kvstow.device.rbln.device import RblnDevice  # noqa: E402
from kvstow.device.rbln.runtime import TorchRbln  # noqa: E402
from kvstow.errors import UnsupportedError  # noqa: E402
from kvstow.runtime import SystemClock, ThreadExecutor  # noqa: E402
from kvstow.testing.guarded_pool import Host  # noqa: E402
from kvstow.testing.kv_layouts import Built, Shape, block_bytes, fill  # noqa: E402
from kvstow.vllm import rbln_config  # noqa: E402
from kvstow.vllm.groups import _refuse_unserved_layer  # noqa: E402
from kvstow.vllm.metadata import StepMeta  # noqa: E402
from kvstow.vllm.rbln import RBLNLMCacheConnectorV1  # noqa: E402
from kvstow.vllm.worker import WorkerSide  # noqa: E402
from tests.rbln import layouts  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GOOD = SimpleNamespace(
    use_custom_kernel=False, compile_dtype="", enforce_model_fp32=False, use_w8a8=False
)


def config(additional: object = GOOD, algorithm: str = "sha256") -> Any:
    return SimpleNamespace(
        additional_config=additional,
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
    )


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_good_configuration_is_served() -> None:
    rbln_config.refuse_unserved(config())


@pytest.mark.parametrize("other", [{}, None, SimpleNamespace(optimum_overrides={})])
def test_another_model_implementation_is_refused_naming_the_flag(other: object) -> None:
    with pytest.raises(RuntimeError, match="--model-impl vllm"):
        rbln_config.refuse_unserved(config(other))


@pytest.mark.parametrize("value", ["0", "False", ""])
def test_kv_inside_the_compiled_model_is_refused_naming_the_variable(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RBLN_USE_DEVICE_TENSOR", value)
    with pytest.raises(RuntimeError, match="VLLM_RBLN_USE_DEVICE_TENSOR=1"):
        rbln_config.refuse_unserved(config())
    monkeypatch.setenv("VLLM_RBLN_USE_DEVICE_TENSOR", "1")
    rbln_config.refuse_unserved(config())


def test_a_random_root_hash_is_refused_naming_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    rbln_config.refuse_unserved(config(algorithm="sha256"))
    with pytest.raises(RuntimeError, match="Set PYTHONHASHSEED=0"):
        rbln_config.refuse_unserved(config(algorithm="xxhash"))
    monkeypatch.setenv("PYTHONHASHSEED", "any text")
    rbln_config.refuse_unserved(config(algorithm="xxhash"))


def test_the_connector_refuses_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(RuntimeError, match="PYTHONHASHSEED"):
            RBLNLMCacheConnectorV1(config(algorithm="xxhash"), role, SimpleNamespace())  # type: ignore[arg-type]


def test_ring_blocks_of_sliding_windows_are_refused() -> None:
    class RBLNSlidingWindowSpec(SlidingWindowSpec):
        """vllm-rbln's: one block a request, overwritten in place."""

    spec = RBLNSlidingWindowSpec(
        block_size=64, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
    )
    with pytest.raises(UnsupportedError, match="RBLNSlidingWindowSpec"):
        _refuse_unserved_layer("layer 3", spec, max_model_len=64)


def test_old_torch_rbln_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.rbln, "synchronize")  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="torch-rbln"):
        TorchRbln()


def test_nothing_of_the_vendors_is_imported() -> None:
    code = (
        "import sys, kvstow.vllm.rbln, kvstow.device.rbln.device; "
        "print([m for m in sys.modules if m.split('.')[0] in ('rebel', 'torch_rbln', 'vllm_rbln', 'lmcache_rbln')])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_name_is_the_one_that_vllm_rbln_knows() -> None:
    assert RBLNLMCacheConnectorV1.__name__ == "RBLNLMCacheConnectorV1"


def test_numerics_enter_the_namespace() -> None:
    seen = {rbln_config.numerics(config())}
    for name, value in (
        ("use_w8a8", True),
        ("compile_dtype", "bf16"),
        ("enforce_model_fp32", True),
    ):
        seen.add(rbln_config.numerics(config(SimpleNamespace(**{**vars(GOOD), name: value}))))
    assert len(seen) == 4
    assert rbln_config.numerics(config({})) == ""


@pytest.mark.parametrize("custom", [False, True])
def test_the_block_axis_is_the_configurations(custom: bool) -> None:
    assert rbln_config.block_axis(config(SimpleNamespace(use_custom_kernel=custom))) == int(custom)


# --- registration ----------------------------------------------------------------------------------------------------


def kv(blocks: int) -> Built:
    made = layouts.blocks_first(Shape(layers=2, blocks=blocks, device="rbln"))
    fill(made, seed=blocks)
    return made


class Worker:
    """A worker's connector over ``blocks`` blocks, as far as its constructor would have come."""

    def __init__(self, blocks: int = 6) -> None:
        self.built = kv(blocks)
        self.device = RblnDevice(ThreadExecutor("copy"), SystemClock())
        self.side = WorkerSide(
            lambda kind: self.device, [self.built.specs], (0, 0), (0, 0), "here", ""
        )
        self.connector = object.__new__(RBLNLMCacheConnectorV1)
        self.connector._worker, self.connector._scheduler, self.connector._registered = (
            self.side,
            None,
            None,
        )
        self.connector._connector_metadata = None

    def moves(self, built: Built, block: int) -> bool:
        """Whether a copy out of ``block`` gives ``built``'s bytes."""
        [layer] = {spec.page_bytes for spec in built.specs.values()}
        host = Host(2 * layer, 1)
        self.device.map_pool(host.memory, 0)
        self.device.copy_out(1, [Transfer(host.place(0), [block])])
        self.device.fence([1])
        [ended] = self.device.finished()
        return not ended.failed and host.payload(0) == b"".join(
            block_bytes(built, n, block) for n in built.specs
        )


@pytest.fixture
def worker() -> Any:
    made = Worker()
    yield made
    made.side.close()


def test_registration_is_finalised_after_warm_up(worker: Worker) -> None:
    worker.connector.register_kv_caches(worker.built.caches)  # type: ignore[arg-type]
    assert worker.side.device is None  # before the warm-up nothing is looked at
    worker.connector.set_host_xfer_buffer_ops(lambda *_: None)
    worker.connector.finalize_kv_cache_registration()
    assert worker.side.device is worker.device
    worker.connector.finalize_kv_cache_registration()
    assert worker.moves(worker.built, 5)


@pytest.mark.parametrize("hook", ["handshake", "metadata"])
def test_without_the_hook_the_first_use_finalises(worker: Worker, hook: str) -> None:
    connector = worker.connector
    connector.register_kv_caches(worker.built.caches)  # type: ignore[arg-type]
    if hook == "handshake":
        assert connector.get_handshake_metadata() is not None
    else:  # a step's: it comes before any transfer
        connector.bind_connector_metadata(StepMeta())
    assert worker.side.device is worker.device


def test_registration_with_other_tensors(worker: Worker) -> None:
    """As after a dynamic resize: more blocks than the constructor was told, in other memory."""
    worker.connector.register_kv_caches(worker.built.caches)  # type: ignore[arg-type]
    worker.connector.finalize_kv_cache_registration()
    before = worker.side.handshake()
    larger = kv(20)
    worker.connector.register_kv_caches(larger.caches)  # type: ignore[arg-type]
    worker.connector.finalize_kv_cache_registration()
    assert worker.moves(larger, 19)
    assert not worker.moves(worker.built, 5)
    assert worker.side.handshake() == before


def test_meta_tensors_are_refused_at_registration(worker: Worker) -> None:
    meta = {"layers.0.attn": torch.zeros(6, 2, 2, 1, 16, 16, device="meta")}
    with pytest.raises(
        RuntimeError, match=r"layers\.0.*VLLM_RBLN_USE_DEVICE_TENSOR=1.*--model-impl vllm"
    ):
        worker.connector.register_kv_caches(meta)


def test_a_layout_that_is_not_known_is_refused_when_finalised(worker: Worker) -> None:
    caches = {name: cache.transpose(0, 1) for name, cache in worker.built.caches.items()}  # type: ignore[union-attr]
    worker.connector.register_kv_caches(caches)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn"):
        worker.connector.get_handshake_metadata()


def test_flushing_is_a_no_op_and_wrong_metadata_does_not_reach_vllm(worker: Worker) -> None:
    worker.connector.flush_deferred_load()
    worker.connector.register_kv_caches(worker.built.caches)  # type: ignore[arg-type]
    worker.connector.handle_preemptions(None)  # type: ignore[arg-type]
    worker.connector.bind_connector_metadata(None)  # type: ignore[arg-type]
