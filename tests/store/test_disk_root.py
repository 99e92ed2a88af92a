"""Engines on one directory whose block hashes begin elsewhere: they are told so, and how to go on."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstow import build
from kvstow.cli import app
from kvstow.errors import UnsupportedError
from kvstow.key import ChunkKey, Namespace
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import Settings, parse
from kvstow.store.disk import DiskStore, names
from kvstow.store.disk.volume import KEPT_EMPTY_S, Volume
from tests.store.disks import disk, holds, on_disk, put

LAYOUT = build.chunk_layout(Settings(), 16, [8192])
ROOT = Path(__file__).parents[2]


class Engine:
    """What an engine says of itself, and where its hashes begin."""

    def __init__(self, root: str, model: str = "one") -> None:
        self.root = root
        self.fields = {"model config": model, "chunk tokens": "128", "block hash root": root}
        self.namespace = Namespace.from_fields(self.fields)

    def describe(self, namespace: bytes) -> dict[str, str]:
        about = {"namespace": self.namespace.hex(), **self.fields}
        return about if namespace == self.namespace else {"parent": about.pop("namespace"), **about}

    def start(self, *paths: Path) -> Any:
        where = {"disk.paths": ",".join(map(str, paths)), "disk.size": "1GB"}
        settings = parse(None, {}, {**where, "disk.min_free": "0", "disk.scrub_rate": "0"}).settings
        return build.build_disk(
            settings, LAYOUT, clock=SystemClock(), metrics=Metrics(), describe=self.describe,
            key=None, namespace=self.namespace, root=("all else", self.root),
        )  # fmt: skip

    def runs(self, *paths: Path) -> bool:
        """Start and end it. False: it was refused."""
        try:
            tier = self.start(*paths)
        except UnsupportedError:
            return False
        assert tier.close(5.0)
        return True

    def store(self, path: Path) -> DiskStore:
        return disk(path, describe=self.describe)

    def key(self, i: int = 0) -> ChunkKey:
        return ChunkKey.build(self.namespace, 0, i.to_bytes(32, "little"))


A, B = Engine("seed 0"), Engine("vLLM's default")
IN_A_PROCESS = """
import sys
from pathlib import Path
from tests.store.test_disk_root import Engine
sys.stdin.readline()
try:
    tier = Engine(sys.argv[2]).start(Path(sys.argv[1]))
    print("serves", flush=True)
    sys.stdin.readline()
    tier.close(5.0)
except RuntimeError as error:
    print(f"refused: {error}", flush=True)
"""


def process(path: Path, root: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-c", IN_A_PROCESS, str(path), root]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def said(*processes: subprocess.Popen[str]) -> list[str]:
    """Start them all at once, and what each says."""
    for one in processes:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    return [one.stdout.readline() for one in processes if one.stdout is not None]


def end(*processes: subprocess.Popen[str]) -> None:
    for one in processes:
        one.communicate("\n", timeout=30)


def test_c3_two_processes_with_another_root_don_t_both_serve_and_with_the_same_they_share(tmp_path: Path) -> None:
    first, same, other = process(tmp_path, A.root), process(tmp_path, A.root), process(tmp_path, B.root)
    try:
        assert said(first) == ["serves\n"]
        [refusal] = said(other)
        assert said(same) == ["serves\n"]
    finally:
        end(first, same, other)
    assert refusal.startswith("refused: tier disk: the block hashes of engines that use ")
    assert "another root (seed 0; here vLLM's default)" in refusal
    assert "PYTHONHASHSEED" in refusal
    assert f"kvstow disk clear --path {tmp_path} --namespace {A.namespace.hex()[:16]}" in refusal


def test_c3_of_two_that_start_at_once_never_both_serve(tmp_path: Path) -> None:
    for i in range(2):
        path = tmp_path / str(i)
        pair = process(path, A.root), process(path, B.root)
        try:
            assert sum(answer == "serves\n" for answer in said(*pair)) <= 1
        finally:
            end(*pair)


def test_c3_who_meets_a_rival_after_announcing_itself_takes_that_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, beside = Volume.introduce, A.store(tmp_path)

    def both(volume: Volume, namespace: bytes) -> None:
        real(volume, namespace)
        real(beside._volumes[0], A.namespace)

    with monkeypatch.context() as patched:
        patched.setattr(Volume, "introduce", both)
        assert not B.runs(tmp_path)
    beside.close()
    assert A.runs(tmp_path)


def test_c3_a_restart_with_another_root_is_refused_and_clearing_is_a_way_on(tmp_path: Path) -> None:
    store = A.store(tmp_path)
    assert put(store, A.key(), 1)
    store.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"seed 0; here vLLM's default") as refusal:
            B.start(tmp_path)
        assert A.runs(tmp_path), "a refused one leaves nothing behind"
    store = A.store(tmp_path)
    assert holds(store, A.key(), 1)
    store.close()
    _, command = str(refusal.value).split("remove what they stored: kvstow ")
    assert CliRunner().invoke(app, [*shlex.split(command), "--yes"]).exit_code == 0
    assert B.runs(tmp_path)
    assert not A.runs(tmp_path)


def test_c3_adapters_of_another_root_are_rivals_as_well(tmp_path: Path) -> None:
    store, adapter = A.store(tmp_path), A.namespace.derive("lora", "x")
    assert put(store, ChunkKey.build(adapter, 0, bytes(32)), 1)
    store.close()
    with pytest.raises(UnsupportedError, match=adapter.hex()[:16]):
        B.start(tmp_path)
    assert A.runs(tmp_path)


@pytest.mark.parametrize(
    "there",
    [b"", b"[]", b"{", b'{"namespace": 1}', b'{"a":' + b"[" * 100_000, json.dumps({**A.fields, "x": "y"}).encode()],
    ids=["empty", "list", "cut", "other", "deep", "a field more"],
)
def test_c3_what_else_is_in_the_directory_is_no_rival(tmp_path: Path, there: bytes) -> None:
    folder = tmp_path / A.namespace.hex()
    folder.mkdir(parents=True)
    (folder / names.NAMESPACE_JSON).write_bytes(there)
    (tmp_path / "lost+found").mkdir()
    assert Engine(A.root, "two").runs(tmp_path)
    assert B.runs(tmp_path)


def test_c3_what_another_says_makes_no_line_of_the_log(tmp_path: Path) -> None:
    folder = tmp_path / A.namespace.hex()
    folder.mkdir(parents=True)
    (folder / names.NAMESPACE_JSON).write_text(json.dumps({**A.fields, "block hash root": "x\n\x1b[2J" + "y" * 9999}))
    with pytest.raises(UnsupportedError) as refusal:
        B.start(tmp_path)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 1000


def test_c3_a_namespace_without_a_word_of_its_own_is_no_rival(tmp_path: Path) -> None:
    """Of a version that did not describe where hashes begin."""
    folder = tmp_path / A.namespace.hex()
    folder.mkdir(parents=True)
    (folder / names.NAMESPACE_JSON).write_text(json.dumps({k: v for k, v in A.fields.items() if v != A.root}))
    assert B.runs(tmp_path)


def test_c3_a_replaced_disk_beside_one_with_rivals_keeps_no_trace(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert A.runs(old)
    assert not B.runs(new, old)
    assert A.runs(new, old)


def test_c3_an_engine_that_has_stored_nothing_yet_is_seen_after_others_scans(tmp_path: Path) -> None:
    tier = A.start(tmp_path)
    beside = Engine(A.root, "two").store(tmp_path)
    beside.scan()
    assert not B.runs(tmp_path)
    file = tmp_path / names.namespace_json(A.namespace)
    os.utime(file, (time.time() - KEPT_EMPTY_S - 60,) * 2)
    beside.scan()
    assert not file.exists(), "nobody is about to write to it"
    beside.close()
    assert tier.close(5.0)


def test_c3_what_is_said_is_counted(tmp_path: Path) -> None:
    store = A.store(tmp_path)
    store.introduce(A.namespace, A.root)
    used = store.used_bytes
    assert used is not None
    assert on_disk(tmp_path) <= used
    store.close()


def test_c3_where_it_can_t_be_said_the_start_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that fails is the tier's breaker's business, as later."""
    (tmp_path / A.namespace.hex()).write_text("in the way")
    with caplog.at_level(logging.WARNING, "kvstow"):
        assert A.runs(tmp_path)
    assert "Whose chunks are in disk.paths can't be told now" in caplog.text
