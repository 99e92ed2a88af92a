"""Codecs by name, the command line, and what is measured of a codec, without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("backports.zstd")
pytest.importorskip("torch")

from kvstow.cli.main import app
from kvstow.codec.choose import NAMES, codec
from kvstow.codec.effect import speed
from kvstow.codec.shape import KVShape
from kvstow.errors import SettingsError, UnsupportedError


def test_every_name() -> None:
    found = [codec(name) for name in NAMES]
    assert [c.name for c in found] == [name.split(":")[0] for name in NAMES]
    assert len({c.kind for c in found}) == len(NAMES)
    assert codec("quantized").kind == codec("quantized:middle").kind
    assert [c.lossy for c in found] == [False, False] + [True] * 5
    assert all(c.error for c in found)


@pytest.mark.parametrize("name", ["", "zstd", "quantized:best", "lossless:1", "raw:"])
def test_other_names(name: str) -> None:
    with pytest.raises(SettingsError, match="quantized:middle"):
        codec(name)


def test_what_speed_measures() -> None:
    shape = KVShape("bfloat16", 2, 1, 2, 1, 32, 16)
    numbers = np.random.default_rng(1).standard_normal(2048).astype(np.float32)
    payload = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    found = speed(codec("raw"), [payload.tobytes()], shape, rounds=1)
    assert found.ratio == 1
    assert found.zstd1_ratio > 1
    assert min(found) > 0


def test_the_command_wants_a_known_codec(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("too short")
    given = [str(tmp_path / "text"), "--model", str(tmp_path), "--codec", "zip"]
    done = CliRunner().invoke(app, ["codec", "bench", *given])
    assert isinstance(done.exception, SettingsError)


def test_the_command_wants_texts_and_a_model_that_are_there(tmp_path: Path) -> None:
    assert (
        CliRunner()
        .invoke(app, ["codec", "bench", str(tmp_path / "none"), "--model", str(tmp_path)])
        .exit_code
        == 2
    )
    (tmp_path / "text").write_text("too short")
    assert (
        CliRunner()
        .invoke(app, ["codec", "bench", str(tmp_path / "text"), "--model", "none"])
        .exit_code
        == 2
    )
    done = CliRunner().invoke(
        app, ["codec", "bench", str(tmp_path / "text"), "--model", str(tmp_path)]
    )
    assert isinstance(done.exception, UnsupportedError)
    assert f"--model {tmp_path}: " in str(done.exception)
