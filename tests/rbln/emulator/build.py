"""Builds the emulated device with g++, once per source and torch version, into ``.cache``."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Final

import torch

NATIVE: Final = Path(__file__).parent / "native"
CACHE: Final = Path(__file__).resolve().parents[3] / ".cache" / "rbln-emulator"
TIMEOUT_S: Final = 600.0  # 20 s on an idle core


def library() -> Path:
    """The shared library, built if it is not there yet. Raises CalledProcessError with the compiler's words."""
    sources = sorted(NATIVE.iterdir())
    text = torch.__version__ + "".join(path.read_text() for path in sources)
    target = CACHE / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # engines start several processes at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(".tmp")
            subprocess.run(_command(unfinished), check=True, timeout=TIMEOUT_S)
            unfinished.rename(target)
    return target


def _command(target: Path) -> list[str]:
    torch_dir = Path(torch.__file__).parent
    return [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-o",
        str(target),
        str(NATIVE / "emulator.cpp"),
        f"-I{torch_dir / 'include'}",
        f"-I{torch_dir / 'include/torch/csrc/api/include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-L{torch_dir / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
    ]
