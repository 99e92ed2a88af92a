"""Requests and scheduler outputs with the fields of vLLM's that a KV connector reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class SimStatus(IntEnum):
    """vLLM's ``RequestStatus``, by the same names."""

    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7


class SimRequest:
    """A request as a connector sees it.

    Block hashes chain over tokens, cache salt and adapter name, as vLLM's do.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        block_tokens: int,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        lora_request: Any = None,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.max_tokens = max_tokens
        self.kv_transfer_params = kv_transfer_params
        self.lora_request = lora_request
        self.cache_salt = cache_salt
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.resumable = False
        self.status = SimStatus.WAITING
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.all_token_ids = list(self.prompt_token_ids)
        self.spec_token_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.blocks: list[int] = []
        self._block_tokens = block_tokens
        self.append([])

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    def is_finished(self) -> bool:
        return self.status > SimStatus.PREEMPTED

    def append(self, tokens: Sequence[int]) -> None:
        """Sampled tokens; block hashes follow."""
        self.all_token_ids += tokens
        size = self._block_tokens
        while (len(self.block_hashes) + 1) * size <= self.num_tokens:
            start = len(self.block_hashes) * size
            digest = hashlib.blake2b(self.block_hashes[-1] if start else b"root", digest_size=32)
            name = getattr(self.lora_request, "lora_name", None)
            salt = self.cache_salt if start == 0 else None
            digest.update(repr((self.all_token_ids[start : start + size], salt, name)).encode())
            self.block_hashes.append(digest.digest())


class SimBlocks:
    """What ``update_state_after_alloc`` is given: all blocks of a request, in order."""

    def __init__(self, block_ids: Sequence[int]) -> None:
        self._block_ids = list(block_ids)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self._block_ids),)


@dataclass(slots=True)
class SimNew:
    """A request's first appearance in an output."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    lora_request: Any = None


@dataclass(slots=True)
class SimCached:
    """The requests of an output that appeared before."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SimOutput:
    """The fields of vLLM's ``SchedulerOutput`` that connectors and runners read."""

    scheduled_new_reqs: list[SimNew] = field(default_factory=list)
    scheduled_cached_reqs: SimCached = field(default_factory=SimCached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    kv_connector_block_state: Any = None
    kv_connector_metadata: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True)
class SimConnectorOutput:
    """vLLM's ``KVConnectorOutput``: all ranks' results of a step."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    kv_connector_worker_meta: Any = None
