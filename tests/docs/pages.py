"""The documentation as data: pages, their code blocks, tables and links; and the texts that the code can say."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "kvstow"
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<tag>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_SPAN = re.compile(r"`([^`\n]+)`")
_PRINTF = re.compile(r"%(?:\.\d+)?[dfs]")


class Block(NamedTuple):
    page: Path
    tag: str
    body: str


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(*tags: str) -> list[Block]:
    """Fenced code blocks with one of these tags, in every page."""
    return [
        Block(page, match["tag"], textwrap.dedent(match["body"]))
        for page in PAGES
        for match in _FENCE.finditer(page.read_text())
        if match["tag"] in tags
    ]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    return [target for target in _LINK.findall(prose(page)) if "://" not in target]


def spans(page: Path) -> list[str]:
    """Inline code."""
    return _SPAN.findall(prose(page))


def rows(page: Path) -> Iterator[list[str]]:
    """Cells of every table row but headings' rules."""
    for line in prose(page).splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def texts() -> list[str]:
    """Every string in the code, ``…`` for what it puts in."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(_dots(node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
                found.append(_dots("".join(parts)))
    return found


def _dots(text: str) -> str:
    return re.sub("…+", "…", _PRINTF.sub("…", text))


def exists(dotted: str) -> bool:
    """Whether ``kvstow.a.b`` is a module, or a name defined in one."""
    at = SOURCE
    parts = dotted.split(".")[1:]
    for i, part in enumerate(parts):
        if (at / part).is_dir():
            at = at / part
        elif (at / f"{part}.py").is_file():
            at = at / f"{part}.py"
        else:
            module = at / "__init__.py" if at.is_dir() else at
            return i == len(parts) - 1 and re.search(rf"\b{part}\b", module.read_text()) is not None
    return True
