"""Which machine a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

import psutil

CPU_INFO: Final = Path("/proc/cpuinfo")


def machine(cpu_info: Path = CPU_INFO) -> dict[str, Any]:
    """The processor's model name and instruction set flags, its cores and memory, and the software.

    ``model`` falls back to the architecture's name where the system does not give a model.
    """
    fields: dict[str, str] = {}
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return {
        "model": fields.get("model name") or platform.machine(),
        "flags": sorted((fields.get("flags") or fields.get("Features") or "").split()),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
