"""Limits on the size of files and functions of the product. Exits 1 and names what is over.

A file of at most 450 lines and a function of at most 70 keep responsibilities apart: a larger one is
split by responsibility. There is no limit on totals; the count of code lines is printed for information.
docs/decisions/0019-no-totals.md gives the reasons.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvstow"

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Function(NamedTuple):
    """A function or method. ``lines`` counts its docstring, not its decorators."""

    where: str
    lines: int


def functions(path: Path, text: str) -> Iterator[Function]:
    """Yields every function of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            yield Function(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", lines)


def code_lines(text: str) -> int:
    """Counts lines that hold code: blank lines, comments and docstrings are left out."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> int:
    over: list[str] = []
    totals: Counter[str] = Counter()
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        part = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        totals[part] += code_lines(text)
        file_lines = len(text.splitlines())
        if file_lines > MAX_FILE_LINES:
            over.append(f"{path.relative_to(ROOT)}: {file_lines} lines, at most {MAX_FILE_LINES}")
        over.extend(
            f"{function.where}: {function.lines} lines, at most {MAX_FUNCTION_LINES}"
            for function in functions(path, text)
            if function.lines > MAX_FUNCTION_LINES
        )
    parts = ", ".join(f"{part} {lines}" for part, lines in totals.most_common())
    print(f"lines of code: {totals.total()}, {totals.total() - totals['testing']} without testing")
    print(f"  {parts}")
    for line in over:
        print(f"too large: {line}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
