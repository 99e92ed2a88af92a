"""Short names for keys."""

from kvstow.key import ChunkKey, Namespace

NAMESPACE = Namespace.from_fields({"model": "m"})


def key(name: str) -> ChunkKey:
    return ChunkKey.build(NAMESPACE, 0, name.encode())


def keys(names: str) -> list[ChunkKey]:
    return [key(name) for name in names]


def always(key: ChunkKey) -> bool:
    return True


def never(key: ChunkKey) -> bool:
    return False
