"""Keys and namespaces are injective: what differs going in differs coming out."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstow.key import ChunkKey, Namespace, chunk_keys

# A small alphabet with separators, so that two drawn sets often agree in every byte but not in where a part ends.
WORDS = st.text(alphabet="a/=\0", max_size=3)
FIELDS = st.dictionaries(WORDS, WORDS, max_size=3)
NAMESPACES = st.binary(min_size=32, max_size=32).map(Namespace)
PARTS = st.tuples(NAMESPACES, st.integers(0, 65535), st.binary(min_size=1, max_size=64))


@given(FIELDS, FIELDS)
def test_b9_namespaces_are_equal_only_if_their_fields_are(
    one: dict[str, str], other: dict[str, str]
) -> None:
    assert (Namespace.from_fields(one) == Namespace.from_fields(other)) == (one == other)


@given(st.dictionaries(WORDS, WORDS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_namespace_depends_on_neither_order_nor_type(
    fields: dict[str, str], rng: random.Random
) -> None:
    shuffled = list(fields.items())
    rng.shuffle(shuffled)
    as_bytes = {tag: value.encode() for tag, value in shuffled}
    assert (
        Namespace.from_fields(fields)
        == Namespace.from_fields(dict(shuffled))
        == Namespace.from_fields(as_bytes)
    )


@given(PARTS, PARTS)
def test_keys_are_equal_only_if_their_parts_are(
    one: tuple[Namespace, int, bytes], other: tuple[Namespace, int, bytes]
) -> None:
    assert (ChunkKey.build(*one) == ChunkKey.build(*other)) == (one == other)


@given(PARTS)
def test_a_key_gives_back_its_parts(parts: tuple[Namespace, int, bytes]) -> None:
    key = ChunkKey.build(*parts)
    assert (key.namespace, key.group, key.prefix_hash) == parts


@given(
    NAMESPACES,
    st.integers(0, 65535),
    st.lists(st.binary(min_size=32, max_size=32), max_size=40),
    st.integers(1, 8),
    st.integers(0, 8),
)
def test_keys_in_bulk_are_those_of_a_naive_loop(
    namespace: Namespace, group: int, hashes: list[bytes], per_chunk: int, start: int
) -> None:
    naive = [
        ChunkKey.build(namespace, group, hashes[end - 1])
        for end in range(per_chunk, len(hashes) + 1, per_chunk)
    ]
    assert chunk_keys(namespace, group, hashes, per_chunk, start) == naive[start:]
