"""Stand-ins for the vendor's modules that vllm-rbln imports: a compiler that runs the captured graph as it is, and
placeholders for what is imported and never used. For processes of their own, before torch is imported.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any, Final

VERSION: Final = "0.12.0"
NPU_NAME: Final = "RBLN-CR03"  # vllm-rbln looks its memory up by the name
DRIVE_VARIABLE: Final = (
    "RBLN_EMULATED_DRIVE"  # a path, which processes end with their id: then there is rebel.rds
)
DRIVE_BYTES: Final = 256 << 20


class Placeholder:
    """Takes any call and has any attribute; a decorator made of it returns what it decorates."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Placeholder()

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


class PlaceholderModule(types.ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = sys.modules.get(f"{self.__name__}.{name}")
        if module is not None:
            return module
        made = type(name, (Placeholder,), {}) if name[:1].isupper() else Placeholder()
        setattr(self, name, made)
        return made


class Compiler:
    """Runs graphs as they are, and says what of each ``capture_programs`` is asked for: its inputs of dynamic extent,
    all on the first chiplet, from which vllm-rbln sizes KV."""

    def __init__(self) -> None:
        self._capturing: list[types.SimpleNamespace] | None = None

    def backend(self, graph: Any, inputs: object, **options: object) -> Callable[..., Any]:
        if self._capturing is not None:
            runtime = types.SimpleNamespace(reset_adaptive_buffers=lambda: None)
            made = types.SimpleNamespace(
                name="emulated", device=None, runtime=runtime, input_specs=_inputs_of(graph)
            )
            self._capturing.append(made)
        forward: Callable[..., Any] = graph.forward
        return forward

    @contextmanager
    def capture_programs(self) -> Iterator[list[types.SimpleNamespace]]:
        self._capturing = programs = []
        try:
            yield programs
        finally:
            self._capturing = None


def _inputs_of(graph: Any) -> list[types.SimpleNamespace]:
    specs = []
    for node in graph.graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        if not hasattr(value, "shape") or all(isinstance(size, int) for size in value.shape):
            continue
        shape = tuple(
            size if isinstance(size, int) else ("symbol", str(size)) for size in value.shape
        )
        shard = types.SimpleNamespace(node_id=0, chiplet_id=0, slice_shape=shape)
        dtype = str(value.dtype).removeprefix("torch.")
        placement = types.SimpleNamespace(shape=shape, dtype=dtype, shards=[shard])
        traced = tuple(
            size if isinstance(size, int) else int(size.node.hint) for size in value.shape
        )
        specs.append(
            types.SimpleNamespace(name=node.name, shape=traced, physical_placement=placement)
        )
    return specs


compiler = Compiler()


KNOWN: Final[dict[str, dict[str, Any]]] = {
    "rebel": {
        "__version__": VERSION,
        "EMULATED": True,
        "get_npu_count": lambda: len(os.environ.get("RBLN_VISIBLE_DEVICES", "0").split(",")),
        "get_npu_name": lambda *_: NPU_NAME,
        "npu_is_available": lambda *_: True,
    },
    "rebel.core.torch_compile": {"rbln_backend": compiler.backend},
}


class RebelFinder(MetaPathFinder, Loader):
    """Finds ``rebel`` and everything below it."""

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "rebel" or name.startswith("rebel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(KNOWN.get(module.__name__, {}))


class AfterTorch(MetaPathFinder):
    """Runs ``then`` once torch has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, name: str, path: Any, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec("torch", path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self._then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _torch_rbln() -> types.ModuleType:
    module = types.ModuleType("torch_rbln", "EMULATED")
    module.__dict__.update(__version__=VERSION, __path__=[], EMULATED=True)
    module.__spec__ = importlib.machinery.ModuleSpec("torch_rbln", None, is_package=True)
    return module


def boot() -> None:
    """Make this process one with an emulated NPU."""

    def then() -> None:
        from tests.rbln import emulator
        from tests.rbln.emulator import collectives, operators

        emulator.install()
        sys.modules["torch.rbln"].capture_programs = compiler.capture_programs  # type: ignore[attr-defined]
        sys.modules["torch_rbln"] = _torch_rbln()
        operators.install()
        collectives.install()
        if drive := os.environ.get(DRIVE_VARIABLE):
            emulator.install_rds(
                Path(f"{drive}-{os.getpid()}"), DRIVE_BYTES
            )  # each process has an NPU of its own

    sys.meta_path[:0] = [RebelFinder(), AfterTorch(then)]
