"""State that the scheduler's side of the connector keeps for one request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from blake3 import blake3

from kvstow.key import ChunkKey, Namespace, chunk_keys
from kvstow.vllm.media import Media

if TYPE_CHECKING:
    from vllm.v1.request import Request

NEVER: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class Rules:
    """How prompts are cut into chunks, in tokens.

    A chunk's bytes are final once ``lookahead`` tokens past its end are computed: EAGLE's drafter
    fills the last position one step late. Requests with a priority number above ``priority_limit``
    are not stored; None: all are.
    """

    block_tokens: int
    hash_tokens: int
    chunk_tokens: int
    save_decode: bool
    lookahead: int
    priority_limit: int | None = None

    @property
    def hashes_per_chunk(self) -> int:
        return self.chunk_tokens // self.hash_tokens

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens


@dataclass(slots=True)
class Tracked:
    """State of one request, from its first query until it has finished.

    A request without a ``namespace`` is neither loaded nor stored. ``media`` are in order of their
    offsets. ``next_end`` is the number of computed tokens at which the next chunk can be offered,
    or ``NEVER``. A step looks at nothing else for most requests.
    """

    request: Request
    rules: Rules
    namespace: Namespace | None
    load: bool
    store: bool
    media: Sequence[Media] = ()
    blocks: list[int] = field(default_factory=list)
    # Store jobs that still read this request's blocks, and the load job that still writes them.
    stores: set[int] = field(default_factory=set)
    loading: int | None = None
    local_tokens: int = 0  # computed by the engine, as of the last query
    counted: bool = False
    retried: bool = False  # a store that failed was offered again
    sources: dict[str, int] = field(default_factory=dict)  # tokens of the last load, by tier
    offered: int = 0  # chunks
    next_end: int = 0
    # Chunks from this one on were computed on what a lossy codec gave back, and are not stored.
    exact_chunks: int = NEVER
    _keys: list[ChunkKey] = field(default_factory=list)

    def keys(self) -> list[ChunkKey]:
        """Keys of every full chunk hashed so far, up to the first medium of unknown content."""
        if self.namespace is None:
            return []
        rules, hashes = self.rules, self.request.block_hashes
        if getattr(self.request, "resumable", False):
            self._keys = []  # a streaming session may rewrite its tail
        start = len(self._keys)
        known = len(hashes) // rules.hashes_per_chunk
        if known <= start:
            return self._keys
        if self._has_media:
            known = min(known, self.known_tokens // rules.chunk_tokens)
        if known > start:
            covered = hashes[: known * rules.hashes_per_chunk]
            keys = chunk_keys(self.namespace, 0, covered, rules.hashes_per_chunk, start=start)
            if self.media:
                keys = [self._with_media(key, start + i) for i, key in enumerate(keys)]
            self._keys += keys
        return self._keys

    @property
    def known_tokens(self) -> int:
        """Tokens before the first medium whose content is unknown; ``NEVER`` if all are known."""
        if not self._has_media:
            return NEVER
        for medium in self.media:
            if medium.digest is None:
                return medium.offset
        features = getattr(self.request, "mm_features", None) or ()
        # A streaming session may bring more of them later, which were not digested.
        later = [f.mm_position.offset for f in features]
        unknown = [offset for offset in later if offset > self._last_offset]
        return min(unknown, default=NEVER)

    @property
    def _has_media(self) -> bool:
        return bool(self.media or getattr(self.request, "mm_features", None))

    @property
    def _last_offset(self) -> int:
        return self.media[-1].offset if self.media else -1

    def _with_media(self, key: ChunkKey, chunk: int) -> ChunkKey:
        """The key of a chunk, mixed with the content of the media that begin before its end."""
        end = (chunk + 1) * self.rules.chunk_tokens
        digests = [m.digest for m in self.media if m.digest is not None and m.offset < end]
        if not digests:
            return key
        mixed = blake3(key.prefix_hash)
        for digest in digests:
            mixed.update(digest)
        return ChunkKey.build(key.namespace, key.group, mixed.digest())

    def uses_any(self, identifiers: set[str]) -> bool:
        """Whether vLLM names one of the request's media by one of these."""
        features = getattr(self.request, "mm_features", None) or ()
        return any(feature.identifier in identifiers for feature in features)

    def rekey(self, namespace: Namespace | None) -> None:
        """Use another namespace from now on. None: take no further part."""
        self.namespace = namespace
        self._keys = []
        if namespace is None:
            self.load = self.store = False
            self.next_end = NEVER

    def complete_chunks(self, computed_tokens: int) -> int:
        """Number of full chunks that are final once ``computed_tokens`` are computed.

        A draft token is not known, so its chunk is not full.
        """
        request, rules = self.request, self.rules
        limit = request.num_tokens if rules.save_decode else request.num_prompt_tokens
        final = min(computed_tokens, request.num_tokens) - rules.lookahead
        return min(min(final, limit) // rules.chunk_tokens, len(self.keys()))

    def advance(self, chunks: int) -> None:
        """Everything before ``chunks`` has been offered."""
        self.offered = chunks
        rules = self.rules
        end = (chunks + 1) * rules.chunk_tokens
        grows = rules.save_decode or end <= self.request.num_prompt_tokens
        more = self.store and grows and end <= self.known_tokens
        self.next_end = end + rules.lookahead if more else NEVER
