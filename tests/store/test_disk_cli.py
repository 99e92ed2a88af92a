"""``kvstow disk`` and ``kvstow namespaces``, beside a live store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstow.cli import app
from kvstow.errors import SettingsError, StoreRefused
from kvstow.key import Namespace
from kvstow.store.base import Done
from kvstow.store.disk import DiskStore
from kvstow.testing.store_suite import make_key, write_one
from tests.store.disks import disk, file_of, keys_held
from tests.store.test_disk_scrub import GROUP, flip, sealed

MODELS = {Namespace.from_fields({"model": name}): {"model": name, "chunk tokens": "32"} for name in ("big", "small")}
BIG, SMALL = MODELS
KEYS = [make_key(i, namespace=(BIG, SMALL)[i % 2]) for i in range(10)]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = disk(tmp_path, describe=lambda namespace: MODELS[Namespace(namespace)])
    for key in KEYS:
        assert write_one(store, key, sealed(key)) == Done(GROUP.frame_bytes)
    return store


def kvstow(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def listed(*arguments: str, code: int = 0) -> Any:
    return json.loads(kvstow(*arguments, "--json", code=code))


def test_ls_shows_the_namespaces(store: DiskStore, tmp_path: Path) -> None:
    rows = listed("disk", "ls", "--path", str(tmp_path))
    assert {(row["namespace"], row["model"], row["chunks"]) for row in rows} == {
        (BIG.hex(), "big", 5),
        (SMALL.hex(), "small", 5),
    }
    assert all(row["bytes"] >= 5 * GROUP.frame_bytes and row["newest_age_s"] >= 0 for row in rows)
    assert BIG.hex()[:16] in kvstow("disk", "ls", "--path", str(tmp_path))
    assert os.listdir(tmp_path / "run") == [f"{store._volumes[0].attach().token}.lock"], "the command left no lock"


def test_du_says_what_the_store_thinks(store: DiskStore, tmp_path: Path) -> None:
    [row] = listed("disk", "du", "--path", str(tmp_path))
    assert row["chunks"] == 10
    assert row["processes"] == 1
    assert row["bytes"] <= row["ledger_bytes"]
    assert abs((store.used_bytes or 0) - row["bytes"]) <= 8 << 10
    kvstow("disk", "du", "--path", str(tmp_path))


def test_verify_finds_what_is_bad_and_says_so_by_its_exit_code(store: DiskStore, tmp_path: Path) -> None:
    assert listed("disk", "verify", "--path", str(tmp_path)) == {"good": 10, "bad": []}
    flip(file_of(tmp_path, KEYS[3]), 5000)
    result = listed("disk", "verify", "--path", str(tmp_path), code=1)
    assert [row["chunk"] for row in result["bad"]] == [KEYS[3].digest().hex()]
    assert keys_held(store, KEYS) == list(range(10)), "only looked at"
    assert "set aside" in kvstow("disk", "verify", "--set-aside", "--path", str(tmp_path), code=1)
    assert kvstow("disk", "verify", "--path", str(tmp_path)).startswith("9 chunks are whole, 0 are bad")


def test_clear_removes_one_namespace_or_all(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Not done"):
        kvstow("disk", "clear", "--path", str(tmp_path))
    with pytest.raises(SettingsError, match="2 namespaces"):
        kvstow("disk", "clear", "--yes", "--namespace", "", "--path", str(tmp_path))
    assert len(list(tmp_path.rglob("*.kv"))) == 10
    [row] = listed("disk", "clear", "--yes", "--namespace", BIG.hex()[:12], "--path", str(tmp_path))
    assert row["chunks"] == 5
    assert row["bytes"] >= 5 * GROUP.frame_bytes
    assert not (tmp_path / BIG.hex()).exists()
    assert len(list(tmp_path.rglob("*.kv"))) == 5
    kvstow("disk", "clear", "--yes", "--path", str(tmp_path))
    assert not list(tmp_path.rglob("*.kv"))
    assert write_one(store, KEYS[0], sealed(KEYS[0])) != Done(0), "the server goes on"


def test_gc_removes_what_is_old_only_if_asked(store: DiskStore, tmp_path: Path) -> None:
    for key in KEYS[:4]:
        os.utime(file_of(tmp_path, key), (1e9, 1e9))
    store.quarantine([KEYS[9]])
    [row] = listed("disk", "gc", "--path", str(tmp_path))
    assert row["chunks"] == 0
    assert os.listdir(tmp_path / "quarantine") == []
    with pytest.raises(SettingsError, match="Not done"):
        kvstow("disk", "gc", "--older-than-days", "7", "--path", str(tmp_path))
    [row] = listed("disk", "gc", "--older-than-days", "7", "--yes", "--path", str(tmp_path))
    assert row["chunks"] == 4
    assert len(list(tmp_path.rglob("*.kv"))) == 5


def test_namespaces_shows_what_differs(store: DiskStore, tmp_path: Path) -> None:
    shown = kvstow("namespaces", "--path", str(tmp_path))
    assert "model: big" in shown
    assert "model: small" in shown
    assert "chunk tokens" not in shown
    assert listed("namespaces", "--path", str(tmp_path))[BIG.hex()]["chunk tokens"] == "32"


def test_a_directory_that_is_none_of_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="no kvstow chunks"):
        kvstow("disk", "clear", "--yes", "--path", str(tmp_path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(StoreRefused, match="there is no such directory"):
        kvstow("disk", "ls", "--path", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="give --path"):
        kvstow("disk", "ls")
