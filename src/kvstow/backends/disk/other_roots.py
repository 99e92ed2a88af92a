"""Finds namespaces in a directory that differ from an engine's own only in the block hashes' root.

Engines with different roots never find each other's chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstow.backends.disk.files import Fd, open_directory
from kvstow.backends.disk.mount import MountedDirectory
from kvstow.backends.disk.remove import expects_chunks
from kvstow.backends.disk.scan import base_namespace, namespaces, read_namespace_json
from kvstow.backends.disk.scrub import chunks_after
from kvstow.text import printable

MAX_ROOT_CHARACTERS: Final = 200  # of another engine's root, in a message
# Fields of a description that differ between any two namespaces.
_OWN_FIELDS: Final = {"namespace", "parent", "created"}


def other_roots(
    mount: MountedDirectory, own: Mapping[str, object], root: str, now_s: float
) -> dict[str, str]:
    """Maps each such namespace that holds chunks, or may soon, to its root.

    Adapters count with their base model's namespace. ``own`` describes the engine's namespace; the
    field with the value ``root`` is the one that may differ.
    """
    found: dict[str, str] = {}
    for name in namespaces(mount.root):
        other = read_namespace_json(mount.root, name)
        fields = (own.keys() | other.keys()) - _OWN_FIELDS
        differing = [field for field in fields if own.get(field) != other.get(field)]
        if len(differing) != 1:
            continue
        field = differing[0]
        if own.get(field) != root or field not in other:
            continue
        if expects_chunks(mount, name, now_s) or _has_chunks(mount.root, name):
            theirs = printable(str(other[field])[:MAX_ROOT_CHARACTERS])
            found[base_namespace(name, other)] = theirs
    return found


def roots_in(path: str, field: str) -> list[str]:
    """Returns the values of ``field`` in the descriptions of namespaces that hold chunks, sorted.

    A directory that can't be opened has none.
    """
    try:
        directory = open_directory(path)
    except OSError:
        return []
    found: set[str] = set()
    for name in namespaces(directory):
        value = read_namespace_json(directory, name).get(field)
        if isinstance(value, str) and _has_chunks(directory, name):
            found.add(value[:MAX_ROOT_CHARACTERS])
    return sorted(found)


def _has_chunks(directory: Fd, name: str) -> bool:
    return next(chunks_after(directory, f"{name}/"), "").startswith(name)
