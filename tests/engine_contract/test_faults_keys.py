"""Fault catalogue B1, B2, B5: keys contain what vLLM puts into a prompt's hashes.

B11: what vLLM's hashes lack is in them too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from kvstow.backends.disk.names import chunk_path
from kvstow.key import ChunkKey, Namespace
from kvstow.testing.manual import ManualClock, ManualExecutor
from kvstow.vllm import media
from kvstow.vllm.media import MediaDigests, has_token_types, names_media_by_counters
from kvstow.vllm.requests import NEVER, Rules, Tracked
from tests.engine_contract.sim import prompt
from tests.engine_contract.stack import Shape, _hasher
from tests.engine_contract.vllm_scheduler import Driver

TOKENS = prompt(5 * 32)
NAMESPACE = Namespace.from_fields({"model": "tiny"})


def medium(
    identifier: str, content: Any, at: int, length: int, *, modality: str = "image"
) -> MultiModalFeatureSpec:
    """A medium as vLLM's engine core gets it. ``content``: text, or the fields themselves."""
    if isinstance(content, str):
        content = {"pixel_values": torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)}
    fields = {
        name: MultiModalFieldElem(data=data, field=MultiModalSharedField(batch_size=1))
        for name, data in content.items()
    }
    return MultiModalFeatureSpec(
        MultiModalKwargsItem(fields), modality, identifier, PlaceholderRange(at, length)
    )


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
            medium(identifier, identifier, at, length) for identifier, at, length in images
        ],
    )
    return tracked(request, per_chunk).keys()


def tracked(request: Request, per_chunk: int = 2, digests: MediaDigests | None = None) -> Tracked:
    return Tracked(
        request,
        Rules(16, 16, 16 * per_chunk, True, 0),
        NAMESPACE,
        load=True,
        store=True,
        media=(digests or MediaDigests()).of(request),
    )


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


# --- B11: identifiers that say nothing of the content ---------------------------------------------

COUNTER = "renderer0-mm-1-image-0"  # vLLM's first image of any process, with its caches off
CHOSEN = "my-picture"
HASHED = "a" * 64  # of a client's uuid and mm_processor_kwargs, for instance


def of_media(
    features: Sequence[MultiModalFeatureSpec],
    digests: MediaDigests | None = None,
    tokens: Sequence[int] = TOKENS,
    **more: Any,
) -> Tracked:
    request = Request(
        request_id="r",
        prompt_token_ids=None if "prompt_embeds" in more and not tokens else list(tokens),
        pooling_params=None,
        sampling_params=SamplingParams(max_tokens=1),
        block_hasher=_hasher(16),
        mm_features=list(features),
        **more,
    )
    return tracked(request, 1, digests)


PICTURE = torch.arange(60, dtype=torch.float32).reshape(3, 20)
OTHERS: list[Any] = [
    {"pixel_values": PICTURE + 1},
    {"pixel_values": PICTURE.reshape(20, 3)},
    {"pixel_values": PICTURE.view(torch.int32)},
    {"pixel_values": PICTURE.to(torch.bfloat16)},
    {"pixel_values": PICTURE.numpy().astype(np.float64)},
    {"pixel_values": [PICTURE[0], PICTURE[1:]]},
    {"pixel_values": [PICTURE[:2], PICTURE[2]]},
    {"audio": PICTURE},
    {"pixel_values": PICTURE, "grid": torch.tensor([1, 2])},
    {"pixel_values": PICTURE, "grid": 3},
    {"pixel_values": PICTURE, "grid": 3.0},
    {"pixel_values": PICTURE, "grid": "3"},
    {"pixel_values": PICTURE, "nested": {"a": torch.tensor(1)}},
    {"pixel_values": torch.empty(0)},
    {},
]


@pytest.mark.parametrize("identifier", [COUNTER, CHOSEN, HASHED])
@pytest.mark.parametrize("modality", ["image", "video", "audio", "prompt_embeds"])
def test_b11_other_content_under_one_identifier_never_meets(identifier: str, modality: str) -> None:
    contents = [{"pixel_values": PICTURE}, *OTHERS]
    found = [
        of_media([medium(identifier, content, 20, 40, modality=modality)]).keys()
        for content in contents
    ]
    assert len({chain[0] for chain in found}) == 1, "text before it is shared"
    for place in range(1, 10):
        assert len({chain[place] for chain in found}) == len(contents)
    again = of_media([medium(identifier, {"pixel_values": PICTURE.clone()}, 20, 40)])
    if modality == "image":
        assert again.keys() == found[0]


def test_b11_what_a_medium_is_and_where_its_embeddings_go_counts() -> None:
    content = {"pixel_values": PICTURE}
    plain = of_media([medium(CHOSEN, content, 20, 40)]).keys()
    masked = medium(CHOSEN, content, 20, 40)
    mask = torch.ones(40, dtype=torch.bool)
    mask[7] = False
    masked.mm_position = PlaceholderRange(20, 40, is_embed=mask)
    sounds = of_media([medium(CHOSEN, content, 20, 40, modality="audio")]).keys()
    assert len({chain[-1] for chain in (plain, sounds, of_media([masked]).keys())}) == 3


def test_b11_media_later_in_a_prompt_do_not_change_the_keys_before() -> None:
    first, second = medium("x", "one", 20, 10), medium("y", "two", 100, 10)
    one, both = of_media([first]).keys(), of_media([first, second]).keys()
    assert one[:6] == both[:6]
    assert not set(one[6:]) & set(both[6:])
    swapped = of_media([medium("x", "two", 20, 10), medium("y", "one", 100, 10)]).keys()
    assert not set(swapped[1:]) & set(both[1:])


UNKNOWN: list[Callable[[], MultiModalFeatureSpec]] = [
    lambda: MultiModalFeatureSpec(None, "image", HASHED, PlaceholderRange(40, 20)),
    lambda: medium(HASHED, {"pixel_values": None}, 40, 20),
    lambda: medium(HASHED, {"address": 4096, "monotonic_id": 1}, 40, 20),
    lambda: medium(HASHED, {"pixel_values": torch.empty(3, device="meta")}, 40, 20),
    lambda: medium(HASHED, {"pixel_values": object()}, 40, 20),
    lambda: medium(HASHED, {"pixel_values": np.array([object()])}, 40, 20),
]


@pytest.mark.parametrize("make", UNKNOWN)
def test_b11_content_that_is_not_here_ends_what_is_cached(
    make: Callable[[], MultiModalFeatureSpec],
) -> None:
    state = of_media([medium("x", "one", 8, 4), make(), medium("y", "two", 100, 10)])
    assert len(state.keys()) == 2
    assert state.complete_chunks(160) == 2
    state.advance(0)
    assert state.next_end == 16
    state.advance(2)
    assert state.next_end == NEVER
    assert len(of_media([medium("x", "one", 8, 4)]).keys()) == 10


def test_b11_media_that_vllm_counts_are_unknown() -> None:
    features = [medium(COUNTER, "one", 40, 20)]
    assert len(of_media(features, MediaDigests(counted=True)).keys()) == 2

    def config(cache_gb: float | None, caching: bool) -> Any:
        multimodal = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
        return SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=multimodal),
            cache_config=SimpleNamespace(enable_prefix_caching=caching),
        )

    assert names_media_by_counters(config(0, False))
    assert not names_media_by_counters(config(0, True))
    assert not names_media_by_counters(config(4, False))
    assert not names_media_by_counters(config(None, False))


def test_b11_an_identifier_that_was_used_for_something_else_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's encoder cache and prefix cache may hold what they made of either."""
    digests = MediaDigests()
    assert len(of_media([medium(CHOSEN, "one", 40, 20)], digests).keys()) == 10
    assert len(of_media([medium(CHOSEN, "one", 40, 20)], digests).keys()) == 10
    assert digests.take_ambiguous() == set()
    assert len(of_media([medium(CHOSEN, "two", 40, 20)], digests).keys()) == 2
    assert digests.take_ambiguous() == {CHOSEN}, "requests that wait may compute with the other"
    assert len(of_media([medium(CHOSEN, "one", 40, 20)], digests).keys()) == 2
    assert digests.take_ambiguous() == set()
    monkeypatch.setattr(media, "MAX_IDENTIFIERS", 4)
    for number in range(20):
        of_media([medium(f"{number}", "x", 40, 20)], digests)
        assert len(digests._contents) <= 4
    used = MediaDigests()
    for number in range(20):
        of_media([medium(CHOSEN, "one", 40, 20)], used)
        of_media([medium(f"{number}", "x", 40, 20)], used)
    assert len(of_media([medium(CHOSEN, "two", 40, 20)], used).keys()) == 2, "still remembered"


def test_b11_a_session_that_goes_on_with_more_media() -> None:
    state = of_media([medium("x", "one", 8, 4)])
    assert len(state.keys()) == 10
    state.request.resumable = True
    state.request.mm_features = [*state.request.mm_features, medium("y", "two", 100, 10)]
    assert len(state.keys()) == 6


def test_m5_media_are_digested_on_another_thread() -> None:
    clock = ManualClock()
    executor = ManualExecutor(clock)
    digests = MediaDigests(executor, clock)
    state = of_media([medium("x", "one", 8, 4)])
    request = state.request
    assert not digests.reading(of_media([]).request)
    assert digests.reading(request)
    assert digests.reading(request)
    assert executor.pending == 1
    executor.run_all()
    assert not digests.reading(request)
    assert digests.of(request) == MediaDigests().of(request)
    assert not digests._reading

    assert digests.reading(request)
    clock.advance(media.MAX_READING_S)
    assert not digests.reading(request), "it goes on without the cache"
    assert [m.digest for m in digests.of(request)] == [None]
    executor.run_all()
    assert digests.reading(request), "what came late is not another request's"
    executor.run_all()
    assert not digests.reading(request)
    assert digests.of(request) == MediaDigests().of(request), "a late digest is no other content"
    assert digests.reading(request)
    digests.forget(request.request_id)
    assert not digests._reading
    executor.close(0.0)
    assert digests.reading(request), "as with a full queue, it is asked again"
    clock.advance(media.MAX_READING_S)
    assert not digests.reading(request)
    assert [m.digest for m in digests.of(request)] == [None]


def test_b11_embeddings_count_with_their_type_and_their_places() -> None:
    embeds = torch.zeros(160, 4, dtype=torch.float16)

    def chain(tokens: Sequence[int] = (), **more: Any) -> list[ChunkKey]:
        return of_media([], tokens=tokens, **more).keys()

    zeros = [0] * 160
    places = [True] * 32 + [False] * 32 + [True] * 96
    others = [True] * 32 + [False] * 48 + [True] * 80
    found = [
        chain(prompt_embeds=embeds),
        chain(prompt_embeds=embeds.view(torch.bfloat16)),
        chain(zeros, prompt_embeds=embeds, prompt_is_token_ids=places),
        chain(zeros, prompt_embeds=embeds, prompt_is_token_ids=others),
        chain(zeros, prompt_embeds=embeds, prompt_is_token_ids=[True] * 160),
        chain(zeros),
    ]
    assert len({c[-1] for c in found}) == len(found)
    assert len({c[1] for c in found[2:5]}) == 1, "before the first embedding they are shared"
    grown = torch.cat([embeds, embeds])
    longer = of_media([], tokens=(), prompt_embeds=grown).keys()
    assert longer[:10] == found[0]


def test_b11_types_of_tokens_are_not_in_vllms_hashes() -> None:
    def request(**extra: Any) -> Request:
        return Request(
            request_id="r",
            prompt_token_ids=TOKENS,
            sampling_params=None,
            pooling_params=PoolingParams(task="classify", extra_kwargs=extra or None),
        )

    assert has_token_types(request(compressed_token_type_ids=5))
    assert not has_token_types(request())
    assert not has_token_types(of_media([]).request)


@pytest.mark.parametrize("identifier", [COUNTER, CHOSEN])
def test_b11_in_vllms_scheduler_another_picture_is_computed(identifier: str) -> None:
    """A process after the other, as seen from a shared tier: its identifiers begin anew."""
    driver = Driver(Shape(prefix_caching=False, num_blocks=64))
    driver.scheduler.max_num_encoder_input_tokens = 4096
    driver.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)

    def serve(req_id: str, content: str) -> float:
        driver.stack.side._media = MediaDigests()  # the next process
        before = driver.stack.counter("hit_tokens")
        driver.add(req_id, TOKENS, mm_features=[medium(identifier, content, 40, 20)])
        driver.run()
        driver.settle()
        return driver.stack.counter("hit_tokens") - before

    assert serve("cold", "a picture") == 0
    assert serve("warm", "a picture") == 160
    assert serve("other", "another") == 32, "the text before it"
    assert serve("other again", "another") == 160
    driver.close()


def test_b11_a_request_that_waits_while_its_identifier_is_used_for_another_picture() -> None:
    """vLLM may compute the second first, and the first with what its encoder made of the second."""
    driver = Driver(Shape(prefix_caching=False, num_blocks=64))
    driver.scheduler.max_num_encoder_input_tokens = 4096
    driver.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)
    for req_id, content in (("one", "a picture"), ("two", "another")):
        driver.add(req_id, TOKENS, mm_features=[medium(CHOSEN, content, 40, 20)])
    driver.run()
    driver.settle()
    assert set(driver.outputs) == {"one", "two"}
    assert driver.stack.counter("stored_chunks") <= 2, "the text before it"
    driver.close()
