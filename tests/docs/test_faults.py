"""The table of faults says the truth about which kinds have a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, rows

TESTED, NONE = "tested", "no test"
PAGE = DOCS / "reference" / "faults.md"
TABLE = {row[0]: row[2] for row in rows(PAGE) if re.fullmatch(r"[A-O]\d+", row[0])}


def kinds_tested() -> dict[str, list[str]]:
    """Every kind that a test's name begins with, and those tests: ``test_a7_f5_...`` is of two."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test, numbers in re.findall(r"def (test_((?:[a-o]\d+[ab]?_)+)\w+)", path.read_text()):
            for kind in re.findall(r"([a-o]\d+)", numbers):
                found.setdefault(kind.upper(), []).append(f"{Path(path).relative_to(ROOT)}::{test}")
    return found


TESTS = kinds_tested()


@pytest.mark.parametrize("kind", TABLE)
def test_a_kind_is_tested_or_the_table_says_why_not(kind: str) -> None:
    says = TABLE[kind]
    if says == TESTED:
        assert kind in TESTS, f"{kind} has no test; say why in {PAGE.name}"
    elif says.startswith(NONE):
        assert kind not in TESTS, f"{kind} is tested by {TESTS[kind]}: say so in {PAGE.name}"


def test_no_test_is_of_a_kind_that_the_table_lacks() -> None:
    assert sorted(set(TESTS) - set(TABLE)) == []


def test_the_table_is_whole() -> None:
    counts = {letter: sum(kind[0] == letter for kind in TABLE) for letter in "ABCDEFGHIJKLMNO"}
    assert [
        kind
        for letter, count in counts.items()
        for kind in (f"{letter}{n}" for n in range(1, count + 1))
    ] == list(TABLE)
    assert len(TABLE) > 100
