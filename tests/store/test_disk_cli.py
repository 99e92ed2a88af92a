"""``kvstow disk`` and ``kvstow namespaces``, beside a live store."""

from __future__ import annotations

import json
import os
import pwd
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner

from kvstow.backends.base import Done
from kvstow.backends.disk import DiskStore
from kvstow.cli import app
from kvstow.cli.disk import _model
from kvstow.errors import SettingsError, StoreRefused, StoreUnavailable
from kvstow.fields.values import format_bytes
from kvstow.key import Namespace
from kvstow.testing.store_suite import make_key, write_one
from tests.store.disks import disk, file_of, keys_held
from tests.store.test_disk_scrub import GROUP, flip, sealed

MODELS = {
    Namespace.from_fields({"model": name}): {"model": name, "chunk tokens": "32"}
    for name in ("big", "small")
}
BIG, SMALL = MODELS
KEYS = [make_key(i, namespace=(BIG, SMALL)[i % 2]) for i in range(10)]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = disk(tmp_path, describe=lambda namespace: MODELS[Namespace(namespace)])
    for key in KEYS:
        assert write_one(store, key, sealed(key)) == Done(GROUP.frame_bytes)
    return store


def both(*arguments: str, code: int = 0, answer: str | None = None) -> tuple[str, str]:
    """What a command prints, and says on standard error."""
    result = CliRunner().invoke(app, arguments, input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def kvstow(*arguments: str, code: int = 0) -> str:
    return both(*arguments, code=code)[0]


def tree(path: Path) -> list[tuple[str, int]]:
    return sorted((str(one), one.lstat().st_mtime_ns) for one in [path, *path.rglob("*")])


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user who is not root."""
    if os.geteuid():
        yield
        return
    os.seteuid(pwd.getpwnam("nobody").pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)


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
    assert os.listdir(tmp_path / "run") == [f"{store._volumes[0].access.attach().token}.lock"], (
        "the command left no lock"
    )


def test_du_says_what_the_store_thinks(store: DiskStore, tmp_path: Path) -> None:
    [row] = listed("disk", "du", "--path", str(tmp_path))
    assert row["chunks"] == 10
    assert row["processes"] == 1
    assert row["bytes"] <= row["ledger_bytes"]
    assert abs((store.used_bytes or 0) - row["bytes"]) <= 8 << 10
    kvstow("disk", "du", "--path", str(tmp_path))


def test_verify_finds_what_is_bad_and_says_so_by_its_exit_code(
    store: DiskStore, tmp_path: Path
) -> None:
    assert listed("disk", "verify", "--path", str(tmp_path)) == {"good": 10, "bad": []}
    flip(file_of(tmp_path, KEYS[3]), 5000)
    result = listed("disk", "verify", "--path", str(tmp_path), code=1)
    assert [row["chunk"] for row in result["bad"]] == [KEYS[3].digest().hex()]
    assert keys_held(store, KEYS) == list(range(10)), "only looked at"
    assert "set aside" in kvstow("disk", "verify", "--set-aside", "--path", str(tmp_path), code=1)
    assert kvstow("disk", "verify", "--path", str(tmp_path)).startswith(
        "9 chunks are whole, 0 are bad"
    )


def test_clear_removes_one_namespace_or_all(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Not done"):
        kvstow("disk", "clear", "--path", str(tmp_path))
    with pytest.raises(SettingsError, match="no namespace starts with"):
        kvstow("disk", "clear", "--yes", "--namespace", "g", "--path", str(tmp_path))
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
    store.set_aside([KEYS[9]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        kvstow("disk", "gc", "--path", str(tmp_path))
    assert len(os.listdir(tmp_path / "quarantine")) == 1, "nobody can be asked"
    assert "0 chunks removed, 1 quarantined files removed, " in kvstow(
        "disk", "gc", "--yes", "--path", str(tmp_path)
    )
    assert os.listdir(tmp_path / "quarantine") == []
    [row] = listed("disk", "gc", "--path", str(tmp_path))  # nothing that it would have to ask for
    assert (row["chunks"], row["quarantined"], row["bytes"]) == (0, 0, 0)
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


def test_an_empty_namespace_is_not_all_of_them(store: DiskStore, tmp_path: Path) -> None:
    for key in KEYS[1::2]:
        file_of(tmp_path, key).unlink()
    kvstow("disk", "gc", "--older-than-days", "9", "--yes", "--path", str(tmp_path))
    with pytest.raises(SettingsError, match="--namespace is empty"):
        kvstow("disk", "clear", "--yes", "--namespace", "", "--path", str(tmp_path))
    with pytest.raises(SettingsError, match="--path is empty"):
        kvstow("disk", "clear", "--yes", "--path", "")
    assert keys_held(store, KEYS[::2]) == list(range(5))


def test_a_prefix_of_several_namespaces_is_refused_with_their_names(tmp_path: Path) -> None:
    store = disk(tmp_path)
    spaces = [Namespace(bytes([0xAB, i]) + bytes(30)) for i in range(2)]
    for i, space in enumerate(spaces):
        assert write_one(store, make_key(i, namespace=space), b"x" * 4096) == Done(4096)
    with pytest.raises(
        SettingsError, match=r"2 namespaces start with 'ab': ab0{14}, ab010{12}\. Give more digits"
    ):
        kvstow("disk", "clear", "--yes", "--namespace", "ab", "--path", str(tmp_path))
    assert len(list(tmp_path.rglob("*.kv"))) == 2


def test_looking_changes_nothing(store: DiskStore, tmp_path: Path) -> None:
    (tmp_path / "quarantine").rmdir()
    before, page = tree(tmp_path), (tmp_path / "ledger").read_bytes()
    for command in (("disk", "ls"), ("disk", "du"), ("namespaces",)):
        kvstow(*command, "--path", str(tmp_path))
    assert tree(tmp_path) == before
    assert (tmp_path / "ledger").read_bytes() == page


def test_who_may_not_look_or_change_is_told_so_and_as_whom_to_run() -> None:
    with TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        path = Path(parent, "kv")
        path.mkdir()
        store = disk(path)
        assert write_one(store, make_key(1), b"x" * 4096) == Done(4096)
        owner = rf"run this as the user that vLLM runs as \(owner: {pwd.getpwuid(os.getuid()).pw_name}\)"
        os.chmod(path, 0o000)  # to its owner, too, if that isn't root
        with unprivileged():
            for command in (("disk", "ls"), ("disk", "du"), ("namespaces",)):
                out, said = both(*command, "--path", str(path), code=1)
                assert out == ""
                assert re.search(f"kvstow: {path} can't be read: Permission denied: {owner}", said)
            with pytest.raises(
                StoreUnavailable, match=f"{path} can't be read: Permission denied: {owner}"
            ):
                kvstow("disk", "clear", "--yes", "--path", str(path))
        os.chmod(path, 0o700)
        below = [path, *path.rglob("*")]
        for one in below:
            os.chmod(one, 0o555)
        with unprivileged():
            with pytest.raises(
                StoreUnavailable, match=f"{path} can't be written: Permission denied: {owner}"
            ):
                kvstow("disk", "gc", "--path", str(path))
            [row] = listed("disk", "du", "--path", str(path))
        assert (row["chunks"], row["processes"]) == (1, 1)
        for one in below:
            os.chmod(one, 0o700)


@pytest.mark.parametrize("command", ["ls", "du"])
def test_what_is_missing_hides_nothing_of_the_others(
    store: DiskStore, tmp_path: Path, command: str
) -> None:
    file, missing = tmp_path / "ledger", tmp_path / "none"
    paths = (
        "--path",
        str(missing),
        "--path",
        str(tmp_path),
        "--path",
        str(file),
        "--path",
        f"{tmp_path}/",
    )
    out, said = both("disk", command, "--json", *paths, code=1)
    assert sum(row["chunks"] for row in json.loads(out)) == 10, (
        "the same directory twice counts once"
    )
    assert f"kvstow: {missing} holds no kvstow chunks: there is no such directory" in said
    assert f"kvstow: {file} holds no kvstow chunks: it is not a directory" in said
    assert both("disk", command, "--path", str(missing), code=1)[0] == ""


def test_measured_bytes_are_decimal_everywhere(tmp_path: Path) -> None:
    store = disk(tmp_path)
    assert write_one(store, make_key(1), bytes(2 << 20)) == Done(2 << 20)
    shown = kvstow("disk", "ls", "--path", str(tmp_path)) + kvstow(
        "disk", "du", "--path", str(tmp_path)
    )
    assert "iB" not in shown
    assert format_bytes(127 << 20) == "133.2MB"


def test_a_question_that_is_declined_is_no_wrong_call(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="needs a terminal; without one give --yes"):
        kvstow("disk", "clear", "--path", str(tmp_path))
    monkeypatch.setattr(typer.testing._NamedTextIOWrapper, "isatty", lambda _: True, raising=False)
    out, said = both("disk", "clear", "--json", "--path", str(tmp_path), code=1, answer="n\n")
    assert out == ""
    assert said.endswith("Not done.\n")
    assert len(list(tmp_path.rglob("*.kv"))) == 10
    [row] = json.loads(both("disk", "clear", "--json", "--path", str(tmp_path), answer="y\n")[0])
    assert row["chunks"] == 10


def test_a_model_is_named_in_a_few_words() -> None:
    config, digest = '{"architectures":["LlamaForCausalLM"],"model_type":"llama"}', "095fa57f" * 8
    assert _model({"model config": config, "weights": f"{digest} (1 files, 269060280 bytes)"}) == (
        "LlamaForCausalLM 095fa57f"
    )
    assert _model({"weights": f"revision {digest[:40]} of org/name"}) == "org/name 095fa57f"
    assert _model({"model config": "{", "weights": "unknown, org/name"}) == "unknown, org/name"
    assert _model({}) == "?"


def test_where_nothing_is_stored_yet_is_no_fault_and_left_alone(tmp_path: Path) -> None:
    where = ("--path", str(tmp_path))
    for command in (("ls",), ("du",), ("verify",), ("gc",), ("clear", "--namespace", "ab")):
        out, said = both("disk", *command, *where)
        assert out in ("", "0 chunks are whole, 0 are bad\n")
        assert said.startswith(f"{tmp_path}: nothing is stored there yet (")
    assert listed("disk", "ls", *where) == []
    assert os.listdir(tmp_path) == []
    disk(tmp_path).close()
    assert both("disk", "ls", *where) == ("", "nothing to show\n")


def test_a_directory_that_is_none_of_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(StoreRefused, match="no kvstow chunks"):
        kvstow("disk", "clear", "--yes", "--path", str(tmp_path))
    assert os.listdir(tmp_path) == ["something"]
    with pytest.raises(StoreRefused, match="there is no such directory"):
        kvstow("disk", "clear", "--path", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="give --path"):
        kvstow("disk", "ls")


@pytest.mark.parametrize("command", [("disk", "ls"), ("namespaces",)])
def test_what_others_wrote_into_a_directory_is_printed_without_a_terminals_commands(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31mnewest\u202e"
    store = disk(
        tmp_path,
        describe=lambda namespace: {"model": hostile + namespace.hex(), f"field {hostile}": "x"},
    )
    for key in KEYS:
        write_one(store, key, sealed(key))
    out, err = both(*command, "--path", str(tmp_path))
    assert "newest" in out
    for text in (out, err):
        assert all(c == "\n" or c.isprintable() for c in text), repr(text)
