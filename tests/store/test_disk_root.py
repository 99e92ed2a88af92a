"""Engines on one directory whose block hashes begin elsewhere: they are told so, and how to go on."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstow import build
from kvstow.backends.disk import DiskStore, names
from kvstow.backends.disk.remove import KEPT_EMPTY_S
from kvstow.backends.disk.volume import DiskVolume
from kvstow.cli import app
from kvstow.errors import StoreUnavailable, UnsupportedError
from kvstow.key import ChunkKey, Namespace
from kvstow.metrics import Metrics
from kvstow.runtime import SystemClock
from kvstow.settings import Settings, parse
from tests.rigs.tiers import open_tier
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
        return open_tier(
            settings,
            LAYOUT,
            clock=SystemClock(),
            metrics=Metrics(),
            describe=self.describe,
            namespace=self.namespace,
            root=("all else", self.root),
        )

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


def announce(path: Path, text: bytes) -> None:
    """What A's ``namespace.json`` says."""
    file = path / names.namespace_json(A.namespace)
    file.parent.mkdir(parents=True)
    file.write_bytes(text)


def age(path: Path, engine: Engine) -> Path:
    """An announcement, made longer ago than it holds."""
    file = path / names.namespace_json(engine.namespace)
    os.utime(file, (time.time() - KEPT_EMPTY_S - 60,) * 2)
    return file


def clear(refusal: pytest.ExceptionInfo[Any]) -> None:
    """The command that a refusal ends with."""
    _, command = str(refusal.value).split("remove what they stored: kvstow ")
    result = CliRunner().invoke(app, [*shlex.split(command), "--yes"])
    assert result.exit_code == 0, result.output


@pytest.fixture
def another(tmp_path: Path) -> Iterator[DiskStore]:
    """A process of another model that uses the directory."""
    store = Engine("seed 0", "three").store(tmp_path)
    yield store
    store.close()


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


def test_c3_two_processes_with_another_root_don_t_both_serve_and_with_the_same_they_share(
    tmp_path: Path,
) -> None:
    first, same, other = (
        process(tmp_path, A.root),
        process(tmp_path, A.root),
        process(tmp_path, B.root),
    )
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
    real, beside = DiskVolume.register_namespace, A.store(tmp_path)

    def both(volume: DiskVolume, namespace: bytes, root: str) -> Any:
        real(beside._volumes[0], A.namespace, A.root)
        return real(volume, namespace, root)

    with monkeypatch.context() as patched:
        patched.setattr(DiskVolume, "register_namespace", both)
        assert not B.runs(tmp_path)
    assert A.runs(tmp_path)
    beside.close()


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
    clear(refusal)
    assert B.runs(tmp_path)


def test_c3_adapters_of_another_root_are_rivals_as_well(tmp_path: Path) -> None:
    store, adapter = A.store(tmp_path), A.namespace.derive("lora", "x")
    assert put(store, ChunkKey.build(adapter, 0, bytes(32)), 1)
    store.close()
    with pytest.raises(UnsupportedError, match=A.namespace.hex()[:16]):
        B.start(tmp_path)
    assert A.runs(tmp_path)


def test_c3_one_command_clears_a_root_with_its_adapters_in_every_directory(tmp_path: Path) -> None:
    paths = tmp_path / "one", tmp_path / "it's two"
    families = [
        [who.namespace, who.namespace.derive("lora", "x"), who.namespace.derive("reset", "1")]
        for who in (A, Engine(A.root, "two"))
    ]
    for path in paths:
        for who, family in zip((A, Engine(A.root, "two")), families, strict=True):
            store = who.store(path)
            assert all(
                put(store, ChunkKey.build(namespace, 0, bytes(32)), 1) for namespace in family[1:]
            )
            store.close()
    with pytest.raises(UnsupportedError) as refusal:
        B.start(*paths)
    clear(refusal)
    assert B.runs(*paths)
    for path in paths:
        left = {chunk.relative_to(path).parts[0] for chunk in path.rglob("*.kv")}
        assert left == {namespace.hex() for namespace in families[1][1:]}, (
            "another model's are left"
        )


@pytest.mark.parametrize(
    "there",
    [
        b"",
        b"[]",
        b"{",
        b'{"namespace": 1}',
        b'{"a":' + b"[" * 100_000,
        json.dumps({**A.fields, "x": "y"}).encode(),
    ],
    ids=["empty", "list", "cut", "other", "deep", "a field more"],
)
@pytest.mark.usefixtures("another")
def test_c3_what_else_is_in_the_directory_is_no_rival(tmp_path: Path, there: bytes) -> None:
    announce(tmp_path, there)
    (tmp_path / "lost+found").mkdir()
    assert Engine(A.root, "two").runs(tmp_path)
    assert B.runs(tmp_path)


@pytest.mark.usefixtures("another")
def test_c3_what_another_says_makes_no_line_of_the_log(tmp_path: Path) -> None:
    odd = "x\n\x1b[2J" + "y" * 9999
    announce(tmp_path, json.dumps({**A.fields, "block hash root": odd, "parent": odd}).encode())
    with pytest.raises(UnsupportedError) as refusal:
        B.start(tmp_path)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 1000


@pytest.mark.usefixtures("another")
def test_c3_a_namespace_without_a_word_of_its_own_is_no_rival(tmp_path: Path) -> None:
    """Of a version that did not describe where hashes begin."""
    announce(tmp_path, json.dumps({k: v for k, v in A.fields.items() if v != A.root}).encode())
    assert B.runs(tmp_path)


def test_c3_a_replaced_disk_beside_one_with_rivals_keeps_no_trace(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    store = A.store(old)
    assert put(store, A.key(), 1)
    store.close()
    assert not B.runs(new, old)
    assert not (new / B.namespace.hex()).exists()
    assert A.runs(new, old)


def test_c3_an_engine_that_has_stored_nothing_yet_is_seen_after_others_scans(
    tmp_path: Path,
) -> None:
    tier = A.start(tmp_path)
    beside = Engine(A.root, "two").store(tmp_path)
    beside.scan()
    assert not B.runs(tmp_path)
    file = age(tmp_path, A)
    beside.scan()
    assert not file.exists(), "nobody is about to write to it"
    beside.close()
    assert tier.close(5.0)


def test_c3_one_that_ended_and_had_stored_nothing_keeps_nobody_out(tmp_path: Path) -> None:
    """A start that fails after the disk tier was built, say, with a seed that is mended then."""
    assert B.runs(tmp_path)
    assert (tmp_path / names.namespace_json(B.namespace)).exists()
    assert A.runs(tmp_path)


@pytest.mark.usefixtures("another")
def test_c3_nor_does_it_for_ever_beside_others(tmp_path: Path) -> None:
    assert B.runs(tmp_path)
    assert not A.runs(tmp_path), "it may be about to store something"
    age(tmp_path, B)
    assert A.runs(tmp_path)


def test_c3_chunks_are_missed_however_old_their_namespace(tmp_path: Path) -> None:
    store = A.store(tmp_path)
    assert put(store, A.key(), 1)
    store.close()
    age(tmp_path, A)
    assert not B.runs(tmp_path)


def test_c3_commands_leave_what_a_running_engine_said_and_not_what_it_was_asked_to_clear(
    tmp_path: Path,
) -> None:
    tier, other, old = A.start(tmp_path), Engine("seed 0", "two"), Engine("seed 0", "old")
    where, of_other = ("--path", str(tmp_path)), ("--namespace", other.namespace.hex()[:16])
    for i, command in enumerate(
        [("gc",), ("gc", "--yes", "--older-than-days", "0"), ("clear", "--yes", *of_other)]
    ):
        store = other.store(tmp_path)
        assert put(store, other.key(i), 1)
        store.close()
        result = CliRunner().invoke(app, ["disk", *command, *where])
        assert result.exit_code == 0, result.output
        assert not B.runs(tmp_path)
    assert not (tmp_path / other.namespace.hex()).exists(), "it was asked for"
    assert old.runs(tmp_path)
    file = age(tmp_path, old)
    assert CliRunner().invoke(app, ["disk", "gc", *where]).exit_code == 0
    assert not file.exists()
    assert tier.close(5.0)
    assert B.runs(tmp_path)


def test_c3_what_is_said_is_counted(tmp_path: Path) -> None:
    store = A.store(tmp_path)
    store.register_namespace(A.namespace, A.root)
    used = store.used_bytes
    assert used is not None
    assert on_disk(tmp_path) <= used
    store.close()


def test_c3_where_it_can_t_be_said_the_start_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory that fails is the tier's breaker's business, as later."""
    (tmp_path / A.namespace.hex()).write_text("in the way")
    with caplog.at_level(logging.WARNING, "kvstow"):
        assert A.runs(tmp_path)
    assert f"Whose chunks are in {tmp_path} can't be told now" in caplog.text


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("what", ["other_roots", "register_namespace"])
def test_c3_a_directory_that_fails_hides_no_rival_in_another(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    fails: int,
) -> None:
    paths = tmp_path / "0", tmp_path / "1"
    beside, real, register = (
        A.store(paths[1 - fails]),
        getattr(DiskVolume, what),
        DiskVolume.register_namespace,
    )
    if what == "other_roots":
        beside.register_namespace(A.namespace, A.root)

    def failing(volume: DiskVolume, namespace: bytes, root: str) -> Any:
        if what == "register_namespace":  # they start at once
            register(beside._volumes[0], A.namespace, A.root)
        if volume.path == str(paths[fails]):
            raise StoreUnavailable("broken")
        return real(volume, namespace, root)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "kvstow"):
        patched.setattr(DiskVolume, what, failing)
        assert not B.runs(*paths)
    assert caplog.text.count("broken") == 1
    assert not any((path / B.namespace.hex()).exists() for path in paths)
    beside.close()
