"""The connector in vLLM's scheduler process: what is a hit, what is loaded, what is stored.

One thread, vLLM's engine core loop, calls everything here; nothing here blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvstow.cache import Cache, Found
from kvstow.direct.hangs import HungRanks
from kvstow.errors import UnsupportedError
from kvstow.key import Namespace
from kvstow.metrics import Metrics
from kvstow.pool.pool import Lease
from kvstow.runtime import Clock
from kvstow.vllm.fingerprint import Adapters
from kvstow.vllm.jobs import JOB_DEADLINE_S, Jobs, Sent
from kvstow.vllm.metadata import Copy, Mount, StepMeta, WorkerMeta
from kvstow.vllm.prefill import StepTimes
from kvstow.vllm.requests import Rules, Tracked
from kvstow.vllm.taint import Taint

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvstow")

SKIP_LOAD: Final = "kvstow.skip_load"
SKIP_STORE: Final = "kvstow.skip_store"


class SchedulerSide:
    """Decides; the workers' side copies. Built once the workers have said what their devices recognised."""

    def __init__(
        self,
        engine: Cache,
        namespace: Namespace,
        rules: Rules,
        mount: Mount,
        *,
        loads: bool,
        stores: bool,
        clock: Clock,
        metrics: Metrics,
        on_mounted: Callable[[], None] = lambda: None,
        adapters: Adapters | None = None,
    ) -> None:
        self._engine = engine
        self._namespace = namespace
        self._adapters = adapters or Adapters()
        self._rules = rules
        self._mount = mount
        self._ranks = len(mount.shards)
        self._mounted = 0
        self._hung = HungRanks(
            metrics, used=engine.place_tier == "direct"
        )  # while it is true, direct storage is bypassed
        self._loads = loads
        self._stores = stores
        self._clock = clock
        self._metrics = metrics
        self._tracked: dict[str, Tracked] = {}
        self._jobs = Jobs(engine, self._ranks, rules.chunk_tokens, clock=clock, metrics=metrics)
        self._taint = None if engine.exact or not stores else Taint(rules)
        self._times = StepTimes(engine, clock)
        self._next_meta = StepMeta()
        self._last: str | None = (
            None  # the request that was answered last in this step, if none was admitted since
        )
        self._passed: set[str] = set()  # requests that had no room in steps which did nothing else
        self._resets = 0
        self._started_s = clock.monotonic()
        self._broken = False
        self._on_mounted = on_mounted

    # --- queries -------------------------------------------------------------------------------------------------

    def num_new_matched_tokens(
        self, request: Request, computed_tokens: int
    ) -> tuple[int | None, bool]:
        """vLLM's hook: tokens that can be loaded beyond ``computed_tokens``; None means ask again.

        Asked on every step while the request waits, so idempotent and cheap.
        """
        tokens, asynchronous = self._matched(request, computed_tokens)
        # vLLM 0.30 admits nobody behind a request that has no room, even who keeps that room, for a load or after one
        # that failed. So who had none asks again, and those behind it are asked, until a step does something.
        if tokens is None or request.request_id in self._passed:
            return None, False
        self._last = request.request_id
        return tokens, asynchronous

    def _matched(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            lora = request.lora_request
            if lora is not None and not self._broken and self._adapters.reading(lora.lora_path):
                return None, False
            tracked = self._track(request)
        tracked.local_tokens = computed_tokens
        if not tracked.load or self._hung or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if self._mounted < self._ranks:
            return (None, False) if self._starting() else (0, False)
        chunk = self._rules.chunk_tokens
        found = self._engine.fetch(request.request_id, tracked.keys(), computed_tokens // chunk)
        if found.state is Found.PENDING:
            return None, False
        extra = found.chunks * chunk - computed_tokens
        if self._rules.lookahead:
            extra -= chunk
        return (extra, True) if extra > 0 else (0, False)

    def _starting(self) -> bool:
        return not self._broken and self._clock.monotonic() - self._started_s < JOB_DEADLINE_S

    def _track(self, request: Request) -> Tracked:
        # Not always what vLLM says: in ``vllm_xargs`` a client may send anything under this name.
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        namespace = self._namespace_of(request)
        tracked = Tracked(
            request,
            self._rules,
            namespace,
            load=self._loads and namespace is not None and not params.get(SKIP_LOAD, False),
            store=self._stores and namespace is not None and not self._unstored(request, params),
        )
        tracked.advance(0)
        self._tracked[request.request_id] = tracked
        return tracked

    def _unstored(self, request: Request, params: dict[str, Any]) -> bool:
        limit = self._rules.priority_limit
        return bool(params.get(SKIP_STORE, False)) or (
            limit is not None and request.priority > limit
        )

    def _namespace_of(self, request: Request) -> Namespace | None:
        if self._broken:
            return None
        lora = request.lora_request
        if lora is None:
            return self._namespace
        digest = self._adapters.digest(lora.lora_name, lora.lora_path)
        return None if digest is None else self._namespace.derive("lora", digest)

    # --- allocation ----------------------------------------------------------------------------------------------

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], external_tokens: int
    ) -> None:
        """vLLM's hook: ``external_tokens`` after the local hit are to be loaded into ``block_ids`` (all blocks of the
        request, in order). 0 means that nothing is loaded, whatever was answered before."""
        self._last = None
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.sources = self._sources(request.request_id, external_tokens)
        self._count_lookup(tracked)
        if external_tokens == 0:
            self._times.admitted(request.num_tokens - tracked.local_tokens)
            self._forget(request.request_id)
            return
        start, end = tracked.local_tokens, tracked.local_tokens + external_tokens
        chunk, block = self._rules.chunk_tokens, self._rules.block_tokens
        first, last = start // chunk, -(-end // chunk)
        keys = tracked.keys()[first:last]
        leases = self._engine.hold(request.request_id, keys)
        copies: list[Copy] = []
        for index, lease in enumerate(leases, start=first):
            low, high = max(start, index * chunk), min(end, (index + 1) * chunk)
            copies.append(
                Copy(
                    lease.place,
                    block_ids[low // block : high // block],
                    (low - index * chunk) // block,
                )
            )
        if self._taint is not None:
            for copy, key in zip(copies, keys, strict=False):
                self._taint.loaded(copy.block_ids, lossy=self._engine.lossy(key))
        held_end = max(start, min(end, (first + len(leases)) * chunk))
        lost = block_ids[held_end // block : -(-end // block)]
        moved = held_end - start
        job = self._jobs.new(
            tracked, copies, leases, load=True, required=external_tokens, moved=moved, lost=lost
        )
        tracked.loading = job.job
        tracked.blocks = block_ids  # from now on they hold KV: a reset must know
        self._next_meta.loads.append(job)

    def _forget(self, req_id: str) -> None:
        if not self._broken:
            self._engine.forget(req_id)

    def lose(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        """A load that was promised cannot be made: have the workers report its blocks."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.loading is not None:
            return
        end = -(-(tracked.local_tokens + external_tokens) // self._rules.block_tokens)
        lost = block_ids[tracked.local_tokens // self._rules.block_tokens : end]
        job = self._jobs.new(
            tracked, [], [], load=True, required=external_tokens, moved=0, lost=lost
        )
        tracked.loading = job.job
        self._next_meta.loads.append(job)

    def _count_lookup(self, tracked: Tracked) -> None:
        if (
            tracked.counted
            or not tracked.load
            or getattr(tracked.request, "skip_reading_prefix_cache", False)
        ):
            return
        tracked.counted = True
        chunk = self._rules.chunk_tokens
        wanted = tracked.request.num_tokens - tracked.local_tokens
        self._metrics.count("requested_tokens", wanted)
        hits = 0
        for tier, tokens in tracked.sources.items():
            self._metrics.count("hit_tokens", tokens, tier=tier)
            self._metrics.count("hit_chunks", -(-tokens // chunk), tier=tier)
            hits += -(-tokens // chunk)
        self._metrics.count("miss_chunks", max(0, wanted // chunk - hits))

    def _sources(self, req_id: str, external_tokens: int) -> dict[str, int]:
        """``external_tokens`` by the tier they came from; what was not fetched for this request was there."""
        sources: dict[str, int] = {}
        left = external_tokens
        for tier, chunks in ({} if self._broken else self._engine.origins(req_id)).items():
            sources[tier] = min(left, chunks * self._rules.chunk_tokens)
            left -= sources[tier]
        if left:
            sources[self._engine.place_tier] = left
        return {tier: tokens for tier, tokens in sources.items() if tokens}

    def hit_sources(self, request: Request) -> dict[str, int]:
        """Tokens of the request's last load by tier."""
        tracked = self._tracked.get(request.request_id)
        return tracked.sources if tracked is not None else {}

    # --- a step --------------------------------------------------------------------------------------------------

    def build_meta(self, output: SchedulerOutput) -> StepMeta:
        """vLLM's hook, once a step: loads promised since the last step, and every chunk that this step completes."""
        if not self._broken:
            self._engine.poll()
            if self._taint is not None:
                self._taint.step(output, self._tracked)
            if self._stores:
                self._offer_new(output)
                self._offer_cached(output)
        if (
            self._last is not None
            and not output.total_num_scheduled_tokens
            and not self._jobs.busy()
        ):
            self._passed.add(self._last)
        else:
            self._passed.clear()
        self._last = None
        meta, self._next_meta = self._next_meta, StepMeta()
        meta.preempted = set(output.preempted_req_ids or ())
        meta.has_forward = output.total_num_scheduled_tokens > 0
        meta.step = self._times.began(output)
        meta.mount = self._mount if self._mounted < self._ranks else None
        return meta

    def _offer_new(self, output: SchedulerOutput) -> None:
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            tracked = self._tracked.get(new.req_id)
            if tracked is not None:
                tracked.blocks = list(new.block_ids[0])
                tracked.advance(
                    0
                )  # a session that goes on, or resumed after a preemption, comes here again
                self._offer(tracked, new.num_computed_tokens + scheduled[new.req_id])

    def _offer_cached(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        scheduled = output.num_scheduled_tokens
        get = self._tracked.get
        resumed = cached.resumed_req_ids
        for req_id, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            tracked = get(req_id)
            if tracked is None:
                continue
            if new_blocks is not None:
                if req_id in resumed:
                    tracked.blocks = list(new_blocks[0])
                    tracked.advance(0)
                else:
                    tracked.blocks += new_blocks[0]
            if computed + scheduled[req_id] >= tracked.next_end:
                self._offer(tracked, computed + scheduled[req_id])

    def _offer(self, tracked: Tracked, computed_tokens: int) -> None:
        """Give a place to every full chunk of ``tracked`` that no tier holds; refusals are counted by the engine."""
        if not tracked.store or self._mounted < self._ranks or self._hung:
            return
        first, last = tracked.offered, tracked.complete_chunks(computed_tokens)
        if last <= first:
            return
        tracked.advance(last)
        keys = tracked.keys()[first : min(last, tracked.exact_chunks)]
        per_chunk, chunk = self._rules.blocks_per_chunk, self._rules.chunk_tokens
        copies: list[Copy] = []
        leases: list[Lease] = []
        for index in self._engine.missing(keys):
            at = first + index
            blocks = tracked.blocks[at * per_chunk : (at + 1) * per_chunk]
            if (
                len(blocks) < per_chunk or 0 in blocks
            ):  # block 0 is vLLM's null block: this chunk's KV is gone
                continue
            lease = self._engine.reserve(keys[index], tracked.parent_hash(at), chunk)
            if lease is not None:
                copies.append(Copy(lease.place, blocks))
                leases.append(lease)
        if copies:
            moved = len(copies) * chunk
            job = self._jobs.new(tracked, copies, leases, load=False, required=moved, moved=moved)
            tracked.stores.add(job.job)
            self._next_meta.stores.append(job)

    # --- results -------------------------------------------------------------------------------------------------

    def update_from_workers(self, meta: WorkerMeta) -> None:
        """vLLM's hook: what the workers have done, summed over ranks."""
        if meta.step:
            self._times.ended(meta.step)
        if meta.mounted:
            self._mounted += meta.mounted
            if self._mounted >= self._ranks:
                self._on_mounted()
                logger.info("Host pool mapped by %d of %d ranks", self._mounted, self._ranks)
        self._hung.update(meta.hung)
        for error in meta.errors:
            logger.error("A worker reports: %s", error)
        if meta.errors and self._mounted < self._ranks:
            self.disable(
                meta.errors[0]
            )  # before that nothing but the mapping can fail, and it is not tried again
        for number, sent in self._jobs.ended(meta.jobs):
            self._ended(number, sent)

    def _ended(self, number: int, sent: Sent) -> None:
        tracked = self._tracked.get(sent.req_id)
        if tracked is not None:
            tracked.stores.discard(number)
            if (
                sent.report.failed
                and not sent.load
                and not tracked.retried
                and self._engine.place_tier == "direct"
            ):
                tracked.retried = (
                    True  # the device may be full: in another chunk's place there is room
                )
                tracked.advance(0)
            if tracked.loading == number:
                tracked.loading = None
                # A copy that failed may fail for ever; and vLLM counts such a request's blocks twice when it asks
                # for another asynchronous load, which can leave it and all behind it waiting for good.
                tracked.load = tracked.load and not (sent.report.failed or sent.lost)
        self._jobs.settle(sent, publish=not self._broken)

    # --- ends ----------------------------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        """vLLM's hook, before the blocks are freed. True: a copy still reads them; the workers say when it ended."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._forget(request.request_id)
        self._passed.discard(request.request_id)
        if tracked.loading is not None:
            return False  # vLLM keeps the blocks itself until the workers report the load's end
        if self._rules.save_decode and tracked.store and tracked.blocks and not _aborted(request):
            tracked.blocks = list(block_ids)
            # The last sampled token has no KV; with async scheduling the count may run ahead of what is known.
            self._offer(tracked, min(request.num_computed_tokens, request.num_tokens - 1))
        if not tracked.stores:
            return False
        self._next_meta.finishing.append(request.request_id)
        return True

    def busy(self) -> bool:
        """Whether an idle vLLM must keep stepping: something is on its way and not past its deadline."""
        if self._mounted < self._ranks:
            return self._starting()
        return (not self._broken and self._engine.busy()) or self._jobs.busy()

    def reset(self) -> None:
        """Nothing stored so far is found again, in any tier, by anyone; what is in flight is never published.

        The weights may have changed, so a request that has computed something takes no further part.
        """
        self._resets += 1
        self._namespace = self._namespace.derive("reset", f"{self._clock.wall()!r}/{self._resets}")
        self._engine.reset()
        for req_id, tracked in self._tracked.items():
            self._engine.forget(req_id)
            fresh = not tracked.blocks and tracked.loading is None
            tracked.rekey(
                self._namespace_of(tracked.request)
                if fresh and tracked.namespace is not None
                else None
            )

    def disable(self, why: str) -> None:
        """Take no further part: every later query misses, nothing more is stored. Loads already promised but not
        sent are reported as lost, so that their requests recompute."""
        if self._broken:
            return
        self._broken = True
        logger.error(
            "kvstow is switched off in this engine, requests are computed as without it: %s", why
        )
        for tracked in self._tracked.values():
            tracked.rekey(None)
        for job in self._next_meta.loads:
            job.lost = [block for copy in job.copies for block in copy.block_ids] + job.lost
            job.copies = []

    def take_stats(self) -> dict[str, Any] | None:
        """What changed in the metrics since the last call; None when nothing did."""
        self._engine.show()
        return self._metrics.take()

    def close(self) -> None:
        self._engine.close(timeout_s=5.0)


def _aborted(request: Request) -> bool:
    return request.status.name in ("FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED")


def check_ranks(hellos: dict[tuple[int, int], Any], world_size: int, host: str) -> None:
    """Every rank must have answered, agree on the pages of its pipeline stage, and run on this host."""
    if len(hellos) != world_size:
        raise UnsupportedError(
            f"{len(hellos)} of {world_size} ranks answered kvstow's handshake: all must be on this host"
        )
    by_shard: dict[tuple[int, int], Any] = {}
    for rank, hello in sorted(hellos.items()):
        if hello.host != host:
            raise UnsupportedError(
                f"rank (pp, tp) {rank} runs on another host; kvstow shares host memory among ranks of one host"
            )
        if by_shard.setdefault(hello.shard, hello.groups) != hello.groups:
            raise UnsupportedError(
                f"rank (pp, tp) {rank} recognised other KV pages than a rank with the same heads"
            )
