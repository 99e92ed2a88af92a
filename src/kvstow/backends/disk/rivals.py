"""Namespaces that differ from one's own only in where block hashes begin: neither ever finds what
is in the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstow.backends.disk.files import Fd, open_directory
from kvstow.backends.disk.mount import MountedDirectory
from kvstow.backends.disk.remove import expects_chunks
from kvstow.backends.disk.scan import base_namespace, namespaces, read_namespace_json
from kvstow.backends.disk.scrub import chunks_after

MAX_WORD: Final = 200  # characters of another's text that are shown
_OF_EACH: Final = {"namespace", "parent", "created"}


def rivals(
    mount: MountedDirectory, own: Mapping[str, object], root: str, now_s: float
) -> dict[str, str]:
    """Names of such namespaces that hold chunks or may soon, and where their hashes begin; one for
    all inside it. ``own`` describes one's own; of its fields the one that says ``root`` is the one
    that differs."""
    found: dict[str, str] = {}
    for name in namespaces(mount.root):
        other = read_namespace_json(mount.root, name)
        differing = {
            field for field in own.keys() | other.keys() if own.get(field) != other.get(field)
        } - _OF_EACH
        if len(differing) != 1 or own.get(field := differing.pop()) != root or field not in other:
            continue
        if expects_chunks(mount, name, now_s) or _has_chunks(mount.root, name):
            word = str(other[field])[:MAX_WORD]
            found[base_namespace(name, other)] = word if word.isprintable() else repr(word)
    return found


def roots_in(path: str, field: str) -> list[str]:
    """What namespaces that hold chunks say in ``field``. None of a directory that can't be opened."""
    try:
        root = open_directory(path)
    except OSError:
        return []
    said = {name: read_namespace_json(root, name).get(field) for name in namespaces(root)}
    return sorted(
        {
            word[:MAX_WORD]
            for name, word in said.items()
            if isinstance(word, str) and _has_chunks(root, name)
        }
    )


def _has_chunks(root: Fd, name: str) -> bool:
    return next(chunks_after(root, f"{name}/"), "").startswith(name)
