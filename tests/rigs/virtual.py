"""A server on a virtual clock: vLLM's scheduling and the time of its steps, kvstow's scheduler side, a paced store.

For TTFT with a tier of any speed, in no time and the same on every machine. No worker and no model: a step takes
``Model.step_s`` and a copy none; slots are never written, so bytes are whatever they are, sealed and checked as always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstow.cache import Cache
from kvstow.key import Namespace
from kvstow.layout import ChunkLayout, GroupLayout
from kvstow.metrics import Metrics, merge
from kvstow.pool.policy.lru import LRU
from kvstow.pool.pool import HostPool
from kvstow.testing.manual import ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier, TierLimits
from tests.rigs.paced import PacedClock, PacedExecutor, PacedStore
from tests.rigs.sim_requests import SimNew, SimOutput, SimRequest

BLOCK: Final = 16
LAYOUT: Final = ChunkLayout((GroupLayout(BLOCK, 1, (4096,)),))
FRAME_BYTES: Final = LAYOUT.max_frame_bytes
TIER: Final = "t"


@dataclass(frozen=True, slots=True)
class Model:
    """What computing takes: a step ``fixed_s``, each prompt token in it ``token_s``, each decoding request
    ``decode_s``. An engine that has nothing to compute steps every ``idle_s``."""

    fixed_s: float = 0.005
    token_s: float = 0.0001
    decode_s: float = 0.00002
    idle_s: float = 0.0005
    batched_tokens: int = 2048
    max_seqs: int = 64

    def step_s(self, prefill: int, decoding: int) -> float:
        return self.fixed_s + prefill * self.token_s + decoding * self.decode_s

    @property
    def chunk_byte_s(self) -> float:
        """Seconds a byte at which a chunk is loaded exactly as fast as it is computed."""
        return self.token_s * BLOCK / FRAME_BYTES


@dataclass(slots=True)
class Served:
    """A request, and what became of it."""

    request: SimRequest
    arrives_s: float
    ttft_s: float = -1.0
    loaded_tokens: int = 0
    is_loading: bool = False


@dataclass(slots=True)
class VirtualServer:
    """``run`` serves requests that arrive at given times, and says of each when its first token came."""

    side: Any
    engine: Cache
    metrics: Metrics
    clock: PacedClock
    model: Model
    totals: dict[str, Any] = field(default_factory=dict)
    _blocks: int = 0

    def run(self, arrivals: Sequence[tuple[float, SimRequest]]) -> list[Served]:
        """``arrivals``: seconds from now, in order."""
        from kvstow.vllm.metadata import JobReport, WorkerMeta

        now = self.clock.monotonic()
        served = [Served(request, now + at) for at, request in arrivals]
        coming, waiting, running = deque(served), list[Served](), list[Served]()
        while coming or waiting or running:
            if not waiting and not running and not self.side.busy():
                self.clock.advance(max(0.0, coming[0].arrives_s - self.clock.monotonic()))
            while coming and coming[0].arrives_s <= self.clock.monotonic():
                waiting.append(coming.popleft())
            output = self._schedule(waiting, running)
            meta = self.side.build_meta(output)
            new = sum(output.num_scheduled_tokens.values()) - len(
                output.scheduled_cached_reqs.req_ids
            )
            step_s = self.model.step_s(new, len(output.scheduled_cached_reqs.req_ids))
            self.clock.advance(step_s if output.total_num_scheduled_tokens else self.model.idle_s)
            self._end_step(running, output)
            copied = [(job.job, FRAME_BYTES * len(job.copies)) for job in meta.loads + meta.stores]
            jobs = {job: JobReport(1, set(), size, 0.0) for job, size in copied}
            self.side.update_from_workers(WorkerMeta(jobs=jobs, step=meta.step))
            loaded = {job.req_id for job in meta.loads}
            for each in waiting:
                each.is_loading = each.is_loading and each.request.request_id not in loaded
            for each in [
                each
                for each in running
                if each.request.num_output_tokens >= each.request.max_tokens
            ]:
                running.remove(each)
                self.side.request_finished(each.request, each.request.blocks)
        return served

    def _schedule(self, waiting: list[Served], running: list[Served]) -> SimOutput:
        output, budget = SimOutput(), self.model.batched_tokens
        for each in running:
            request = each.request
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            if count > 0:
                cached = output.scheduled_cached_reqs
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                output.num_scheduled_tokens[request.request_id] = count
                budget -= count
        for each in list(waiting):
            if budget <= 0 or len(running) >= self.model.max_seqs:
                break
            budget -= self._admit(each, budget, waiting, running, output)
        for req_id, count in output.num_scheduled_tokens.items():
            next(
                e for e in running if e.request.request_id == req_id
            ).request.num_computed_tokens += count
        return output

    def _admit(
        self,
        each: Served,
        budget: int,
        waiting: list[Served],
        running: list[Served],
        output: SimOutput,
    ) -> int:
        request = each.request
        if each.is_loading:
            return 0
        if not request.blocks:
            tokens, _ = self.side.num_new_matched_tokens(request, 0)
            if tokens is None:
                return 0
            count = -(-(request.num_tokens + request.max_tokens) // BLOCK)
            request.blocks = list(range(self._blocks + 1, self._blocks + 1 + count))
            self._blocks += count
            self.side.update_state_after_alloc(request, request.blocks if tokens else [], tokens)
            each.loaded_tokens = request.num_computed_tokens = tokens
            each.is_loading = tokens > 0
            if each.is_loading:
                return 0
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        count = min(budget, request.num_tokens - request.num_computed_tokens)
        waiting.remove(each)
        running.append(each)
        output.num_scheduled_tokens[request.request_id] = count
        blocks = (list(request.blocks),)
        output.scheduled_new_reqs.append(
            SimNew(
                request.request_id, request.prompt_token_ids, blocks, request.num_computed_tokens
            )
        )
        return count

    def _end_step(self, running: Sequence[Served], output: SimOutput) -> None:
        now = self.clock.monotonic()
        for each in running:
            request = each.request
            if (
                request.request_id in output.num_scheduled_tokens
                and request.num_computed_tokens >= request.num_tokens
            ):
                request.append([7])
                if each.ttft_s < 0:
                    each.ttft_s = now - each.arrives_s

    def counted(self, name: str) -> dict[str, float]:
        """Series of a counter, by their label values."""
        self.totals = merge(self.totals, self.metrics.take() or {})
        counters = self.totals.get("counters", {})
        return {
            s.partition("|")[2]: value
            for s, value in counters.items()
            if s.partition("|")[0] == name
        }


def virtual_server(
    below: MemoryStore,
    model: Model,
    *,
    pace: PacedStore | None = None,
    pool_chunks: int = 1024,
    loads: bool = True,
    stores: bool = False,
    threads: int = 4,
    **engine: Any,
) -> VirtualServer:
    """``below``: what the lower tier holds. ``pace``: the store in front of it; without one it takes no time."""
    from kvstow.vllm.metadata import Mount, WorkerMeta
    from kvstow.vllm.requests import Rules
    from kvstow.vllm.scheduler import SchedulerSide

    clock, metrics = PacedClock(), Metrics()
    store = pace or PacedStore(below)
    limits = TierLimits(read_batch_bytes=4 * FRAME_BYTES, max_read_bytes=128 * FRAME_BYTES)
    executor = PacedExecutor(clock, store, threads)
    tier = Tier(TIER, store, executor, layout=LAYOUT, clock=clock, metrics=metrics, limits=limits)
    pool = HostPool.create(LAYOUT, pool_chunks * FRAME_BYTES, name="virtual")
    built = Cache(
        pool=pool,
        policy=LRU(),
        tiers=[tier],
        layout=LAYOUT,
        clock=clock,
        metrics=metrics,
        sealer=ManualExecutor(clock, run_in_wait=True),
        **engine,
    )
    rank = (0, 0)
    side = SchedulerSide(
        built,
        Namespace.from_fields({"model": "virtual"}),
        Rules(BLOCK, BLOCK, BLOCK, save_decode=False, lookahead=0),
        Mount(pool.ref, {rank: 0}, frozenset({rank})),
        loads=loads,
        stores=stores,
        clock=clock,
        metrics=metrics,
    )
    side.update_from_workers(WorkerMeta(mounted=1))
    return VirtualServer(side, built, metrics, clock, model)


def prompt(number: int, chunks: int) -> list[int]:
    """A prompt of so many chunks and some tokens, that shares nothing with another number's."""
    return [number * 7919 + i for i in range(chunks * BLOCK + 10)]


def request(req_id: str, number: int, chunks: int, max_tokens: int = 4) -> SimRequest:
    return SimRequest(req_id, prompt(number, chunks), max_tokens, BLOCK)


def fill(below: MemoryStore, model: Model, prompts: Sequence[tuple[int, int]]) -> None:
    """Have ``below`` hold these prompts' chunks, by number and length."""
    for number, chunks in prompts:
        server = virtual_server(below, model, loads=False, stores=True, pool_chunks=2 * chunks + 2)
        server.run([(0.0, request(f"fill{number}", number, chunks))])
        assert server.engine.drain(60.0)
        server.engine.close(1.0)
