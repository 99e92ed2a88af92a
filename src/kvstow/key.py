"""Identity of a chunk of KV. No other module builds a namespace or a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from blake3 import blake3

FORMAT_VERSION: Final = 1
NAMESPACE_BYTES: Final = 32
GROUP_BYTES: Final = 2
MAX_PREFIX_HASH_BYTES: Final = 64

_HEAD_BYTES: Final = NAMESPACE_BYTES + GROUP_BYTES


class Namespace(bytes):
    """Digest (32 bytes, BLAKE3) of everything but the prefix that changes the bytes of a chunk.

    It is built from tagged fields in order of tag. Each is written as ``len(tag) tag len(value)
    value`` with 8-byte little-endian lengths. So two different sets of fields never give the same
    input to the hash.
    """

    __slots__ = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, str | bytes]) -> Namespace:
        """Digest ``fields`` (any order) together with kvstow's format version."""
        tagged: dict[str, str | bytes] = {**fields, "kvstow.format": str(FORMAT_VERSION)}
        hasher = blake3()
        for tag in sorted(tagged):
            value = tagged[tag]
            for part in (tag.encode(), value if isinstance(value, bytes) else value.encode()):
                hasher.update(len(part).to_bytes(8, "little"))
                hasher.update(part)
        return cls(hasher.digest())

    def derive(self, what: str, value: str | bytes) -> Namespace:
        """A namespace that is disjoint from this one: an adapter's, or the one after a reset."""
        return Namespace.from_fields({"parent": bytes(self), what: value})


class ChunkKey(bytes):
    """Name of a chunk. Equal keys mean interchangeable KV.

    Its bytes are ``namespace (32) | group (u16 LE) | prefix hash (1..64)``. Two keys are never
    encoded alike, because the first two fields have fixed lengths. A key is a ``bytes`` so that it
    is built and looked up in less than a microsecond. Files and users see ``digest()`` only.
    """

    __slots__ = ()

    @classmethod
    def build(cls, namespace: Namespace, group: int, prefix_hash: bytes) -> ChunkKey:
        if len(namespace) != NAMESPACE_BYTES or not 1 <= len(prefix_hash) <= MAX_PREFIX_HASH_BYTES:
            raise ValueError(
                f"namespace of {len(namespace)} bytes, prefix hash of {len(prefix_hash)} bytes"
            )
        return cls(namespace + group.to_bytes(GROUP_BYTES, "little") + prefix_hash)

    @property
    def namespace(self) -> Namespace:
        return Namespace(self[:NAMESPACE_BYTES])

    @property
    def group(self) -> int:
        return int.from_bytes(self[NAMESPACE_BYTES:_HEAD_BYTES], "little")

    @property
    def prefix_hash(self) -> bytes:
        return bytes(self[_HEAD_BYTES:])

    def digest(self) -> bytes:
        """32 bytes that name this key outside the process, in file names and remote keys."""
        return _digest(self)

    def __repr__(self) -> str:
        return f"ChunkKey({self.namespace[:4].hex()}…/{self.group}/{self.prefix_hash[:8].hex()}…)"


@lru_cache(maxsize=4096)  # a chunk's calls (contains, write, read, delete) come close together
def _digest(key: bytes) -> bytes:
    return blake3(key).digest()


def chunk_keys(
    namespace: Namespace,
    group: int,
    block_hashes: Sequence[bytes],
    hashes_per_chunk: int,
    start: int = 0,
) -> list[ChunkKey]:
    """Keys of the full chunks ``start, start + 1, ...`` of a prompt.

    ``block_hashes`` are the engine's chained hashes, one a hash block. Chunk ``i`` is named by the
    hash of its last hash block, ``block_hashes[(i + 1) * hashes_per_chunk - 1]``, which covers the
    whole prefix. The part of a chunk at the end has no key.
    """
    head = namespace + group.to_bytes(GROUP_BYTES, "little")
    first = (start + 1) * hashes_per_chunk - 1
    return [ChunkKey(head + h) for h in block_hashes[first::hashes_per_chunk]]
