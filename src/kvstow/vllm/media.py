"""Digests of the images, audio, video and embeddings in prompts, by their content.

vLLM names each of these by an identifier, and its block hashes contain the identifier. It is a
digest of the content by default. It is a counter if vLLM's caches are off, and a client may choose
it. So kvstow digests what the model computes with, and puts that into its keys as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from blake3 import blake3

from kvstow.runtime import Clock, Executor, SystemClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

logger = logging.getLogger("kvstow")

# A request waits this long for its media to be digested, at some GB/s.
MAX_READING_S: Final = 10.0
# A client may use an identifier for other content while vLLM still computes with the first.
MAX_IDENTIFIERS: Final = 1 << 16  # some 200 bytes each


class Media(NamedTuple):
    """One medium of a prompt. ``offset`` is its first token; ``digest`` is None if unknown."""

    offset: int
    digest: bytes | None


@dataclass(slots=True, eq=False)
class _Reading:
    """Media whose digests were asked for at ``began_s``.

    ``submitted`` says that the executor has accepted the work. ``digests`` is None until it ends.
    """

    began_s: float
    submitted: bool = False
    digests: list[bytes | None] | None = None


class MediaDigests:
    """Digests the media of requests on another thread.

    vLLM reuses what its encoder made under an identifier for as long as it has room for it. So once
    an identifier has stood for two contents, neither has a digest any more: vLLM may compute with
    the other one.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        clock: Clock | None = None,
        *,
        counted: bool = False,
    ) -> None:
        """``executor`` digests, and callers ask ``reading`` first. None: callers digest.

        ``counted`` says that vLLM names media by counters, so that no medium has a digest.
        """
        self._executor = executor
        self._clock = clock or SystemClock()
        self._counted = counted
        self._reading: dict[str, _Reading] = {}
        # By identifier, the least recently used first. None: it has no digest any more.
        self._contents: dict[str, bytes | None] = {}
        self._ambiguous: set[str] = set()

    def reading(self, request: Request) -> bool:
        """Whether the request's media are being digested, and the caller shall ask again.

        False after ``MAX_READING_S``, when the media count as unknown.
        """
        features = _features(request)
        if self._executor is None or self._counted or not features:
            return False
        self._executor.poll()
        now = self._clock.monotonic()
        reading = self._reading.setdefault(request.request_id, _Reading(now))
        if not reading.submitted:  # or the queue was full
            then = partial(self._finish, reading, features)
            reading.submitted = self._executor.submit(partial(_digests, features), then)
        return reading.digests is None and now - reading.began_s < MAX_READING_S

    def of(self, request: Request) -> list[Media]:
        """The request's media in order of their first tokens, and its prompt embeddings."""
        found = prompt_embeddings(request)
        features = _features(request)
        reading = self._reading.pop(request.request_id, None)
        digests: Sequence[bytes | None] | None = None
        if reading is not None:
            digests = reading.digests
        elif self._executor is None and not self._counted:
            digests = _digests(features)
        late = reading is not None and reading.submitted and digests is None
        for feature, digest in zip(features, digests or [None] * len(features), strict=True):
            # What comes late is noted then. Until then its identifier has no other content.
            known = None if late else self._noted(feature.identifier, digest)
            found.append(Media(feature.mm_position.offset, known))
        return sorted(found, key=lambda media: media.offset)

    def take_ambiguous(self) -> set[str]:
        """Identifiers that were found to stand for two contents since the last call."""
        found = self._ambiguous
        self._ambiguous = set()
        return found

    def forget(self, request_id: str) -> None:
        """The request has ended, perhaps before its media were asked for."""
        self._reading.pop(request_id, None)

    def _finish(
        self,
        reading: _Reading,
        features: Sequence[Any],
        digests: list[bytes | None] | None,
        error: BaseException | None,
    ) -> None:
        if error is not None:
            logger.warning("A request's media could not be digested: %r", error)
        digests = digests or [None] * len(features)
        for feature, digest in zip(features, digests, strict=True):
            self._noted(feature.identifier, digest)
        reading.digests = digests

    def _noted(self, identifier: str, digest: bytes | None) -> bytes | None:
        """The digest if the identifier has never stood for other content, else None."""
        if self._counted:
            return None
        first = self._contents.pop(identifier, digest)
        if first != digest and first is not None:
            self._ambiguous.add(identifier)
        known = digest if first == digest else None
        if len(self._contents) >= MAX_IDENTIFIERS:
            del self._contents[next(iter(self._contents))]
        self._contents[identifier] = known
        return known


def names_media_by_counters(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names media by counters, which it does if nothing of its own needs a digest."""
    model: Any = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None or vllm_config.cache_config.enable_prefix_caching:
        return False
    return float(getattr(multimodal, "mm_processor_cache_gb", 0)) == 0


def has_token_types(request: Request) -> bool:
    """Whether a pooling request gives its tokens types, which vLLM's block hashes don't contain."""
    extra = getattr(getattr(request, "pooling_params", None), "extra_kwargs", None) or {}
    return extra.get("compressed_token_type_ids") is not None


def prompt_embeddings(request: Request) -> list[Media]:
    """The parts of a prompt that a client gave as embeddings.

    vLLM's block hashes contain the embeddings' bytes. They do not contain their type, nor which
    positions they stand for in a prompt that mixes them with tokens.
    """
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is None:
        return []
    kind = f"{embeds.dtype} {request.prompt_token_ids is not None}"
    is_token = getattr(request, "prompt_is_token_ids", None)
    if is_token is None:
        return [Media(0, blake3(kind.encode()).digest())]
    found = []
    start: int | None = None
    for at, token in enumerate([*is_token, True]):
        if token and start is not None:
            found.append(Media(start, blake3(f"{kind} {start} {at}".encode()).digest()))
            start = None
        elif not token and start is None:
            start = at
    return found


def _features(request: Request) -> list[Any]:
    return list(getattr(request, "mm_features", None) or ())


def _digests(features: Iterable[Any]) -> list[bytes | None]:
    """Digest of each feature, or None if its content isn't here."""
    digests: list[bytes | None] = []
    for feature in features:
        hasher = blake3()
        position = feature.mm_position
        mask = getattr(position, "is_embed", None)
        place = [feature.modality, position.length, "every token" if mask is None else mask]
        known = _add(hasher, place) and _add(hasher, feature.data)
        digests.append(hasher.digest() if known else None)
    return digests


def _add(hasher: Any, value: Any) -> bool:
    """Add a value to the digest, so that no two values add the same bytes. False: it isn't here.

    A field without data is in a cache of another process, and so is an item that is an address.
    """
    if hasattr(value, "field") and hasattr(value, "data"):
        return _add(hasher, value.data)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return False
        _add_array(hasher, str(value.dtype), value.shape, _bytes_of(value))
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return False
        _add_array(hasher, value.dtype.str, value.shape, value.tobytes())
    elif isinstance(value, Mapping):
        if "address" in value:
            return False
        hasher.update(b"{%d:" % len(value))
        return all(_add(hasher, str(key)) and _add(hasher, value[key]) for key in sorted(value))
    elif isinstance(value, list | tuple):
        hasher.update(b"[%d:" % len(value))
        return all(_add(hasher, item) for item in value)
    elif isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        hasher.update(b"(%s %d:" % (type(value).__name__.encode(), len(text)))
        hasher.update(text)
    else:
        return False
    return True


def _add_array(hasher: Any, dtype: str, shape: Sequence[int], data: Any) -> None:
    hasher.update(f"<{dtype} {tuple(shape)}:".encode())
    hasher.update(data)


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
