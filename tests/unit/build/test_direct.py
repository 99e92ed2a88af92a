"""Direct storage from settings: what can't go with it, which engine it is, how many slots, which files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvstow.build.direct import build_direct, check_direct, choose
from kvstow.direct.geometry import extent_bytes
from kvstow.direct.volume import paths_for
from kvstow.errors import SettingsError, UnsupportedError
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics
from kvstow.settings import Settings, parse
from kvstow.testing.manual import ManualClock

LAYOUT = ChunkLayout((GroupLayout(16, 2, (100_000, 100_000)),))
EXTENT = extent_bytes(LAYOUT)[0]


def settings(**direct: Any) -> Settings:
    return parse(None, {}, {"direct": direct}).settings


def rds_is_there() -> None: ...


def no_rds() -> None:
    raise UnsupportedError("rebel.rds can't be imported")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"memory.size": "1GB"}, "direct.engine and memory.size are set"),
        (
            {"disk.paths": "/d", "disk.size": "1GB"},
            "direct.engine and disk.paths are set: .* no tiers below it",
        ),
        ({"redis.url": "redis://h"}, "direct.engine and redis.url are set"),
        ({"integrity_key_file": "/k"}, "direct.engine and integrity_key_file are set"),
    ],
)
def test_what_can_not_go_with_it(other: dict[str, str], said: str) -> None:
    check_direct(parse(None, {}, other).settings)
    with pytest.raises(SettingsError, match=said):
        check_direct(
            parse(None, {}, {**other, "direct.engine": "auto", "direct.path": "/n"}).settings
        )


def test_no_pool_may_be_said() -> None:
    check_direct(parse(None, {}, {"memory.size": 0, "direct.engine": "rds"}).settings)


def test_a_path_alone() -> None:
    with pytest.raises(SettingsError, match=r"direct\.path is set and direct\.engine isn't"):
        check_direct(settings(path="/n"))


def test_h8_which_engine_and_that_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(settings(engine="rds"), rds_is_there) == "rds"
    assert choose(settings(engine="auto"), rds_is_there) == "rds"
    assert choose(settings(engine="file", path="/n"), rds_is_there) == "file"
    with caplog.at_level(logging.INFO, "kvstow"):
        assert choose(settings(engine="auto", path="/n"), no_rds) == "file"
    assert "not on RDS: rebel.rds can't be imported" in caplog.text


@pytest.mark.parametrize(
    ("engine", "path", "said"),
    [
        ("rds", "/n", "direct.engine is rds, and RDS can't be used: rebel.rds can't be imported"),
        ("auto", None, "set direct.path to a directory"),
        ("file", None, "set direct.path to a directory"),
    ],
)
def test_nothing_is_passed_off_as_another(engine: str, path: str | None, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        choose(settings(engine=engine, **({"path": path} if path else {})), no_rds)


def built(load: Any = no_rds, not_persistent: str | None = None, **direct: Any) -> Any:
    return build_direct(
        settings(**direct),
        LAYOUT,
        ranks=2,
        engine=0,
        not_persistent=not_persistent,
        clock=ManualClock(),
        metrics=Metrics(),
        load=load,
    )


def test_rds_needs_no_size() -> None:
    extents, ref, engine = built(rds_is_there, engine="rds")
    assert (ref.engine, ref.threads, extents.slots) == ("rds", 1, 1 << 16)
    assert ref.staging_bytes == 2048 << 20, "rds_buffer_size of the documentation, of each rank"
    engine.close(1.0)
    extents, ref, engine = built(
        rds_is_there, engine="rds", max_chunks=7, staging_size="1GiB", failure_policy="raise"
    )
    assert (extents.slots, ref.staging_bytes, ref.failure_policy) == (7, 512 << 20, "raise")
    engine.close(1.0)
    extents, _, engine = built(rds_is_there, engine="rds", size=10 * 2 * EXTENT)
    assert extents.slots == 10
    engine.close(1.0)


@pytest.mark.parametrize(
    ("direct", "said"),
    [
        (
            {"staging_size": "300kB"},
            "direct.staging_size: .* fewer than 2 chunks of .* set it to at least",
        ),
        ({"size": "500kB"}, "direct.size and direct.max_chunks give 1 chunks"),
        ({"max_chunks": 3}, "give 3 chunks of 32 tokens"),
    ],
)
def test_too_small(direct: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        built(engine="file", path="/nowhere", **{"size": "1GB", **direct})


def test_files_need_a_size() -> None:
    with pytest.raises(SettingsError, match=r"direct\.path is set and direct\.size is not"):
        built(engine="file", path="/nowhere")


def test_kv_that_must_not_outlive_the_process() -> None:
    with pytest.raises(UnsupportedError, match="can't be kept in files: scales"):
        built(engine="file", path="/nowhere", size="1GB", not_persistent="scales")
    built(rds_is_there, engine="rds", not_persistent="scales")[2].close(1.0)


def test_paths(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    name = f"{folder}/kvstow-direct-{{}}-{{}}"
    assert paths_for([str(folder)], 2, 0) == (name.format(0, 0), name.format(0, 1))
    assert paths_for([str(folder)], 2, 3) == (name.format(3, 0), name.format(3, 1))
    assert paths_for(["/a", "/b", "/c", "/d"], 2, 1) == ("/c", "/d")
    file = tmp_path / "one"
    file.touch()
    assert paths_for([str(file)], 1, 0) == (str(file),)
    assert paths_for([str(tmp_path), "/b"], 2, 0) == (f"{tmp_path}/kvstow-direct-0-0", "/b")
    with pytest.raises(SettingsError, match=r"direct\.path names 1 files; 2 ranks"):
        paths_for([str(file)], 2, 0)
    with pytest.raises(SettingsError, match="2 ranks of 2 engines"):
        paths_for(["/a", "/b", "/c"], 2, 1)
