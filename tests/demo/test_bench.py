"""Merging the parts of a benchmark."""

from __future__ import annotations

from bench.__main__ import headlines, merge


def test_merge_keeps_what_was_not_measured_again() -> None:
    old = {"copy": {"out": 1.0}, "ttft": {"a": 1, "b": 2}}
    assert merge(old, {"ttft": {"a": 3}}) == {"copy": {"out": 1.0}, "ttft": {"a": 3, "b": 2}}
    assert old["ttft"] == {"a": 1, "b": 2}


def test_headlines_are_dotted() -> None:
    assert headlines({"copy": {"out": 1.0, "by": {"x": 2}}}) == [
        ("copy.out", 1.0),
        ("copy.by.x", 2),
    ]
