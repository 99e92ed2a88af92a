"""kvstow as one connector of several: inside vLLM's MultiConnector, and inside kvstow's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstow.errors import UnsupportedError
from kvstow.vllm import start
from kvstow.vllm.connector import KVStowConnector
from tests.engine_contract.other_connector import OtherConnector, OtherHandshake
from tests.engine_contract.sim import prompt
from tests.engine_contract.stack import Shape, kv_cache_config, sent, vllm_config
from tests.engine_contract.vllm_scheduler import Driver
from tests.rigs.sim_worker import SimWorker

pytestmark = pytest.mark.contract

KVSTOW = {
    "kv_connector": "KVStowConnector",
    "kv_connector_module_path": "kvstow.vllm.connector",
    "kv_role": "kv_both",
}
OTHER = {
    "kv_connector": "OtherConnector",
    "kv_connector_module_path": "tests.engine_contract.other_connector",
    "kv_role": "kv_both",
}
SHAPE = Shape(prefix_caching=False)
OWN = {"kv_connector_module_path": "kvstow.vllm.multi"}
VLLMS = {"kv_load_failure_policy": "recompute"}


def multi(*connectors: dict[str, Any], **more: Any) -> Callable[[VllmConfig], None]:
    """Puts ``connectors`` into a MultiConnector with the options ``more``."""

    def configure(config: VllmConfig) -> None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": list(connectors)},
            **more,
        )

    return configure


def configured(configure: Callable[[VllmConfig], None]) -> VllmConfig:
    config = vllm_config(SHAPE)
    configure(config)
    return config


def worker_of(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes simulated workers whose connector is the MultiConnector of ``config``."""

    def make(connector: KVStowConnector, *args: Any, **kwargs: Any) -> SimWorker:
        monkeypatch.setattr(start, "worker_side", lambda *_: connector._worker)
        outer = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config(SHAPE)
        )
        return SimWorker(outer, *args, **kwargs)

    return make


@pytest.mark.parametrize("more", [OWN, VLLMS], ids=["kvstow's", "vLLM's"])
@pytest.mark.parametrize("connectors", [(KVSTOW, OTHER), (OTHER, KVSTOW), (KVSTOW,)])
def test_a_failed_load_is_computed(
    connectors: tuple[dict[str, Any], ...], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Driver`` compares every token with what an engine without a cache computes."""
    configure = multi(*connectors, **more)
    worker = worker_of(configured(configure), monkeypatch)
    failing = False

    def fails(load: bool, transfers: Any) -> Any:
        return range(len(transfers)) if load and failing else ()

    driver = Driver(SHAPE, configure=configure, worker_of=worker, fails=fails)
    driver.add("a", prompt(100))
    driver.run()
    driver.settle()
    for failing in (False, True):
        driver.add(f"b{failing}", [*prompt(100), 5], 4)
        driver.run()
        driver.settle()
    assert driver.stack.workers[0].device.loads == 2
    driver.close()


def test_a_policy_that_ends_requests_is_refused_at_start() -> None:
    config = configured(multi(KVSTOW, OTHER))
    with set_current_vllm_config(config), pytest.raises(UnsupportedError) as refusal:
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config(SHAPE))
    assert '"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector"' in str(
        refusal.value
    )


@pytest.mark.parametrize(
    "configure",
    [
        multi(KVSTOW, **VLLMS),
        multi(KVSTOW, **OWN),
        multi({**KVSTOW, "kv_role": "kv_producer"}),
        lambda config: None,
    ],
    ids=["policy", "kvstow's own", "it never loads", "alone"],
)
def test_a_start_that_can_work_is_not_refused(
    configure: Callable[[VllmConfig], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def reached() -> None:
        raise Reached

    monkeypatch.setattr(start, "get_pp_group", reached)
    config = configured(configure)
    with set_current_vllm_config(config), pytest.raises(Reached):
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config(SHAPE))


@pytest.mark.parametrize("connectors", [(KVSTOW, OTHER), (OTHER, KVSTOW)])
def test_each_connector_gets_its_own_handshake(
    connectors: tuple[dict[str, Any], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure = multi(*connectors, **OWN)
    driver = Driver(
        SHAPE, configure=configure, worker_of=worker_of(configured(configure), monkeypatch)
    )
    built: list[Any] = []
    monkeypatch.setattr(
        start, "scheduler_side", lambda *args: built.append(args) or driver.stack.side
    )
    answer = sent(driver.stack.workers[0].connector.get_handshake_metadata())
    outer = driver.scheduler.connector
    driver.stack.connector._scheduler = None
    outer.set_xfer_handshake_metadata_pp_aware({(0, 0): answer})
    [other] = [each for each in outer.sub_connectors if isinstance(each, OtherConnector)]
    assert other.handshakes == {0: OtherHandshake(0)}
    assert built[0][2] == {(0, 0): driver.stack.worker_sides[0].handshake()}
    driver.close()


def test_another_connectors_handshake_is_refused_by_what_to_change() -> None:
    driver = Driver(SHAPE, configure=multi(OTHER, KVSTOW, **VLLMS))
    driver.stack.connector._scheduler = None
    with pytest.raises(UnsupportedError, match=r"OtherHandshake.*kvstow\.vllm\.multi"):
        driver.stack.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): OtherHandshake(0)})
