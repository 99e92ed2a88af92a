"""Size budgets of the product code. Exits 1 and says what is over.

They keep the code livable: what does not fit is split by responsibility or left out, not squeezed. Totals count lines
of code: blank lines, comments and docstrings are free. The core has one; parts that are of no concern to who does not
use them have their own: each storage backend and device that is a package, the codecs, direct storage, the command
line, and configuration (settings, LMCache's among them, and what builds parts from them). The test kit in
kvstow.testing is no product code and has none. Files and functions are counted whole, the kit's too.
docs/decisions/0002-size-budgets.md says why.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvstow"
KIT = "testing"

CORE_CODE_LINES = 6000
PART_CODE_LINES = 1500
PARTS = {"codec": "codec", "direct": "direct", "cli": "cli"}
PARTS |= {"settings": "configuration", "build": "configuration"}
LARGE = {"core": CORE_CODE_LINES, "cli": 2000, "configuration": 2500, "store/disk": 1600}
FAMILIES = ("store", "device")  # each package in them is a part
MEDIAN_FILE_LINES = 130
FILE_LINES = 450
FUNCTION_LINES = 70
FUNCTION_P95_LINES = 40
SMALLEST_FILE_LINES = 5  # shorter ones are package markers, which would only pull the median down


class Function(NamedTuple):
    where: str
    lines: int


def functions(path: Path) -> list[Function]:
    """Every function of a file, its decorators left out, and its lines, docstring included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            found.append(Function(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", lines))
    return found


def code_lines(text: str) -> int:
    """Lines with code on them: neither blank nor only comment or docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        n
        for token in tokens
        if token.type not in _NO_CODE
        for n in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def rank(values: list[int], share: float) -> int:
    """The value at ``share`` of the sorted list (nearest rank), 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0


def budget_of(path: Path) -> str:
    """What a file is counted to: ``core``, ``testing``, one of the ``PARTS``, or a package such as ``store/disk``."""
    parts = path.relative_to(SOURCE).parts
    if parts[0] in PARTS:
        return PARTS[parts[0]]
    if parts[0] in FAMILIES and len(parts) > 2:
        return "/".join(parts[:2])
    return KIT if parts[0] == KIT else "core"


def code_totals(files: Iterable[Path]) -> dict[str, int]:
    """Lines of code by budget."""
    totals = {"core": 0}
    for path in files:
        budget = budget_of(path)
        totals[budget] = totals.get(budget, 0) + code_lines(path.read_text())
    totals.pop(KIT, None)
    return totals


def main() -> int:
    sizes = {path: len(path.read_text().splitlines()) for path in sorted(SOURCE.rglob("*.py"))}
    every = [function for path in sizes for function in functions(path)]
    totals = code_totals(sizes)
    median = rank([n for n in sizes.values() if n >= SMALLEST_FILE_LINES], 0.5)
    p95 = rank([f.lines for f in every], 0.95)
    over = [
        f"{p.relative_to(ROOT)}: {n} lines, at most {FILE_LINES}"
        for p, n in sizes.items()
        if n > FILE_LINES
    ]
    over += [
        f"{f.where}: {f.lines} lines, at most {FUNCTION_LINES}"
        for f in every
        if f.lines > FUNCTION_LINES
    ]
    limits = {name: LARGE.get(name, PART_CODE_LINES) for name in totals}
    over += [
        f"{name}: {n} lines of code, at most {limits[name]}"
        for name, n in totals.items()
        if n > limits[name]
    ]
    if median > MEDIAN_FILE_LINES:
        over.append(f"src/kvstow: the median file has {median} lines, at most {MEDIAN_FILE_LINES}")
    if p95 > FUNCTION_P95_LINES:
        longest = ", ".join(
            f"{f.where} ({f.lines})" for f in sorted(every, key=lambda f: -f.lines)[:5]
        )
        over.append(
            f"functions: 95 % are within {p95} lines, wanted {FUNCTION_P95_LINES}; the longest: {longest}"
        )
    print(
        f"budgets: {len(sizes)} files, lines of code: "
        f"{', '.join(f'{name} {n} of {limits[name]}' for name, n in totals.items())}; "
        f"median file {median} of {MEDIAN_FILE_LINES}, largest {max(sizes.values())} of {FILE_LINES}; "
        f"{len(every)} functions, p95 {p95} of {FUNCTION_P95_LINES}, "
        f"longest {max((f.lines for f in every), default=0)} of {FUNCTION_LINES}"
    )
    for line in over:
        print(f"over budget: {line}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
