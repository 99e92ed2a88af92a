"""The Korean pages say what the English ones say: the same commands, the same figures, the same names.

Their sentences are their own, so what is compared is what a reader would copy or count on. Where a test here fails, the
English page was changed: change the Korean one with it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, Block, blocks, links, name, prose, rows, spans

KO = DOCS / "ko"
README, README_KO = ROOT / "README.md", ROOT / "README.ko.md"
SAME_TEXT = {"yes": "예", "no": "아니요"}
NOT_RUN = "작성했으나 실제 하드웨어에서 실행하지 않"
EMULATED = "에뮬레이션"


class Counterparts(NamedTuple):
    """Every block of ``whole`` is shown, in order, and after them some of those of ``parts``; figures are of either."""

    whole: tuple[Path, ...]
    parts: tuple[Path, ...] = ()

    @property
    def pages(self) -> tuple[Path, ...]:
        return self.whole + self.parts


def guide(page: str) -> Path:
    return DOCS / "how-to" / f"{page}.md"


COUNTERPARTS = {
    README_KO: Counterparts((README,)),
    KO / "quickstart.md": Counterparts(
        (guide("install"), guide("first-run")),
        (
            guide("disk"),
            guide("redis"),
            guide("block-hashes"),
            guide("troubleshooting"),
            DOCS / "reference" / "cli.md",
        ),
    ),
    KO / "lmcache.md": Counterparts((guide("from-lmcache"),)),
    KO / "rbln.md": Counterparts((guide("rbln"),)),
}
KOREAN = sorted(COUNTERPARTS)
EVERY_PAGE = pytest.mark.parametrize("page", KOREAN, ids=name)


def fenced(page: Path) -> list[tuple[str, str]]:
    """Tag and text of every fenced block of the page, in order."""
    tags = {"", *re.findall(r"^ *```(\w+)$", page.read_text(), re.MULTILINE)}
    shown: list[Block] = [block for block in blocks(*tags) if block.page == page]
    return [(block.tag, block.body) for block in shown]


def figures(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:[.,]\d+)*", text))


def test_every_korean_page_is_compared() -> None:
    assert {README_KO, *KO.rglob("*.md")} == set(COUNTERPARTS)


@EVERY_PAGE
def test_blocks_are_those_of_the_english_page(page: Path) -> None:
    english = COUNTERPARTS[page]
    whole = [block for each in english.whole for block in fenced(each)]
    shown = fenced(page)
    assert whole
    assert shown[: len(whole)] == whole
    known = [block for each in english.parts for block in fenced(each)]
    assert [block for block in shown[len(whole) :] if block not in known] == []


@EVERY_PAGE
def test_figures_are_those_of_the_english_page(page: Path) -> None:
    known = figures("\n".join(prose(each) for each in COUNTERPARTS[page].pages))
    assert figures(prose(page)) - known == set()


@EVERY_PAGE
def test_names_and_messages_are_those_of_the_english_pages(page: Path) -> None:
    """Commands are checked in test_docs, as those of every page."""
    known = {span for each in PAGES if each not in COUNTERPARTS for span in spans(each)}
    assert {span for span in spans(page) if not span.startswith("kvstow ")} - known == set()


def test_the_table_of_the_readme_has_the_same_figures() -> None:
    def table(page: Path) -> list[list[str]]:
        return [row[1:] for row in rows(page) if len(row) == 6 and figures(row[1])]

    english = [[SAME_TEXT.get(cell, cell) for cell in row] for row in table(README)]
    assert len(english) >= 4
    assert table(README_KO) == english, "copy README.md's figures into README.ko.md"


@EVERY_PAGE
def test_what_was_not_run_on_hardware_is_said(page: Path) -> None:
    text = " ".join(prose(page).replace("\n> ", "\n").split())
    assert NOT_RUN in text
    assert EMULATED in text


@EVERY_PAGE
def test_nothing_is_written_that_markdown_takes_otherwise(page: Path) -> None:
    """GitHub strikes out what is between two tildes, and bold doesn't end between punctuation and a letter."""
    text = re.sub(r"`[^`\n]+`", "`", prose(page))
    assert "~" not in text
    assert re.findall(r"\*\*[^*]+[^\w\s]\*\*\w", text) == []


def test_each_language_leads_to_the_other() -> None:
    assert README_KO.name in links(README)
    assert README.name in links(README_KO)
    listed = {(DOCS / link).resolve() for link in links(DOCS / "README.md")}
    assert set(KOREAN) <= listed
