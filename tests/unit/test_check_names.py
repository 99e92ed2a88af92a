"""The lint of names finds private names of libraries, and leaves the product's own alone."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_names.py"


@pytest.fixture(scope="module")
def lint() -> Any:
    spec = importlib.util.spec_from_file_location("check_names", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "source",
    [
        "connection._sock.close()",
        "redis.connection._parser",
        "getattr(connection, '_sock')",
        "hasattr(connection, '_sock')",
        "from redis import _parsers",
        "from redis._parsers import Parser",
        "import redis._parsers",
    ],
)
def test_private_names_of_a_library_are_found(lint: Any, source: str) -> None:
    [(file, line, message)] = lint.private_faults({"a.py": ast.parse(source)})
    assert (file, line) == ("a.py", 1)
    assert "private to a library" in message


@pytest.mark.parametrize(
    "source",
    [
        "connection.sock.close()",
        "row._replace(a=1)",
        "self._counter_cls",
        "x.__class__",
        "_, kept = pair",
        "getattr(x, 'name')",
        "class A:\n  def __init__(self):\n    self._own = 1\ndef f(a):\n  return a._own",
        "from kvstow.a import _own\ndef _own(): pass",
    ],
)
def test_public_names_and_own_ones_are_not(lint: Any, source: str) -> None:
    assert list(lint.private_faults({"a.py": ast.parse(source)})) == []


def test_every_exception_has_its_reason(lint: Any) -> None:
    assert all(len(reason.split()) > 5 for reason in lint.PRIVATE_ALLOWED.values())
