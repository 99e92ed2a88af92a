"""``kvstow config convert``, and the reference page of LMCache's keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvstow.backends.disk.settings import DiskSettings
from kvstow.cli import main
from kvstow.cli.reference import lmcache_page
from kvstow.settings import lmcache, parse, sources
from kvstow.settings.lmcache_keys import EXTRA_KEYS, EXTRA_MAPPED, KEYS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "lmcache.md"
SHARED = """\
chunk_size: 256
max_local_cpu_size: 20
local_disk: "file:///mnt/nvme/lmcache"
max_local_disk_size: 200
remote_url: "redis://u:hunter2@10.0.0.10:6379"
use_layerwise: true
storage_plugins: [mine]
extra_config:
  {storage_plugin.mine.module_path: a, storage_plugin.mine.class_name: B, storage_plugin.mine.token: hunter2}
"""

Kvstow = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvstow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvstow:
    def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        for module in (sources, lmcache):
            monkeypatch.setattr(module.os, "environ", env or {})
        monkeypatch.setattr(sys, "argv", ["kvstow", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "lmcache.yaml"
    path.write_text(SHARED)
    return str(path)


def test_what_is_printed_is_settings_of_kvstows(kvstow: Kvstow, file: str, tmp_path: Path) -> None:
    code, out, _ = kvstow("config", "convert", file, "--workers", "4")
    assert code == 0
    converted = tmp_path / "kvstow.yaml"
    converted.write_text(out)
    settings = parse(str(converted), {}).settings
    assert settings.chunk_size == 256
    assert (settings.memory.size, settings.section(DiskSettings).size) == (80 << 30, 800 << 30)
    assert settings.section(DiskSettings).paths == ("/mnt/nvme/lmcache",)
    assert settings.plugins.stores == ("mine=a:B",)
    assert "chunk_size: 256  # chunk_size in " in out
    assert (
        "# max_local_cpu_size is of each worker, kvstow's sizes are per engine: 20 GiB x 4 = memory.size"
        in out
    )
    assert "use_layerwise in " in out
    assert yaml.safe_load(out)["redis"]["url"] == "redis://u:****@10.0.0.10:6379"
    assert "hunter2" not in out
    assert out.count("what is masked is left out: put it in") == 2


def test_for_programs(kvstow: Kvstow, file: str) -> None:
    code, out, _ = kvstow("config", "convert", file, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["settings"]["memory.size"] == "20GiB"
    assert found["sources"]["memory.size"] == f"max_local_cpu_size in {file}"
    assert any("use_layerwise" in note for note in found["notes"])
    assert "hunter2" not in out
    assert parse(None, {}, found["settings"]).settings.chunk_size == 256


def test_without_a_file_the_shells_variables_are_converted(kvstow: Kvstow, file: str) -> None:
    env = {"LMCACHE_CHUNK_SIZE": "512", "LMCACHE_CONFIG_FILE": file, "KVSTOW_MEMORY_SIZE": "1GB"}
    _, out, _ = kvstow("config", "convert", "--json", env=env)
    assert json.loads(out)["settings"]["chunk_size"] == 512
    assert json.loads(out)["settings"]["memory.size"] == "20GiB", "only LMCache's are converted"
    _, out, _ = kvstow("config", "convert", file, "--json", env=env)
    assert json.loads(out)["settings"]["chunk_size"] == 256, "of a file that is given, nothing else"


def test_o1_what_is_refused_is_refused_here_too(kvstow: Kvstow, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("local_disk: relative\nmax_local_disk_size: 1\n")
    code, out, err = kvstow("config", "convert", str(wrong))
    assert (code, out) == (2, "")
    assert (
        f"disk.paths = \"['relative']\" (from local_disk in {wrong}): expected absolute paths"
        in err
    )
    assert kvstow("config", "convert", "/nowhere.yaml")[0] == 2
    wrong.write_text("chunk_size: 256 local_cpu: true\n")
    code, _, err = kvstow("config", "convert", str(wrong))
    assert code == 2
    assert (
        "line 1 isn't valid YAML: mapping values are not allowed here. Each key needs a line of its own"
        in err
    )


def test_defaults_are_not_converted_in_silence(kvstow: Kvstow, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert (
        "# Nothing of LMCache's is set in this shell's LMCACHE_* variables: these"
        in kvstow("config", "convert")[1]
    )
    assert (
        f"set in {tmp_path}/empty.yaml: these"
        in kvstow("config", "convert", f"{tmp_path}/empty.yaml", "--json")[1]
    )
    assert "Nothing" not in kvstow("config", "convert", env={"LMCACHE_CHUNK_SIZE": "256"})[1]


def test_the_reference_page_is_current_and_has_every_key() -> None:
    assert PAGE.read_text() == lmcache_page(), (
        "run: kvstow reference lmcache > docs/reference/lmcache.md"
    )
    for name in (*KEYS, *EXTRA_KEYS, *EXTRA_MAPPED):
        assert f"| `{name}` |" in PAGE.read_text()
