"""The ``kvstow`` command: output, exit codes, and what it must not load. The reference pages are current."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

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
    [line] = [
        line
        for line in kvstow("config", env={"KVSTOW_DISK_PATHS": paths}).out.splitlines()
        if "nvme" in line
    ]
    assert line.split()[0] == "disk.paths"
    assert paths.split(",")[-1] in line
    assert line.split()[-1] == "KVSTOW_DISK_PATHS"


def test_config_as_json_has_plain_values(kvstow: Kvstow) -> None:
    rows = json.loads(
        kvstow(
            "config", "--json", env={"KVSTOW_MEMORY_SIZE": "1kB", "KVSTOW_SAVE_DECODE": "true"}
        ).out
    )
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
    assert (
        ran.err == "kvstow: unknown variable KVSTOW_MEMORY_SISE; did you mean KVSTOW_MEMORY_SIZE?\n"
    )
    assert ran.out == ""


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_o1_settings_that_vllm_would_refuse_are_shown_and_refused(
    kvstow: Kvstow, arguments: tuple[str]
) -> None:
    ran = kvstow(
        "config",
        *arguments,
        env={"KVSTOW_DISK_PATHS": "/x", "KVSTOW_REDIS_URL": "http://u:hunter2@h"},
    )
    assert ran.code == 2
    assert "disk.paths is set and disk.size is not: say how much" in ran.err
    assert "redis.url: expected a URL that begins with redis://" in ran.err
    assert ran.err.count("\n") == 1
    assert "hunter2" not in ran.out + ran.err
    if arguments:
        assert json.loads(ran.out)["disk.paths"]["value"] == ["/x"]


def test_others_words_are_one_line_and_no_commands_of_a_terminal(
    kvstow: Kvstow, tmp_path: Path
) -> None:
    (tmp_path / "kv.yaml").write_text('"a\\nb\\e[31m": 1\n')
    ran = kvstow("config", "--file", str(tmp_path / "kv.yaml"))
    assert ran.err.startswith(r"kvstow: unknown setting a\nb\x1b[31m in ")
    ran = kvstow("config", "convert", str(tmp_path / "kv.yaml"))
    assert yaml.safe_load(ran.out) == {"memory": {"size": "5GiB"}}, "a comment stays one"


@pytest.mark.parametrize(
    ("shell", "code", "err"),
    [
        ("config >/dev/full", 1, "kvstow: [Errno 28] No space left on device\n"),
        ("reference settings >/dev/full", 1, "kvstow: [Errno 28] No space left on device\n"),
        ("config >&-", 0, ""),
        ("config --file /nowhere 2>&-", 2, ""),
        ("config | true", 0, ""),
    ],
)
def test_output_that_nobody_takes_is_no_traceback(shell: str, code: int, err: str) -> None:
    kvstow = Path(sys.executable).parent / "kvstow"
    done = subprocess.run(
        ["sh", "-c", f"{kvstow} {shell}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, err)


def test_what_the_outputs_encoding_lacks_is_replaced(tmp_path: Path) -> None:
    kvstow = Path(sys.executable).parent / "kvstow"
    env = {
        "PYTHONIOENCODING": "ascii",
        "PATH": os.defpath,
        "KVSTOW_MEMORY_POOL_DIR": "/\u00e9\udcff",
    }
    done = subprocess.run([kvstow, "config"], capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"/\xe9\udcff" in done.stdout


def test_it_starts_without_engine_and_clients() -> None:
    heavy = ["vllm", "torch", "transformers", "redis", "obstore", "numpy", "yaml", "kvstow.build"]
    code = f"import sys, kvstow.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("name", "page"), [("settings.md", settings_page), ("metrics.md", metrics_page)]
)
def test_the_reference_is_current(name: str, page: Callable[[], str]) -> None:
    assert (DOCS / name).read_text() == page(), (
        f"run: kvstow reference {name[:-3]} > docs/reference/{name}"
    )


def test_the_reference_names_everything(kvstow: Kvstow) -> None:
    settings = kvstow("reference", "settings").out
    assert all(f"`{leaf.key}`" in settings and leaf.variable in settings for leaf in leaves())
    metrics = kvstow("reference", "metrics").out
    assert all(f"`{spec.exported(name)}`" in metrics for name, spec in METRICS.items())
