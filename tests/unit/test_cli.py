"""The ``kvstow`` command: output, exit codes, and what it must not load. The reference pages are current."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstow import __version__
from kvstow.cli import main
from kvstow.cli.reference import metrics_page, settings_page
from kvstow.metrics import METRICS
from kvstow.settings import leaves
from kvstow.settings import sources as settings_sources

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Kvstow = Callable[..., Ran]


@pytest.fixture
def kvstow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvstow:
    def run(*arguments: str, env: dict[str, str] | None = None) -> Ran:
        monkeypatch.setattr(settings_sources.os, "environ", env or {})
        monkeypatch.setattr(sys, "argv", ["kvstow", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return Ran(int(exit_.value.code or 0), captured.out, captured.err)

    return run


def test_version(kvstow: Kvstow) -> None:
    ran = kvstow("--version")
    assert (ran.code, ran.out) == (0, f"kvstow {__version__}\n")


def test_config_shows_every_setting_with_its_source(kvstow: Kvstow) -> None:
    ran = kvstow("config", env={"KVSTOW_MEMORY_SIZE": "20GiB"})
    assert ran.code == 0
    lines = {line.split()[0]: line.split()[1:] for line in ran.out.splitlines() if line.strip()}
    assert {leaf.key for leaf in leaves()} <= set(lines)
    assert lines["memory.size"] == ["20GiB", "KVSTOW_MEMORY_SIZE"]
    assert lines["memory.policy"] == ["lru", "default"]
    assert "per engine, all ranks together" in ran.out


def test_config_through_a_pipe_keeps_a_setting_on_its_line(kvstow: Kvstow) -> None:
    paths = ",".join(f"/nvme{number}/a-directory-of-some-length" for number in range(20))
    [line] = [line for line in kvstow("config", env={"KVSTOW_DISK_PATHS": paths}).out.splitlines() if "nvme" in line]
    assert line.split()[0] == "disk.paths"
    assert paths.split(",")[-1] in line
    assert line.split()[-1] == "KVSTOW_DISK_PATHS"


def test_config_as_json_has_plain_values(kvstow: Kvstow) -> None:
    rows = json.loads(kvstow("config", "--json", env={"KVSTOW_MEMORY_SIZE": "1kB", "KVSTOW_SAVE_DECODE": "true"}).out)
    assert rows["memory.size"] == {"value": 1000, "shown": "1kB", "source": "KVSTOW_MEMORY_SIZE"}
    assert rows["save_decode"]["value"] is True
    assert rows["memory.pool_dir"]["value"] is None
    assert rows["chunk_size"] == {"value": "auto", "shown": "auto", "source": "default"}


def test_config_of_a_file(kvstow: Kvstow, tmp_path: Path) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text("memory: {size: 3GB}\n")
    rows = json.loads(kvstow("config", "--json", "--file", str(file)).out)
    assert rows["memory.size"] == {"value": 3 * 10**9, "shown": "3GB", "source": str(file)}


def test_o1_a_wrong_setting_is_exit_code_2_with_a_message(kvstow: Kvstow) -> None:
    ran = kvstow("config", env={"KVSTOW_MEMORY_SISE": "1"})
    assert ran.code == 2
    assert ran.err == "kvstow: unknown variable KVSTOW_MEMORY_SISE; did you mean KVSTOW_MEMORY_SIZE?\n"
    assert ran.out == ""


def test_it_starts_without_engine_and_clients() -> None:
    heavy = ["vllm", "torch", "transformers", "redis", "obstore", "numpy", "yaml", "kvstow.build"]
    code = f"import sys, kvstow.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(("name", "page"), [("settings.md", settings_page), ("metrics.md", metrics_page)])
def test_the_reference_is_current(name: str, page: Callable[[], str]) -> None:
    assert (DOCS / name).read_text() == page(), f"run: kvstow reference {name[:-3]} > docs/reference/{name}"


def test_the_reference_names_everything(kvstow: Kvstow) -> None:
    settings = kvstow("reference", "settings").out
    assert all(f"`{leaf.key}`" in settings and leaf.variable in settings for leaf in leaves())
    metrics = kvstow("reference", "metrics").out
    assert all(f"`{spec.exported(name)}`" in metrics for name, spec in METRICS.items())
