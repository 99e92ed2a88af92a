"""Shell blocks of the documentation as data: the variables and words of each command."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
CONFIG = "--kv-transfer-config"


class Command(NamedTuple):
    """``environment`` is what is exported before, and what stands before its first word."""

    environment: dict[str, str]
    words: list[str]

    @property
    def connector(self) -> dict[str, Any]:
        """What ``--kv-transfer-config`` says."""
        config: dict[str, Any] = json.loads(self.words[self.words.index(CONFIG) + 1])
        return config

    def option(self, name: str) -> str:
        return self.words[self.words.index(name) + 1]


def commands(body: str) -> Iterator[Command]:
    """Every command of a block of shell, and at its end, without words, what it exports."""
    exported: dict[str, str] = {}
    for line in _lines(body):
        words = list(line)
        own: dict[str, str] = {}
        export = words[0] == "export"
        words = words[1:] if export else words
        while words and (match := _VARIABLE.fullmatch(words[0])):
            own[match[1]] = match[2]
            words = words[1:]
        if export:
            exported |= own
        elif words:
            yield Command(exported | own, words)
    yield Command(exported, [])


def _lines(body: str) -> Iterator[list[str]]:
    """Words, line by line; what is quoted may hold line ends, and a backslash continues a line."""
    text = re.sub(r"(?m)^\s*#.*$", "", body)
    lexer = shlex.shlex(re.sub(r"\\\n", " ", text), posix=True, punctuation_chars="\n;")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    line: list[str] = []
    for word in [*lexer, "\n"]:
        if set(word) <= {"\n", ";"}:
            if line:
                yield line
            line = []
        else:
            line.append(word)
