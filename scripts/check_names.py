"""Names that ruff's banned-api cannot express. Exits 1 and says where, why and what to use.

ruff knows a name and a file; this knows which door a file may open: ``settings`` the environment but no
clock or thread, ``runtime.py`` the reverse. It also finds the builtin ``hash`` and broad ``except``s.
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


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Line and message of each name in ``path`` that its place does not allow."""
    name = path.relative_to(SOURCE).as_posix()
    opens = name.startswith(ENVIRONMENT_DOOR)
    for node in ast.walk(ast.parse(path.read_text())):
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
    found = 0
    for path in sorted(SOURCE.rglob("*.py")):
        for line, message in faults(path):
            print(f"{path.relative_to(ROOT)}:{line}: {message}", file=sys.stderr)
            found += 1
    print(f"names: {found} fault{'' if found == 1 else 's'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
