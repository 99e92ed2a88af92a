"""What the source never does, whatever the tests around it try."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstow

SOURCE = Path(kvstow.__file__).parent
FILES = [path for path in SOURCE.rglob("*.py") if "testing" not in path.parts]

RUNS_WHAT_IT_READS = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "eval",
    "exec",
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "__import__",
}
COLLECTIVES = {
    "torch.distributed",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "reduce_scatter",
    "monitored_barrier",
}
SERVES = {
    "socketserver",
    "http.server",
    "xmlrpc.server",
    "wsgiref",
    "aiohttp",
    "fastapi",
    "flask",
    "uvicorn",
    "zmq",
}
LISTENS = {"listen", "create_server", "start_server", "start_unix_server"}


def names(source: str) -> Iterator[tuple[int, str]]:
    """Every module imported and every name called or looked up, dotted where it is."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=aliases):
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases) if module:
                yield node.lineno, module
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in aliases)
            case ast.Attribute(attr=attr):
                yield node.lineno, ast.unparse(node)
                yield node.lineno, f".{attr}"
            case ast.Call(func=ast.Name(id=name)):
                yield node.lineno, name


def found(source: str, banned: set[str], *, attributes: bool) -> list[str]:
    """Banned names in ``source``; with ``attributes`` also as a method of whatever."""
    return [
        f"{line}: {name}"
        for line, name in names(source)
        if name in banned
        or any(name.startswith(f"{one}.") for one in banned)
        or (attributes and name.startswith(".") and name[1:] in banned)
    ]


def offences(banned: set[str], *, attributes: bool = False) -> list[str]:
    return [
        f"{path.relative_to(SOURCE)}:{offence}"
        for path in FILES
        for offence in found(path.read_text(), banned, attributes=attributes)
    ]


def test_l1_nothing_that_is_read_is_ever_run() -> None:
    """Values are frames: fixed offsets, lengths checked first. Settings are safe YAML, metadata typed JSON."""
    assert offences(RUNS_WHAT_IT_READS) == []


def test_l2_nothing_listens() -> None:
    assert offences(SERVES) == []
    assert offences(LISTENS, attributes=True) == []


def test_h3_no_rank_enters_a_collective() -> None:
    assert offences(COLLECTIVES, attributes=True) == []


@pytest.mark.parametrize(
    ("source", "banned"),
    [
        ("import pickle", RUNS_WHAT_IT_READS),
        ("from pickle import loads", RUNS_WHAT_IT_READS),
        ("x = torch.load(f)", RUNS_WHAT_IT_READS),
        ("exec(text)", RUNS_WHAT_IT_READS),
        ("import torch.distributed as dist", COLLECTIVES),
        ("group.all_reduce(x)", COLLECTIVES),
        ("sock.listen()", LISTENS),
        ("from http.server import HTTPServer", SERVES),
    ],
)
def test_the_search_finds(source: str, banned: set[str]) -> None:
    assert found(source, banned, attributes=True)
