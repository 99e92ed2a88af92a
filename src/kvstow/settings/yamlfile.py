"""Reading a YAML file of settings: strictly, and without quoting its content in messages (it may hold secrets)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvstow.errors import SettingsError
from kvstow.fields.values import masked

if TYPE_CHECKING:
    from yaml import Node

MAX_FILE_BYTES: Final = 1 << 20
HINTS: Final = {
    "mapping values are not allowed here": ". Each key needs a line of its own",
    "found character '\\t' that cannot start any token": ". Indent with spaces",
}
# What follows is what was written, a password perhaps.
_QUOTES: Final = re.compile(r"(alias|anchor|tag|handle) .*", re.DOTALL)
_SAID: Final = {
    "ReaderError": "it is no text in UTF-8",
    "RecursionError": "it is nested too deeply",
}


def read_yaml(path: str, named_by: str) -> Mapping[Any, Any]:
    """The mapping in the file at ``path``; empty for a file of comments only. ``named_by`` follows it in messages.

    Raises ``SettingsError`` naming the path when it can't be read, isn't YAML, isn't a mapping, or gives a key
    twice. Tags that build objects are refused, as ``yaml.safe_load`` does.
    """
    parsed = parse_yaml(read_bytes(path, named_by, "the settings file"), path)
    if parsed is None:
        return {}
    if not isinstance(parsed, Mapping):
        raise SettingsError(
            f"the settings file {path} must hold `key: value` lines; found: {type(parsed).__name__}"
        )
    return parsed


def read_bytes(path: str, named_by: str, kind: str) -> bytes:
    """Returns the content of the file at ``path``, which has at most ``MAX_FILE_BYTES``.

    Raises ``SettingsError`` when it can't be read, is larger, or is a pipe, which might never end.
    The message has ``kind`` before the path and ``named_by`` behind it.
    """
    shown = f"{kind} {masked(path)}{named_by}"
    try:
        with open(
            path,
            "rb",
            opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC),
        ) as file:
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                raise SettingsError(f"{shown} is a pipe: give a file")
            content = file.read(MAX_FILE_BYTES + 1) or b""
    except OSError as error:
        raise SettingsError(f"cannot read {shown}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"{shown} is larger than {MAX_FILE_BYTES} bytes")
    return content


def parse_yaml(content: bytes, path: str) -> Any:
    """One YAML document; ``path`` is for messages."""
    import yaml  # not at the top: most processes have no settings file

    try:
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, path, set())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = _QUOTES.sub(r"\1", error.problem or "")
        problem += HINTS.get(problem, "")
        raise SettingsError(f"the settings file {path}{line} isn't valid YAML: {problem}") from None
    except SettingsError:
        raise  # a ValueError too
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
        AttributeError,
        KeyError,
    ) as error:  # the last two: a tag
        said = _SAID.get(type(error).__name__, "a value in it can't be read")
        raise SettingsError(f"the settings file {path} isn't valid YAML: {said}") from None


def _refuse_duplicates(node: Node, path: str, seen: set[int]) -> None:
    if id(node) in seen or not isinstance(node.value, list):
        return
    seen.add(id(node))
    keys: set[str] = set()
    for item in node.value:
        for child in item if isinstance(item, tuple) else (item,):
            _refuse_duplicates(child, path, seen)
        if isinstance(item, tuple) and isinstance(item[0].value, str):
            if item[0].value in keys:
                line = item[0].start_mark.line + 1
                raise SettingsError(
                    f"setting {masked(item[0].value)} is given twice in {path}, line {line}"
                )
            keys.add(item[0].value)
