"""An emulated RBLN NPU: a torch device ``rbln`` in host memory, and ``rebel.rds`` over a file.

It exists because no NPU can be had where these tests run. It follows the rules that are known from public code and
makes breaking them visible: the host cannot reach device memory, copies happen late, direct storage sees only what was
synchronised. Everything that is shown with it is **emulated**; it says nothing about an NPU's speed, and does not model
physical layouts and types or several chiplets.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import torch

from tests.rbln.emulator import build, rds, torch_rbln
from tests.rbln.emulator.rds import Drive
from tests.rbln.emulator.torch_rbln import native

__all__ = [
    "Drive",
    "configure",
    "copies",
    "counted",
    "install",
    "install_rds",
    "refuse_fallback",
    "reset_counters",
]


def install() -> None:
    """Make ``device="rbln"`` and ``torch.rbln`` exist in this process. Again does nothing; there is no way back."""
    there = getattr(torch, "rbln", None) or sys.modules.get("torch_rbln")
    if there is not None:
        if not hasattr(there, "EMULATED"):
            raise RuntimeError("the vendor's torch_rbln is loaded: it is not emulated over")
        return
    torch.utils.rename_privateuse1_backend("rbln")
    torch.ops.load_library(str(build.library()))
    made = torch_rbln.module()
    torch._register_device_module("rbln", made)
    torch.utils.generate_methods_for_privateuse1_backend()
    sys.modules["torch.rbln"] = made
    configure()


def install_rds(path: Path, size: int) -> Drive:
    """Make ``rebel.rds`` and ``rebel._C`` exist in this process, over ``path``."""
    drive = Drive(path, size)
    made = rds.modules(drive)
    try:
        rebel = importlib.import_module("rebel")
    except ModuleNotFoundError:
        rebel = sys.modules.setdefault("rebel", types.ModuleType("rebel", "EMULATED"))
    sys.modules.update(made)
    for name, module in made.items():
        setattr(rebel, name.removeprefix("rebel."), module)
    return drive


def configure(devices: int = 1, capacity_bytes: int = 0, delay_us: int = 0) -> None:
    """``capacity_bytes``: of the device's memory, 0 for no limit. ``delay_us``: before each piece of queued work."""
    native().configure(devices, capacity_bytes, delay_us)


def reset_counters() -> None:
    native().reset_counters()


def counted() -> dict[str, int]:
    """What happened since the last reset: ``h2d``, ``d2h``, ``d2d`` with ``.calls``, ``.bytes``, ``.async`` and
    ``.strided`` (a copy that is no plain move of contiguous bytes), and ``fallback.NAME`` per operator run on the CPU.
    """
    return dict(native().counted())


def copies() -> dict[str, int]:
    """``counted`` without the operators."""
    return {name: value for name, value in counted().items() if not name.startswith("fallback.")}


def refuse_fallback(*names: str) -> None:
    """Let these operators fail instead of running on the CPU; "*" for all, none to allow them again."""
    native().refuse_fallback(list(names))
