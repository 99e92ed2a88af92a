"""Collectives between ranks that each have an emulated device: gloo, by way of the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BarrierOptions

_groups: dict[str, HostGroup] = {}
_kept: list[torch.library.Library] = []  # a library's operators go with it


class _Ended(dist._Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[object]:
        future: torch.futures.Future[object] = torch.futures.Future()
        future.set_result(None)
        return future


class HostGroup(dist.ProcessGroup):
    """What vLLM calls of a group with tensors on the device. A call returns when it has ended."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name
        _groups[name] = self

    @property
    def group_name(self) -> str:  # the base has it from a backend
        return self._name

    def getBackendName(self) -> str:
        return "rbln-ccl"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Ended:
        hosts = [tensor.cpu() for tensor in tensors]
        self._gloo.allreduce(hosts, opts or AllreduceOptions()).wait()
        return _copied(tensors, hosts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Ended:
        hosts = [tensor.cpu() for tensor in tensors]
        self._gloo.broadcast(hosts, opts).wait()
        return _copied(tensors, hosts)

    def _allgather_base(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> _Ended:
        host = torch.empty(output.shape, dtype=output.dtype)
        self._gloo._allgather_base(host, tensor.cpu(), opts or AllgatherOptions()).wait()
        return _copied([output], [host])

    all_gather_single = _allgather_base  # as newer releases of torch call it

    def allgather(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any
    ) -> _Ended:
        hosts = [
            [torch.empty(each.shape, dtype=each.dtype) for each in output] for output in outputs
        ]
        self._gloo.allgather(hosts, [tensor.cpu() for tensor in tensors], opts).wait()
        return _copied(
            [each for output in outputs for each in output],
            [each for host in hosts for each in host],
        )

    def barrier(self, opts: Any = None) -> _Ended:
        self._gloo.barrier(opts or BarrierOptions()).wait()
        return _Ended()


def _copied(tensors: list[torch.Tensor], hosts: list[torch.Tensor]) -> _Ended:
    for tensor, host in zip(tensors, hosts, strict=True):
        tensor.copy_(host)
    return _Ended()


def all_reduce(tensor: torch.Tensor, _: str, group: str) -> torch.Tensor:
    made = tensor.clone()
    _groups[group].allreduce([made])
    return made


def all_gather(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    made = torch.empty(
        (tensor.shape[0] * size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device
    )
    _groups[group]._allgather_base(made, tensor)
    return made


def install() -> None:
    """The backend, and what a compiled graph has in place of calls of a group. Sums only."""
    dist.Backend.register_backend(
        "rbln-ccl",
        lambda options, _: HostGroup(options),
        extended_api=True,
        devices=["rbln", "cpu"],
    )
    library = torch.library.Library("_c10d_functional", "IMPL")
    _kept.append(library)
    library.impl("all_reduce", all_reduce, "PrivateUse1")
    library.impl("all_gather_into_tensor", all_gather, "PrivateUse1")
    library.impl("wait_tensor", lambda tensor: tensor, "PrivateUse1")
