"""Names that ruff's banned-api cannot express. Exits 1 and reports where, why and what to use.

ruff knows a name and a file. This check also knows which modules may use which names: ``settings`` the environment but
no clock or thread, ``runtime.py`` the reverse. It also finds the builtin ``hash``, broad ``except``s, and private
attributes of libraries.

An attribute is private if its name begins with one underscore. It is a library's if no module of the product defines
that name. ``self._name`` and ``cls._name`` are allowed: a base class may offer them to its subclasses.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "kvstow"

ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}
ENVIRONMENT_DOOR = ("settings.py", "settings/")
RUNTIME_MODULES = {"threading", "time", "concurrent", "queue", "sched"}
BROAD_EXCEPT = {"runtime.py", "vllm/connector.py", "vllm/metrics.py"}
TEST_KIT = "testing/"  # shipped for tests: it may time and thread what it tests
NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}  # public, says Python's documentation

# Private names of libraries that are used all the same, and why.
PRIVATE_ALLOWED = {
    "_commit_hash": "Transformers names the commit of a configuration nowhere else; without it there is no identity",
    "_custom_ops": "vLLM has no public copy of many blocks at once; without it the device copies them itself",
    "_foreach_copy_": "torch has no public copy of a list of tensors; one call each costs a launch each",
}


def is_private(name: str) -> bool:
    """Whether ``name`` begins with an underscore and is neither ``_`` nor ``__name__``."""
    return name.startswith("_") and not name.endswith("__") and name != "_"


def defined_names(tree: ast.Module) -> set[str]:
    """Names that a module defines: functions, classes, variables, and attributes of ``self`` and ``cls``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of another object or module that a module uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(module=module, names=aliases):
                yield from ((node.lineno, part) for part in (module or "").split("."))
                yield from ((node.lineno, alias.name) for alias in aliases)
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield from ((node.lineno, part) for part in alias.name.split("."))
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def private_faults(trees: dict[str, ast.Module]) -> Iterator[tuple[str, int, str]]:
    """File, line and message of each private name of a library in ``trees``, by file name."""
    own: set[str] = set()
    for tree in trees.values():
        own |= defined_names(tree)
    allowed = own | NAMED_TUPLE | PRIVATE_ALLOWED.keys()
    for file, tree in trees.items():
        for line, name in private_names(tree):
            if not is_private(name) or name in allowed:
                continue
            message = f"{name} is private to a library and may change in any release; use its public interface"
            yield file, line, message


def faults(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and message of each name in the file ``name`` that its place does not allow."""
    opens = name.startswith(ENVIRONMENT_DOOR)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attr) if (
                attr in ENVIRONMENT and not opens
            ):
                yield (
                    node.lineno,
                    f"os.{attr}: the environment is read in kvstow.settings only; take a plain argument",
                )
            case ast.ImportFrom(module="os", names=names) if (
                any(a.name in ENVIRONMENT for a in names) and not opens
            ):
                yield (
                    node.lineno,
                    "the environment is read in kvstow.settings only; take a plain argument",
                )
            case ast.Import(names=names) if opens:
                for alias in names:
                    if alias.name.split(".")[0] in RUNTIME_MODULES:
                        yield (
                            node.lineno,
                            f"{alias.name}: time and threads are runtime.py's; take a Clock or Executor",
                        )
            case ast.Call(func=ast.Name(id="hash")):
                yield (
                    node.lineno,
                    "hash(): differs between processes and collides; use ChunkKey.digest() or blake3",
                )
            case ast.ExceptHandler(type=None) if name not in BROAD_EXCEPT:
                yield (
                    node.lineno,
                    "bare except: catch what you can handle; the connector's edge takes the rest",
                )
            case ast.ExceptHandler(type=ast.expr() as caught) if name not in BROAD_EXCEPT:
                broad = {n.id for n in ast.walk(caught) if isinstance(n, ast.Name)} & {
                    "Exception",
                    "BaseException",
                }
                if broad and not name.startswith(TEST_KIT):
                    yield (
                        node.lineno,
                        "broad except: catch what you can handle; the connector's edge takes the rest",
                    )


def main() -> int:
    trees = {
        path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }
    found = list(private_faults(trees))
    for name, tree in trees.items():
        found += [(name, line, message) for line, message in faults(name, tree)]
    for name, line, message in sorted(found):
        print(f"{(SOURCE / name).relative_to(ROOT)}:{line}: {message}", file=sys.stderr)
    print(f"names: {len(found)} fault{'' if len(found) == 1 else 's'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
