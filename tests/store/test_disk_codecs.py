"""The engine over real files with every codec, and with another one after it; the commands on coded files."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("backports.zstd")

from kvstow import build
from kvstow.backends.descriptor import OpenContext
from kvstow.backends.disk import frame_check
from kvstow.backends.disk.mount import attach
from kvstow.backends.disk.scrub import Scrub
from kvstow.cache import Cache, LookupState
from kvstow.cli.main import app
from kvstow.errors import SettingsError, UnsupportedError
from kvstow.metrics import Metrics, merge
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.runtime import SystemClock, ThreadExecutor
from kvstow.settings import Settings, parse
from kvstow.tiers import Tier
from tests.store.disks import file_of, no_error
from tests.unit.codec.kv import (
    CODED,
    FRAME_BYTES,
    LAYOUT,
    SHAPES,
    TOKENS,
    filled,
    key,
    near,
    payload,
    spans_of,
)

CHUNKS = range(8)


def settings(path: Path, codec: str, **more: Any) -> Settings:
    extra = {
        "disk.paths": str(path / "kv"),
        "disk.size": "10MB",
        "disk.min_free": "0",
        "disk.scrub_rate": "0",
    }
    return parse(None, {}, {**extra, "disk.codec": codec, **more}).settings


class Served:
    """An engine as the connector builds it, with real threads and files."""

    def __init__(self, given: Settings) -> None:
        clock, self.metrics, self.sealer = SystemClock(), Metrics(), ThreadExecutor("seal")
        secret = build.integrity_key(given)
        tiers = build.lower_tiers(
            given,
            SHAPES,
            OpenContext(LAYOUT, clock, integrity_key=secret),
            metrics=self.metrics,
            not_persistent=None,
        )
        [self.tier] = tiers
        assert isinstance(self.tier, Tier)
        self.engine = Cache(
            pool=HostPool.create(LAYOUT, 16 * FRAME_BYTES, name="served"),
            policy=LRU(),
            tiers=tiers,
            layout=LAYOUT,
            clock=clock,
            metrics=self.metrics,
            sealer=self.sealer,
            fetch_deadline_s=30.0,
            integrity_key=secret,
        )

    def store(self) -> None:
        for i in CHUNKS:
            lease = self.engine.reserve(key(i), b"", TOKENS)
            assert lease is not None
            filled(lease.view(), i)
            self.engine.commit(lease)
            lease.release()
        self.idle()

    def idle(self) -> None:
        while self.engine.busy():
            (self.sealer if self.sealer.outstanding else self.tier.executor).wait(1.0)
            self.engine.poll()

    def load(self) -> list[tuple[bytes, ...]]:
        wanted = [key(i) for i in CHUNKS]
        while self.engine.fetch("r", wanted).state is LookupState.PENDING:
            self.tier.executor.wait(1.0)
            self.engine.poll()
        leases = self.engine.hold("r", wanted)
        got = [spans_of(lease.view()) for lease in leases]
        for lease in leases:
            lease.release()
        return got

    def counters(self) -> dict[str, float]:
        counted: dict[str, float] = merge({}, self.metrics.take() or {}).get("counters", {})
        return counted


def live(
    given: Settings, *, store: bool = False
) -> tuple[list[tuple[bytes, ...]], dict[str, float]]:
    served = Served(given)
    if store:
        served.store()
    loaded = [] if store else served.load()
    served.engine.close(5.0)
    return loaded, served.counters()


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("codec", ["raw", *CODED])
def test_a15_a_restarted_engine_restores_what_was_stored(
    tmp_path: Path, codec: str, keyed: bool
) -> None:
    more = {"integrity_key_file": str(key_file(tmp_path, b"k" * 32))} if keyed else {}
    given = settings(tmp_path, codec, **more)
    _, counters = live(given, store=True)
    files = list((tmp_path / "kv").rglob("*.kv"))
    assert len(files) == len(CHUNKS)
    assert counters["stored_bytes|disk"] == sum(file.stat().st_size for file in files)
    assert (counters["stored_bytes|disk"] < counters["stored_raw_bytes|disk"]) == (codec != "raw")
    loaded, counters = live(given)
    assert counters["loaded_chunks|disk"] == len(CHUNKS)
    assert all(near(spans, i) for i, spans in enumerate(loaded))
    assert codec not in ("raw", "lossless") or loaded == [payload(i) for i in CHUNKS]
    loaded, _ = live(settings(tmp_path, "quantized:low", **more))
    assert len(loaded) == len(CHUNKS), "what another setting wrote is read"


def test_without_the_key_and_with_another_nothing_is_restored(tmp_path: Path) -> None:
    live(
        settings(tmp_path, "lossless", integrity_key_file=str(key_file(tmp_path, b"k" * 32))),
        store=True,
    )
    for more in ({}, {"integrity_key_file": str(key_file(tmp_path, b"x" * 32))}):
        loaded, counters = live(settings(tmp_path, "lossless", **more))
        assert not loaded
        if not more:
            assert counters["corrupt_chunks|disk"] >= 1
            live(
                settings(
                    tmp_path, "lossless", integrity_key_file=str(key_file(tmp_path, b"k" * 32))
                ),
                store=True,
            )


@pytest.mark.parametrize("codec", CODED)
def test_the_scrub_and_the_commands_read_coded_files(tmp_path: Path, codec: str) -> None:
    given = settings(tmp_path, codec)
    live(given, store=True)
    root = tmp_path / "kv"
    bad: list[bytes] = []
    scrub = Scrub(frame_check(), lambda _, digest: bad.append(digest), no_error)
    scrub.step(attach(str(root)), 1 << 30, threading.Event())
    assert not bad
    path = file_of(root, key(3))
    size = path.stat().st_size
    data = bytearray(path.read_bytes())
    data[4096 + 200] ^= 1
    path.write_bytes(data)
    os.truncate(file_of(root, key(4)), size - 4096)
    found = run("verify", root, exit_code=1)
    assert (found["good"], len(found["bad"])) == (len(CHUNKS) - 2, 2)
    [listed] = run("ls", root)
    assert listed["chunks"] == len(CHUNKS)
    assert listed["bytes"] < len(CHUNKS) * FRAME_BYTES + (1 << 20)
    _, counters = live(given)
    assert counters["corrupt_chunks|disk"] == 2
    run("gc", root)
    assert len(list(root.rglob("*.kv"))) == len(CHUNKS) - 2


def run(command: str, root: Path, exit_code: int = 0, **env: str) -> Any:
    done = CliRunner().invoke(app, ["disk", command, "--path", str(root), "--json"], env=env)
    assert done.exit_code == exit_code, done.output
    return json.loads(done.stdout)


def test_verify_uses_the_key_that_is_set(tmp_path: Path) -> None:
    path = key_file(tmp_path, b"k" * 32)
    live(settings(tmp_path, "lossless", integrity_key_file=str(path)), store=True)
    assert run("verify", tmp_path / "kv", KVSTOW_INTEGRITY_KEY_FILE=str(path))["good"] == len(
        CHUNKS
    )
    assert len(run("verify", tmp_path / "kv", exit_code=1)["bad"]) == len(CHUNKS)


# --- refused at start -----------------------------------------------------------------------------------------------


def key_file(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / f"key-{data.hex()[:8]}"
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_an_integrity_key_is_32_bytes_or_64_digits(tmp_path: Path) -> None:
    secret = bytes(range(100, 132))
    for data in (secret, secret.hex().encode(), f"  {secret.hex().upper()}\n".encode()):
        given = settings(tmp_path, "raw", integrity_key_file=str(key_file(tmp_path, data)))
        assert build.integrity_key(given) == secret
    assert build.integrity_key(settings(tmp_path, "raw")) is None


@pytest.mark.parametrize(
    ("data", "mode", "why"),
    [
        (b"k" * 32, 0o640, "chmod 600"),
        (b"k" * 32, 0o604, "chmod 600"),
        (b"k" * 31, 0o600, "holds no key"),
        (b"", 0o600, "holds no key"),
        (b"zz" * 32, 0o600, "holds no key"),
        (b"\xff" * 64, 0o600, "holds no key"),
        (b"k" * 9000, 0o600, "holds no key"),
    ],
)
def test_other_key_files_are_refused_and_never_shown(
    tmp_path: Path, data: bytes, mode: int, why: str
) -> None:
    given = settings(tmp_path, "raw", integrity_key_file=str(key_file(tmp_path, data, mode)))
    with pytest.raises(SettingsError, match=f"integrity_key_file.*{why}") as refused:
        build.integrity_key(given)
    assert "kkkk" not in str(refused.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, why in (
        ("nowhere", "can't be read"),
        ("fifo", "holds no key"),
        (".", "can't be read"),
    ):
        with pytest.raises(SettingsError, match=f"integrity_key_file.*{why}"):
            build.integrity_key(settings(tmp_path, "raw", integrity_key_file=str(tmp_path / name)))


def test_a_codec_that_does_not_suit_the_kv_is_refused_by_its_setting(tmp_path: Path) -> None:
    from kvstow.codec.shape import KVShape

    one_byte = [[replace_dtype(shape) for shape in SHAPES[0]]]
    given = settings(tmp_path, "quantized")
    with pytest.raises(UnsupportedError, match=r"disk\.codec quantized: .*lossless"):
        build.lower_tiers(
            given,
            one_byte,
            OpenContext(LAYOUT, SystemClock()),
            metrics=Metrics(),
            not_persistent=None,
        )
    assert not (tmp_path / "kv").exists(), "refused before anything is opened"
    assert isinstance(one_byte[0][0], KVShape)


def replace_dtype(shape: Any) -> Any:
    from dataclasses import replace

    return replace(shape, dtype="float8", size=shape.size * 2)


def test_a_codec_whose_libraries_are_missing_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith(("kvstow.codec", "backports"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "backports", None)
    from kvstow.build.codec import coders

    assert coders({"disk": "raw"}, LAYOUT, SHAPES) == {"disk": None}
    with pytest.raises(SettingsError, match=r"disk\.codec is lossless.*kvstow\[codec\]"):
        coders({"disk": "lossless"}, LAYOUT, SHAPES)


def test_the_setting_offers_every_codec() -> None:
    from typing import get_args

    from kvstow.codec.choose import NAMES
    from kvstow.fields.codec import Codec

    assert set(get_args(get_args(Codec)[0])) == {*NAMES, "quantized"}
