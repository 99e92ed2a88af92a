"""``import kvstow`` must work where vLLM, torch and the stores' client libraries are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvstow

SOURCE = Path(kvstow.__file__).parent
BLOCKED = ("vllm", "torch", "redis", "obstore", "boto3", "mooncake")

# Run in a process of its own: this one may have imported them already.
IMPORT = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(sorted(set({BLOCKED!r}) & set(sys.modules)))
"""


def without_clients() -> list[str]:
    """Every module but those whose business is vLLM, torch or a client library."""
    names = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] in ("vllm", "device", "codec", "testing") and len(parts) > 1:
            continue
        if parts[:1] == ("backends",) and parts[1] in ("redis", "objects", "mooncake"):
            continue
        names.append(".".join(("kvstow", *(part for part in parts if part != "__init__"))))
    return names


def run(*modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT, *modules], capture_output=True, text=True, check=False
    )


def test_imports_without_vllm_torch_or_clients() -> None:
    modules = without_clients()
    assert {"kvstow", "kvstow.cli", "kvstow.settings", "kvstow.cache"} <= set(modules)
    done = run(*modules)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["torch", "vllm.config"])
def test_the_blocker_blocks(module: str) -> None:
    done = run(module)
    assert done.returncode != 0
    assert "blocked" in done.stderr


def test_typed_and_versioned() -> None:
    assert (SOURCE / "py.typed").exists()
    assert kvstow.__version__
    assert kvstow.__all__ == ["__version__"]
