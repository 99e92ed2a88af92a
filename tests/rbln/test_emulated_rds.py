"""Direct storage on the emulated device: its rules are enforced, and forgetting a side of memory gives old bytes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.rbln import emulator

BYTES = 1 << 16


@pytest.fixture
def rds(drive: emulator.Drive) -> Any:
    drive.fail = None
    return sys.modules["rebel.rds"]


@pytest.fixture
def vmem(drive: emulator.Drive) -> Any:
    return sys.modules["rebel._C"].vmem  # type: ignore[attr-defined]


@pytest.fixture
def staging() -> torch.Tensor:
    made = torch.zeros(BYTES, dtype=torch.uint8, device="rbln")
    torch.rbln.bind_device_memory(made)  # type: ignore[attr-defined]
    return made


def noise(seed: int) -> torch.Tensor:
    return torch.randint(
        0, 255, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def move(
    rds: Any, vmem: Any, chunk: Any, staging: torch.Tensor, *, write: bool, offset: int = 8192
) -> None:
    with rds.Stream(device=0, node_id=0) as stream:
        for buffer in vmem.get_device_buffers(staging.data_ptr()):
            (chunk.write if write else chunk.read)(buffer, file_offset=offset, stream=stream)


@pytest.mark.parametrize("forget", [None, "sync_to_device", "mark_device_updated"])
def test_a_round_trip_needs_both_sides_synchronised(
    rds: Any, vmem: Any, staging: torch.Tensor, forget: str | None
) -> None:
    chunk, data = rds.Chunk(size=1 << 20, device=0), noise(1)
    staging.copy_(data)
    if forget != "sync_to_device":
        vmem.sync_to_device(staging.data_ptr())
    move(rds, vmem, chunk, staging, write=True)
    staging.copy_(noise(2))
    vmem.sync_to_device(staging.data_ptr())
    move(rds, vmem, chunk, staging, write=False)
    if forget != "mark_device_updated":
        rds.mark_device_updated(staging.data_ptr())
    assert torch.equal(staging.cpu(), data) == (forget is None)
    chunk.close()


def test_what_torch_writes_after_a_read_counts(rds: Any, vmem: Any, staging: torch.Tensor) -> None:
    chunk, data = rds.Chunk(size=1 << 20), noise(1)
    staging.copy_(data)
    vmem.sync_to_device(staging.data_ptr())
    move(rds, vmem, chunk, staging, write=True)
    move(rds, vmem, chunk, staging, write=False)
    rds.mark_device_updated(staging.data_ptr())
    staging[:4096].copy_(torch.zeros(4096, dtype=torch.uint8))
    assert torch.equal(
        staging.cpu(), torch.cat([torch.zeros(4096, dtype=torch.uint8), data[4096:]])
    )
    chunk.close()


def test_transfers_happen_when_the_stream_is_drained(
    rds: Any, vmem: Any, staging: torch.Tensor, drive: Any
) -> None:
    chunk, before = rds.Chunk(size=1 << 20), dict(drive.transfers)
    stream = rds.Stream()
    [buffer] = vmem.get_device_buffers(staging.data_ptr())
    chunk.write(buffer, file_offset=0, stream=stream)
    assert drive.transfers == before
    stream.synchronize()
    assert drive.transfers["write"] == before["write"] + 1
    chunk.close()


def test_an_area_that_is_not_bound_has_no_buffers(vmem: Any) -> None:
    there = torch.zeros(BYTES, dtype=torch.uint8, device="rbln")
    assert vmem.get_device_buffers(there.data_ptr()) == []
    with pytest.raises(RuntimeError, match="whole storage"):
        torch.rbln.bind_device_memory(there[4096:])  # type: ignore[attr-defined]


@pytest.mark.parametrize("offset", [100, 1 << 20, -4096])
def test_offsets_are_aligned_and_inside(
    rds: Any, vmem: Any, staging: torch.Tensor, offset: int
) -> None:
    chunk = rds.Chunk(size=1 << 20)
    [buffer] = vmem.get_device_buffers(staging.data_ptr())
    with pytest.raises(ValueError):
        chunk.write(buffer, file_offset=offset)
    chunk.close()


def test_a_transfer_moves_a_whole_area(rds: Any, vmem: Any, staging: torch.Tensor) -> None:
    chunk = rds.Chunk(size=1 << 20)
    [buffer] = vmem.get_device_buffers(staging.data_ptr())
    with pytest.raises(ValueError, match="whole"):
        chunk.write(buffer._replace(size=4096))
    with pytest.raises(ValueError, match="multiple"):
        chunk.write(buffer._replace(size=5000))
    chunk.close()


def test_chunks_are_aligned_and_run_out(rds: Any) -> None:
    with pytest.raises(ValueError, match="4096"):
        rds.Chunk(size=5000)
    with pytest.raises(rds.RdsError, match="SYS_ENOSPC"):
        rds.Chunk(size=1 << 40)


def test_a_failing_drive_says_so(
    rds: Any, vmem: Any, staging: torch.Tensor, drive: emulator.Drive
) -> None:
    chunk = rds.Chunk(size=1 << 20)
    drive.fail = "EIO"
    with pytest.raises(rds.RdsError, match="EIO"):
        move(rds, vmem, chunk, staging, write=True)
    drive.fail = None
    chunk.close()
