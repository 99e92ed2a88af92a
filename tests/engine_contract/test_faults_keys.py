"""Fault catalogue B1, B2, B5: what vLLM puts into a prompt's hashes is in the keys of its chunks, by its own rules."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvstow.backends.disk.names import chunk_path
from kvstow.key import ChunkKey, Namespace
from kvstow.vllm.requests import Rules, Tracked
from tests.engine_contract.sim import prompt
from tests.engine_contract.stack import _hasher

TOKENS = prompt(5 * 32)
NAMESPACE = Namespace.from_fields({"model": "tiny"})


def keys(
    per_chunk: int = 2, *, images: Sequence[tuple[str, int, int]] = (), salt: str | None = None
) -> list[ChunkKey]:
    """Of one prompt, always the same tokens. ``images``: hash, place, length."""
    request = Request(
        request_id="r",
        prompt_token_ids=TOKENS,
        pooling_params=None,
        cache_salt=salt,
        sampling_params=SamplingParams(max_tokens=1),
        block_hasher=_hasher(16),
        mm_features=[
            MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(at, length))
            for identifier, at, length in images
        ],
    )
    return Tracked(
        request, Rules(16, 16, 16 * per_chunk, False, 0), NAMESPACE, load=True, store=True
    ).keys()


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("at", [0, 70, 158])
def test_b1_keys_differ_from_the_first_chunk_with_an_image_on(per_chunk: int, at: int) -> None:
    one, other = (keys(per_chunk, images=[(name * 64, at, 2)]) for name in "ab")
    first = at // (16 * per_chunk)
    assert one[:first] == other[:first] == keys(per_chunk)[:first]
    assert not set(one[first:]) & set(other[first:])
    assert not set(one[first:]) & set(keys(per_chunk))


def test_b1_the_place_of_an_image_is_part_of_it() -> None:
    one, other = keys(images=[("a" * 64, 40, 20)]), keys(images=[("a" * 64, 41, 20)])
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])


def test_b2_every_digit_of_an_images_hash_matters_and_no_two_images_meet() -> None:
    rng = random.Random(2)
    names = {f"{rng.getrandbits(256):064x}" for _ in range(300)}
    whole = f"{rng.getrandbits(256):064x}"
    names |= {f"{whole[:i]}{int(whole[i], 16) ^ 1:x}{whole[i + 1 :]}" for i in range(64)} | {whole}
    assert len({keys(images=[(name, 0, 5)])[0] for name in names}) == len(names) == 365


def test_b5_salts_are_kept_apart_and_their_text_is_nowhere() -> None:
    plain, empty = keys(), keys(salt="")
    assert plain == empty
    salts = ["a", "b", "a@b", "a/b", "%2F", "..", "tenant-secret"]
    salted = [keys(salt=salt) for salt in salts]
    assert len({key for chain in [plain, *salted] for key in chain}) == (len(salts) + 1) * len(
        plain
    )
    for key in salted[-1]:
        name = chunk_path(bytes(key.namespace), key.digest())
        assert b"tenant-secret" not in bytes(key)
        assert "tenant" not in name
