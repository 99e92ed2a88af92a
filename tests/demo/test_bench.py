"""Merging the parts of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

from bench.__main__ import earlier, headlines, merge
from bench.machine import machine


def test_merge_keeps_what_was_not_measured_again() -> None:
    old = {"copy": {"out": 1.0}, "ttft": {"a": 1, "b": 2}}
    assert merge(old, {"ttft": {"a": 3}}) == {"copy": {"out": 1.0}, "ttft": {"a": 3, "b": 2}}
    assert old["ttft"] == {"a": 1, "b": 2}


def test_headlines_are_dotted() -> None:
    assert headlines({"copy": {"out": 1.0, "by": {"x": 2}}}) == [
        ("copy.out", 1.0),
        ("copy.by.x", 2),
    ]


def test_figures_name_their_processor(tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(
        "processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: avx2 avx512f\n\n"
        "processor\t: 1\nmodel name\t: Another\nflags\t\t: none\n"
    )
    found = machine(cpu_info)
    assert found["model"] == "A CPU @ 2 GHz"
    assert found["flags"] == ["avx2", "avx512f"]
    assert machine(tmp_path / "missing")["model"]


def test_a_part_does_not_join_figures_of_another_processor(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    assert earlier(out, {"model": "this"}) == {}
    out.write_text(json.dumps({"copy": {"in": 1}, "machine": {"model": "this"}}))
    assert earlier(out, {"model": "this"})["copy"] == {"in": 1}
    assert earlier(out, {"model": "other"}) == {}
