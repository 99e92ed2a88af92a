"""The exception tree: complete, and said alike in the module and in the reference."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from kvstow import errors
from kvstow.errors import KVStowError

SOURCE = Path(errors.__file__).parent
REFERENCE = SOURCE.parent.parent / "docs" / "reference" / "exceptions.md"
BRANCH = re.compile(r"^(?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+)", re.MULTILINE)


def tree(text: str) -> dict[str, str]:
    """Each exception of a drawn tree, with its parent."""
    drawing = text[text.index("KVStowError\n") :].split("\n\n")[0].split("```")[0]
    parents: dict[str, str] = {}
    path: list[str] = []
    for match in BRANCH.finditer(drawing):
        depth = len(match["indent"]) // 4
        del path[depth:]
        if path:
            parents[match["name"]] = path[-1]
        path.append(match["name"])
    return parents


def listed() -> dict[str, str]:
    """Each exception that ``kvstow.errors`` defines, with its parent there."""
    found = {}
    for name, member in vars(errors).items():
        derived = isinstance(member, type) and issubclass(member, KVStowError)
        if derived and member is not KVStowError:
            found[name] = member.__mro__[1].__name__
    return found


def test_the_tree_is_drawn_as_it_is() -> None:
    assert errors.__doc__ is not None
    drawing = errors.__doc__.replace("\n    ", "\n")
    assert tree(drawing) == listed()
    assert tree(REFERENCE.read_text()) == listed()


def defined_elsewhere() -> list[tuple[str, ast.ClassDef]]:
    """Classes of the product that derive from something called an error or an exception, outside ``errors``."""
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.name == "errors.py" and path.parent == SOURCE:
            continue
        module = ".".join(("kvstow", *path.relative_to(SOURCE).with_suffix("").parts))
        nodes = ast.walk(ast.parse(path.read_text()))
        found += [(module, node) for node in nodes if isinstance(node, ast.ClassDef) and node.bases]
    return found


def test_what_is_defined_elsewhere_is_handled_as_a_listed_one() -> None:
    handled = [getattr(errors, name) for name in listed()]
    checked = 0
    for module, node in defined_elsewhere():
        bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
        if not any(re.search(r"Error$|Exception$|^Store(Unavailable|Refused)$", b) for b in bases):
            continue
        cls = getattr(importlib.import_module(module), node.name)
        if not issubclass(cls, Exception) or module.startswith("kvstow.cli."):
            continue  # a command catches its own
        assert issubclass(cls, tuple(handled)), f"{module}.{node.name} is in no branch of the tree"
        checked += 1
    assert checked, "the search finds nothing"
