"""What every Store wrapper is asked: does it forward each method of the contract, once, with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstow.backends.base import Done, Store
from kvstow.testing.store_suite import make_key

METHODS = {name for name in vars(Store) if not name.startswith("_")}


class Recorder:
    """A store that remembers each call and answers something recognisable."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def contains(self, keys: Sequence[Any]) -> list[bool]:
        self.calls.append(("contains", list(keys)))
        return [True] * len(keys)

    def read(self, items: Sequence[Any]) -> list[Any]:
        self.calls.append(("read", list(items)))
        return [Done(1)] * len(items)

    def write(self, items: Sequence[Any]) -> list[Any]:
        self.calls.append(("write", list(items)))
        return [Done(2)] * len(items)

    def delete(self, keys: Sequence[Any]) -> None:
        self.calls.append(("delete", list(keys)))

    def close(self) -> None:
        self.calls.append(("close", None))


def check_forwards(wrap: Callable[[Store], Store]) -> None:
    inner = Recorder()
    assert {name for name in vars(Recorder) if not name.startswith("_")} == METHODS, (
        "Recorder lacks a method"
    )
    store = wrap(inner)
    keys = [make_key(0), make_key(1)]
    reads = [(key, memoryview(bytearray(4))) for key in keys]
    writes = [(key, [memoryview(b"x")]) for key in keys]
    assert store.contains(keys) == [True, True]
    assert store.read(reads) == [Done(1), Done(1)]
    assert store.write(writes) == [Done(2), Done(2)]
    store.delete(keys)
    store.close()
    assert inner.calls == [
        ("contains", keys),
        ("read", reads),
        ("write", writes),
        ("delete", keys),
        ("close", None),
    ]
