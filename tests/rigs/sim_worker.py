"""One simulated rank: a model runner that computes nothing, on real pages.

It calls the hooks of the connector's real worker side in vLLM's order, keeps its own block tables
from the scheduler's output as vLLM's runner does, and checks every byte that a forward pass would
read. Needs a scheduler's output with vLLM's fields.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.rigs.sim_device import WatchedDevice
from tests.rigs.sim_pages import Pages, Prefix, mix, next_token


@dataclass(frozen=True, slots=True)
class RunnerRules:
    """The order of hooks that is simulated.

    ``save_on_empty``: ``wait_for_save`` is called on steps without a forward (vLLM 0.31 and later).
    ``defer_save``: it is called after the step's results were taken (speculative decoding).
    """

    save_on_empty: bool = True
    defer_save: bool = False
    vocab: int = 64


@dataclass(slots=True)
class RankOutput:
    """One rank's answer to a step: the fields of vLLM's ``KVConnectorOutput``, and tokens."""

    sampled: dict[str, list[int]] = field(default_factory=dict)
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    worker_meta: Any = None


@dataclass(slots=True)
class _Sequence:
    tokens: list[int]
    blocks: list[int]
    adapter: int
    weights: int
    prefix: Prefix


class SimWorker:
    """``connector`` is a KV connector in its worker role, whose device is, or wraps, ``device``.

    ``weights`` stands for the model's weights: after ``weights += 1`` every page computed before is
    wrong. ``adapter_of`` maps a LoRA request to a number that stands for the adapter's content.
    """

    def __init__(
        self,
        connector: Any,
        pages: Pages,
        device: WatchedDevice,
        rules: RunnerRules,
        *,
        adapter_of: Callable[[Any], int] = lambda lora: 0,
    ) -> None:
        self.connector = connector
        self.pages = pages
        self.device = device
        self.weights = 0
        self.computed_tokens = 0
        self._rules = rules
        self.adapter_of = adapter_of
        self._sequences: dict[str, _Sequence] = {}
        connector.register_kv_caches(pages.tensors)

    def step(self, output: Any) -> RankOutput:
        """Executes one scheduler's output."""
        rules, connector, meta = self._rules, self.connector, output.kv_connector_metadata
        connector.handle_preemptions(meta)
        self._update_states(output)
        connector.bind_connector_metadata(meta)
        if output.has_sync_kv_loads:
            connector.start_load_kv(None)
        result = RankOutput()
        if output.total_num_scheduled_tokens:
            result.sampled = self._forward(output)
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        saves = rules.save_on_empty or output.total_num_scheduled_tokens > 0
        if saves and not rules.defer_save:
            connector.wait_for_save()
        ended = connector.get_transfer_results(output.finished_req_ids)
        result.finished_sending = set(ended.finished_sending or ())
        result.finished_recving = set(ended.finished_recving or ())
        result.failed_recving = set(ended.failed_recving or ())
        result.invalid_block_ids = set(connector.get_block_ids_with_load_errors())
        result.worker_meta = connector.build_connector_worker_meta()
        if saves and rules.defer_save:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return result

    # --- states -----------------------------------------------------------------------------------

    def _update_states(self, output: Any) -> None:
        for req_id in output.finished_req_ids:
            self._sequences.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            tokens = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            lora = getattr(new, "lora_request", None)
            adapter = self.adapter_of(lora) if lora is not None else 0
            self._sequences[new.req_id] = self._sequence(
                list(tokens), list(new.block_ids[0]), adapter
            )
        cached = output.scheduled_cached_reqs
        for req_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            sequence = self._sequences[req_id]
            if req_id in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids[req_id])
                self._sequences[req_id] = self._sequence(
                    tokens, list(new_blocks[0]), sequence.adapter
                )
            elif new_blocks is not None:
                sequence.blocks += new_blocks[0]

    def _sequence(self, tokens: list[int], blocks: list[int], adapter: int) -> _Sequence:
        return _Sequence(tokens, blocks, adapter, self.weights, Prefix(mix(adapter, self.weights)))

    def expected_token(self, tokens: Sequence[int], adapter: int = 0) -> int:
        """Returns the token that an engine without any cache samples after ``tokens``."""
        states = Prefix(mix(adapter, self.weights)).states(tokens, 0, len(tokens))
        return next_token(states, self._rules.vocab)

    # --- forward ----------------------------------------------------------------------------------

    def _forward(self, output: Any) -> dict[str, list[int]]:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        spans = {
            req_id: (starts[req_id], starts[req_id] + n)
            for req_id, n in output.num_scheduled_tokens.items()
        }
        size = self.pages.block_tokens
        # Each layer writes the KV of all requests before any attends, so a request may share what
        # another one computes in the same step.
        drafts = output.scheduled_spec_decode_tokens
        for req_id, (start, end) in spans.items():
            sequence = self._sequences[req_id]
            tokens = [*sequence.tokens, *drafts.get(req_id, ())]
            assert end <= len(tokens), f"{req_id}: {end} tokens scheduled of {len(tokens)} known"
            assert len(sequence.blocks) * size >= end, (
                f"{req_id}: {len(sequence.blocks)} blocks for {end} tokens"
            )
            assert sequence.weights == self.weights, f"{req_id} was computed with other weights"
            self.device.before_write(sequence.blocks[start // size : -(-end // size)])
            self.pages.write(sequence.blocks, start, sequence.prefix.states(tokens, start, end))
            self.computed_tokens += end - start
        return {
            r: self._attend(r, start, end, drafts.get(r, ())) for r, (start, end) in spans.items()
        }

    def _attend(self, req_id: str, start: int, end: int, drafts: Sequence[int]) -> list[int]:
        sequence, size = self._sequences[req_id], self.pages.block_tokens
        used = sequence.blocks[: -(-end // size)]
        self.device.before_read(used)
        wrong = self.pages.wrong(used, sequence.prefix.states([*sequence.tokens, *drafts], 0, end))
        if wrong is not None:
            block = used[wrong // size]
            raise AssertionError(
                f"{req_id}: position {wrong} (block {block}) holds other bytes than computed; "
                f"tokens {start} to {end} "
                "are scheduled, so it was "
                f"{'cached or loaded' if wrong < start else 'just written'}"
            )
        if end < len(sequence.tokens):
            return []
        sampled = self._verify(used, len(sequence.tokens), drafts)
        sequence.prefix.truncate(len(sequence.tokens) + len(sampled) - 1)
        sequence.tokens += sampled
        return sampled

    def _verify(self, used: Sequence[int], known: int, drafts: Sequence[int]) -> list[int]:
        """Returns the leading drafts that greedy sampling gives, and the token after them."""
        sampled: list[int] = []
        for draft in (*drafts, None):
            sampled.append(
                next_token(self.pages.states(used, known + len(sampled)), self._rules.vocab)
            )
            if sampled[-1] != draft:
                break
        return sampled

    def propose(self, req_id: str, count: int, rng: random.Random) -> list[int]:
        """Returns a drafter's tokens, which are right up to some point."""
        sequence = self._sequences[req_id]
        tokens = list(sequence.tokens)
        for _ in range(count):
            right = self.expected_token(tokens, sequence.adapter)
            tokens.append(right if rng.random() < 0.6 else rng.randrange(self._rules.vocab))
        return tokens[len(sequence.tokens) :]
