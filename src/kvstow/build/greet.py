"""The first question to a shared tier: does it answer, and do the engines that share it begin their block hashes where
this one does? If not, nothing would ever be found, so the start is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvstow.backends.base import Done, Store
from kvstow.errors import StoreRefused, StoreUnavailable, UnsupportedError
from kvstow.key import ChunkKey, Namespace
from kvstow.runtime import ThreadExecutor
from kvstow.text import printable

logger = logging.getLogger("kvstow")

WAIT_S: Final = 3.0  # of the start, for the answer; later it is only logged
MAX_WORD_BYTES: Final = 200


class Greeted(Store, Protocol):
    def ping(self) -> None: ...


def greet(
    tier: str,
    where: str,
    store: Greeted,
    executor: ThreadExecutor,
    root: tuple[str, str] | None,
    entry: Callable[[ChunkKey], str],
) -> None:
    """Ask on one of ``executor``'s threads. ``root``: where this engine's block hashes begin, behind a digest of all
    else that KV depends on; ``entry``: what a key is called in the store.

    Raises ``UnsupportedError`` where they begin elsewhere and the store says so within ``WAIT_S``.
    """
    differs: list[str] = []

    def ask() -> None:
        try:
            store.ping()
            if root is not None and (other := _other(store, *root)) is not None:
                differs.append(_says(tier, other, root[1], entry(_key(root[0]))))
                logger.error("Tier %s: %s", tier, differs[0])
        except (StoreUnavailable, StoreRefused) as error:
            logger.warning("%s can't be used now, kvstow goes on without it: %s", where, error)

    executor.submit(ask, lambda _value, _error: None, urgent=True)
    executor.wait(WAIT_S)
    executor.poll()
    if differs:
        executor.close(WAIT_S)
        store.close()
        raise UnsupportedError(f"tier {tier}: {differs[0]}")


def _key(about: str) -> ChunkKey:
    return ChunkKey.build(Namespace.from_fields({"root of": about}), 0, b"root")


def _other(store: Store, about: str, word: str) -> str | None:
    """The word of the engine that was first, where it is another. The first value of a key stays."""
    key, own, buffer = _key(about), word.encode()[:MAX_WORD_BYTES], bytearray(MAX_WORD_BYTES)
    store.write([(key, [memoryview(own)])])
    [found] = store.read([(key, memoryview(buffer))])
    first = bytes(buffer[: found.length]) if isinstance(found, Done) else own
    return None if first == own else printable(first.decode(errors="replace"))


def _says(tier: str, other: str, own: str, entry: str) -> str:
    return (
        f"the block hashes of the engines that share it begin with another root ({other}; here {own}): nothing would "
        "be shared. Give PYTHONHASHSEED the same value on all of them, or on none. If none of those runs any more, set "
        f"another prefix for {tier}, or remove the entry {entry}"
    )
