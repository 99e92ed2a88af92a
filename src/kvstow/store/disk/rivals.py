"""Namespaces that differ from one's own only in where block hashes begin: neither ever finds what is in the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstow.store.disk.files import Fd
from kvstow.store.disk.scan import about, namespaces

MAX_WORD: Final = 200  # characters of another's text that are shown
_OF_EACH: Final = {"namespace", "parent", "created"}


def rivals(directory: Fd, own: Mapping[str, object], root: str) -> dict[str, str]:
    """Names of such namespaces, and where their hashes begin. ``own`` describes one's own; of its fields the one that
    says ``root`` is the one that differs."""
    found: dict[str, str] = {}
    for name in namespaces(directory):
        other = about(directory, name)
        differing = {field for field in own.keys() | other.keys() if own.get(field) != other.get(field)} - _OF_EACH
        if len(differing) == 1 and own.get(field := differing.pop()) == root and field in other:
            word = str(other[field])[:MAX_WORD]
            found[name] = word if word.isprintable() else repr(word)
    return found
