"""What the scheduler's connector remembers of one request."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvstow.key import ChunkKey, Namespace, chunk_keys

if TYPE_CHECKING:
    from vllm.v1.request import Request

NEVER: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class Rules:
    """How prompts are cut into chunks, in tokens. ``lookahead`` tokens past a chunk's end must be computed before
    its bytes are final (EAGLE's drafter fills the last position one step late)."""

    block_tokens: int
    hash_tokens: int
    chunk_tokens: int
    save_decode: bool
    lookahead: int
    priority_limit: int | None = None  # requests of a higher one are not stored

    @property
    def hashes_per_chunk(self) -> int:
        return self.chunk_tokens // self.hash_tokens

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens


@dataclass(slots=True)
class Tracked:
    """State of one request, from its first query until it has finished.

    ``namespace`` None: this request is neither loaded nor stored. ``next_end`` is the number of computed tokens at
    which there is a chunk to offer again (``NEVER`` when there is none): the only thing a step looks at for most
    requests.
    """

    request: Request
    rules: Rules
    namespace: Namespace | None
    load: bool
    store: bool
    blocks: list[int] = field(default_factory=list)
    stores: set[int] = field(
        default_factory=set
    )  # store jobs that still read this request's blocks
    loading: int | None = None  # load job that still writes them
    local_tokens: int = 0  # computed by the engine, as of the last query
    counted: bool = False
    retried: bool = False  # a store that failed was offered again
    sources: dict[str, int] = field(default_factory=dict)  # tokens of the last load, by tier
    offered: int = 0  # chunks
    next_end: int = 0
    exact_chunks: int = NEVER  # from there on they were computed on what a lossy codec gave back, and are not stored
    _keys: list[ChunkKey] = field(default_factory=list)

    def keys(self) -> list[ChunkKey]:
        """Keys of every full chunk hashed so far."""
        if self.namespace is None:
            return []
        hashes = self.request.block_hashes
        known = len(hashes) // self.rules.hashes_per_chunk
        if getattr(self.request, "resumable", False):
            self._keys = []  # a streaming session may rewrite its tail
        if known > len(self._keys):
            self._keys += chunk_keys(
                self.namespace, 0, hashes, self.rules.hashes_per_chunk, start=len(self._keys)
            )
        return self._keys

    def rekey(self, namespace: Namespace | None) -> None:
        """Use another namespace from now on; None: take no further part."""
        self.namespace = namespace
        self._keys = []
        if namespace is None:
            self.load = self.store = False
            self.next_end = NEVER

    def complete_chunks(self, computed_tokens: int) -> int:
        """Full chunks whose every token is known (a draft token is not) and computed, once ``computed_tokens`` are."""
        request, rules = self.request, self.rules
        limit = request.num_tokens if rules.save_decode else request.num_prompt_tokens
        final = min(computed_tokens, request.num_tokens) - rules.lookahead
        return min(min(final, limit) // rules.chunk_tokens, len(self.keys()))

    def advance(self, chunks: int) -> None:
        """Everything before ``chunks`` has been offered."""
        self.offered = chunks
        rules = self.rules
        end = (chunks + 1) * rules.chunk_tokens
        more = self.store and (rules.save_decode or end <= self.request.num_prompt_tokens)
        self.next_end = end + rules.lookahead if more else NEVER

    def parent_hash(self, chunk: int) -> bytes:
        """Prefix hash of the chunk before, empty for the first."""
        return (
            bytes(self.request.block_hashes[chunk * self.rules.hashes_per_chunk - 1])
            if chunk
            else b""
        )
