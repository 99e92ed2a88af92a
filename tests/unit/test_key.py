import os
import subprocess
import sys
from itertools import combinations

import pytest

from kvstow.key import ChunkKey, Namespace, chunk_keys

FIELDS = {
    "model": "smollm2",
    "dtype": "float32",
    "kv_dtype": "auto",
    "rope": '{"factor":1}',
    "layers": "l0,l1",
    "tp": "1",
    "block_hash": "sha256",
    "chunk_tokens": "128",
}
NAMESPACE = Namespace.from_fields(FIELDS)


def test_b8_every_field_enters_the_namespace() -> None:
    seen = {NAMESPACE}
    for tag, value in FIELDS.items():
        seen.add(Namespace.from_fields({**FIELDS, tag: value + "x"}))
        seen.add(Namespace.from_fields({other: v for other, v in FIELDS.items() if other != tag}))
    assert len(seen) == 1 + 2 * len(FIELDS)


def test_the_order_of_fields_does_not_enter_the_namespace() -> None:
    assert Namespace.from_fields(dict(reversed(FIELDS.items()))) == NAMESPACE


@pytest.mark.parametrize(
    "fields",
    [
        [{"a": ""}, {}],
        [
            {"a": "b"},
            {"ab": ""},
            {"": "ab"},
            {"": "a", "b": ""},
        ],  # bytes moved between tag and value
        [{"a": "1", "b": "2"}, {"a": "1b2"}, {"a": "1\x00b\x002"}, {"a1": "b2"}],
        [
            {"m": "x/y"},
            {"m": "x__y"},
            {"m": "x--y"},
            {"m": "x%2Fy"},
            {"m/x": "y"},
        ],  # separators and what replaces them
        [{"salt": "@a"}, {"salt": "a"}, {"salt": "a@"}, {"salt": " a"}],
        [{"a": "x", "c": "z"}, {"a": "xc", "": "z"}, {"ac": "xz"}],
    ],
)
def test_b9_different_fields_give_different_namespaces(fields: list[dict[str, str]]) -> None:
    for one, other in combinations(fields, 2):
        assert Namespace.from_fields(one) != Namespace.from_fields(other), (one, other)


def test_a_derived_namespace_is_apart_from_its_parent_and_its_siblings() -> None:
    derived = [
        NAMESPACE.derive("lora", "a"),
        NAMESPACE.derive("lora", "b"),
        NAMESPACE.derive("reset", "a"),
    ]
    assert (
        len({NAMESPACE, *derived, derived[0].derive("reset", "1"), derived[1].derive("reset", "1")})
        == 6
    )


def test_a_key_gives_back_its_parts() -> None:
    key = ChunkKey.build(NAMESPACE, 513, b"h" * 32)
    assert (key.namespace, key.group, key.prefix_hash) == (NAMESPACE, 513, b"h" * 32)
    assert isinstance(key.namespace, Namespace)
    assert len(key.digest()) == 32


@pytest.mark.parametrize("prefix_hash", [b"", b"h" * 65])
def test_a_prefix_hash_of_no_length_or_too_long_is_refused(prefix_hash: bytes) -> None:
    with pytest.raises(ValueError):
        ChunkKey.build(NAMESPACE, 0, prefix_hash)


def test_a_namespace_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError):
        ChunkKey.build(Namespace(b"short"), 0, b"h")


def test_a_group_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OverflowError):
        ChunkKey.build(NAMESPACE, 1 << 16, b"h")


def test_a_key_is_the_same_alone_and_in_bulk() -> None:
    hashes = [bytes([i]) * 32 for i in range(11)]
    keys = chunk_keys(NAMESPACE, 3, hashes, 4)
    assert keys == [
        ChunkKey.build(NAMESPACE, 3, hashes[3]),
        ChunkKey.build(NAMESPACE, 3, hashes[7]),
    ]
    assert chunk_keys(NAMESPACE, 3, hashes, 4, start=1) == keys[1:]
    assert chunk_keys(NAMESPACE, 3, hashes, 4, start=2) == []
    assert chunk_keys(NAMESPACE, 3, hashes[:3], 4) == []


def test_what_is_shown_of_a_key_is_short_and_holds_no_whole_hash() -> None:
    key = ChunkKey.build(NAMESPACE, 0, b"\xab" * 32)
    assert len(repr(key)) < 60
    assert ("ab" * 32) not in repr(key)


CHAIN = """
from kvstow.key import Namespace, chunk_keys
namespace = Namespace.from_fields({"model": "m", "extra": "", "lora": b"\\x00\\xff"})
keys = chunk_keys(namespace, 1, [bytes([i]) * 32 for i in range(64)], 4)
print(namespace.hex(), *(key.digest().hex() for key in keys))
"""


@pytest.mark.parametrize("seeds", [("0", "1", "random"), ("0", "0")], ids=["c1", "c2"])
def test_c1_c2_keys_are_the_same_in_every_process(seeds: tuple[str, ...]) -> None:
    """Whatever PYTHONHASHSEED says. No hash() of Python's is used, so neither does its version matter: what is pinned
    below is the same on every Python that the tests run on.
    """
    outputs = set()
    for seed in seeds:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        run = subprocess.run(
            [sys.executable, "-c", CHAIN],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1
    assert (
        outputs.pop().split()[0]
        == "95fafa45b75ee6a48c614ca22cb3c32967c4208416bbd52a34b531a1be742664"
    )


def test_the_format_is_pinned() -> None:
    """A change here makes every stored chunk a miss: raise FORMAT_VERSION with it."""
    key = ChunkKey.build(Namespace.from_fields({"model": "m"}), 1, b"\x01\x02")
    assert key.hex() == "978f604ca611b1f9d74a0c0814b48d7423d15b6207ed7c23451c19140f355bd501000102"
    assert key.digest().hex() == "3e17a569be9cee743f20f5d3e6a309b76541cbcb98d9605b2335215c72d0f344"
