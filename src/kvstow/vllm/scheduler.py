"""The connector in vLLM's scheduler process. It decides what is a hit, loaded and stored.

vLLM's engine core loop is the one thread that calls it. No method but ``close`` blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvstow.cache import Cache, LookupState
from kvstow.direct.hangs import HungRanks
from kvstow.key import Namespace
from kvstow.metrics import Metrics
from kvstow.runtime import Clock
from kvstow.vllm.fingerprint import Adapters
from kvstow.vllm.jobs import JOB_DEADLINE_S, Jobs, SentJob
from kvstow.vllm.media import MediaDigests, has_token_types
from kvstow.vllm.metadata import Copy, Mount, StepMeta, WorkerMeta
from kvstow.vllm.prefill import StepTimes
from kvstow.vllm.requests import Rules, Tracked
from kvstow.vllm.stores import StoreOffers
from kvstow.vllm.taint import Taint

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvstow")

SKIP_LOAD: Final = "kvstow.skip_load"
SKIP_STORE: Final = "kvstow.skip_store"
CLOSE_TIMEOUT_S: Final = 5.0


class SchedulerSide:
    """Decides what is loaded and stored; the workers' sides copy.

    Args:
        cache: Knows where every chunk is.
        namespace: The base model's.
        rules: How prompts are cut into chunks.
        mount: What each worker maps before it can copy.
        loads: Whether ``kv_role`` allows loads.
        stores: Whether ``kv_role`` allows stores.
        on_mounted: Called once, when every rank has mapped the places.
        adapters: Digests of LoRA adapters. None: a reader of its own.
    """

    def __init__(
        self,
        cache: Cache,
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
        media: MediaDigests | None = None,
    ) -> None:
        self._cache = cache
        self._namespace = namespace
        self._adapters = adapters or Adapters()
        self._media = media or MediaDigests()
        self._rules = rules
        self._mount = mount
        self._ranks = len(mount.shards)
        self._mounted = 0
        # While it is true, direct storage is bypassed.
        self._hung = HungRanks(metrics, used=cache.place_tier == "direct")
        self._loads = loads
        self._stores = stores
        self._clock = clock
        self._metrics = metrics
        self._tracked: dict[str, Tracked] = {}
        self._jobs = Jobs(cache, self._ranks, rules.chunk_tokens, clock=clock, metrics=metrics)
        self._offers = StoreOffers(cache, rules, self._jobs)
        self._taint = None if cache.exact or not stores else Taint(rules)
        self._times = StepTimes(cache, clock)
        self._next_meta = StepMeta()
        self._last_answered: str | None = None  # in this step, if none was admitted since
        self._without_room: set[str] = set()  # requests that had none in steps that did nothing
        self._resets = 0
        self._started_s = clock.monotonic()
        self._broken = False
        self._on_mounted = on_mounted

    # --- queries ----------------------------------------------------------------------------------

    def num_new_matched_tokens(
        self, request: Request, computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns how many tokens beyond ``computed_tokens`` can be loaded; None means ask again.

        vLLM asks on every step while the request waits, so the answer is idempotent and cheap.
        """
        tokens, asynchronous = self._matched(request, computed_tokens)
        # vLLM 0.30 stops at the first request that has no room, even if one behind it holds that
        # room, during a load or after a failed one. So a request without room is told to ask again,
        # and those behind it are asked, until a step does something.
        if tokens is None or request.request_id in self._without_room:
            return None, False
        self._last_answered = request.request_id
        return tokens, asynchronous

    def _matched(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            if not self._broken and self._reading(request):
                return None, False
            tracked = self._track(request)
        tracked.local_tokens = computed_tokens
        if not tracked.load or self._hung or getattr(request, "skip_reading_prefix_cache", False):
            return 0, False
        if self._mounted < self._ranks:
            return (None, False) if self._starting() else (0, False)
        chunk = self._rules.chunk_tokens
        found = self._cache.fetch(request.request_id, tracked.keys(), computed_tokens // chunk)
        if found.state is LookupState.PENDING:
            return None, False
        extra = found.chunks * chunk - computed_tokens
        if self._rules.lookahead:
            extra -= chunk
        return (extra, True) if extra > 0 else (0, False)

    def _starting(self) -> bool:
        return not self._broken and self._clock.monotonic() - self._started_s < JOB_DEADLINE_S

    def _reading(self, request: Request) -> bool:
        """Whether the request's adapter or media are being digested."""
        lora = request.lora_request
        if lora is not None and self._adapters.reading(lora.lora_path):
            return True
        return self._media.reading(request)

    def _track(self, request: Request) -> Tracked:
        # A client can send any type under this name in ``vllm_xargs``.
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        namespace = self._namespace_of(request)
        tracked = Tracked(
            request,
            self._rules,
            namespace,
            load=self._loads and namespace is not None and not params.get(SKIP_LOAD, False),
            store=self._stores and namespace is not None and not self._unstored(request, params),
            media=self._media.of(request),
        )
        tracked.advance(0)
        self._tracked[request.request_id] = tracked
        ambiguous = self._media.take_ambiguous()
        for other in self._tracked.values() if ambiguous else ():
            if other.uses_any(ambiguous):
                other.rekey(None)
        return tracked

    def _unstored(self, request: Request, params: dict[str, Any]) -> bool:
        limit = self._rules.priority_limit
        return bool(params.get(SKIP_STORE, False)) or (
            limit is not None and request.priority > limit
        )

    def _namespace_of(self, request: Request) -> Namespace | None:
        if self._broken or has_token_types(request):
            return None
        lora = request.lora_request
        if lora is None:
            return self._namespace
        digest = self._adapters.digest(lora)
        return None if digest is None else self._namespace.derive("lora", digest)

    # --- allocation -------------------------------------------------------------------------------

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], external_tokens: int
    ) -> None:
        """Leases what a request loads and adds the load to the next step's metadata.

        Args:
            request: It has just been given its blocks.
            block_ids: All blocks of the request, in order.
            external_tokens: Tokens after the local hit that are to be loaded. 0: nothing is
                loaded, whatever was answered before.
        """
        self._last_answered = None
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.sources = self._sources(request.request_id, external_tokens)
        self._count_lookup(tracked)
        if external_tokens == 0:
            self._times.admitted(request.num_tokens - tracked.local_tokens)
            self._forget(request.request_id)
            return
        start = tracked.local_tokens
        end = start + external_tokens
        chunk = self._rules.chunk_tokens
        block = self._rules.block_tokens
        first = start // chunk
        keys = tracked.keys()[first : -(-end // chunk)]
        leases = self._cache.hold(request.request_id, keys)
        copies: list[Copy] = []
        for index, lease in enumerate(leases, start=first):
            low = max(start, index * chunk)
            high = min(end, (index + 1) * chunk)
            blocks = block_ids[low // block : high // block]
            copies.append(Copy(lease.place, blocks, (low - index * chunk) // block))
        if self._taint is not None:
            for copy, key in zip(copies, keys, strict=False):
                self._taint.loaded(copy.block_ids, lossy=self._cache.lossy(key))
        held_end = max(start, min(end, (first + len(leases)) * chunk))
        lost = block_ids[held_end // block : -(-end // block)]
        moved = held_end - start
        job = self._jobs.new(
            tracked, copies, leases, load=True, required=external_tokens, moved=moved, lost=lost
        )
        tracked.loading = job.job
        tracked.blocks = block_ids  # they hold KV from now on: a reset must know
        self._next_meta.loads.append(job)

    def _forget(self, req_id: str) -> None:
        if not self._broken:
            self._cache.forget(req_id)

    def fail_load(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        """Makes the workers report every block of a promised load, so that vLLM computes them."""
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
            chunks = -(-tokens // chunk)
            self._metrics.count("hit_tokens", tokens, tier=tier)
            self._metrics.count("hit_chunks", chunks, tier=tier)
            hits += chunks
        self._metrics.count("miss_chunks", max(0, wanted // chunk - hits))

    def _sources(self, req_id: str, external_tokens: int) -> dict[str, int]:
        """Splits ``external_tokens`` by tier.

        Tokens that were not fetched for this request were in the pool.
        """
        sources: dict[str, int] = {}
        left = external_tokens
        origins = {} if self._broken else self._cache.origins(req_id)
        for tier, chunks in origins.items():
            sources[tier] = min(left, chunks * self._rules.chunk_tokens)
            left -= sources[tier]
        if left:
            sources[self._cache.place_tier] = left
        return {tier: tokens for tier, tokens in sources.items() if tokens}

    def hit_sources(self, request: Request) -> dict[str, int]:
        """Returns the tokens of the request's last load by tier."""
        tracked = self._tracked.get(request.request_id)
        return tracked.sources if tracked is not None else {}

    # --- a step -----------------------------------------------------------------------------------

    def build_meta(self, output: SchedulerOutput) -> StepMeta:
        """Returns a step's metadata: promised loads, and stores of the chunks that it completes."""
        if not self._broken:
            self._cache.poll()
            if self._taint is not None:
                self._taint.step(output, self._tracked)
            if self._stores:
                reserve = self._mounted >= self._ranks and not self._hung
                self._next_meta.stores += self._offers.step(output, self._tracked, reserve=reserve)
        self._note_requests_without_room(output)
        step = 0 if self._broken else self._times.began(output)
        # It comes last: the promises in it would be lost if anything raised after it.
        meta = self.reporting_meta(output)
        meta.step = step
        if not self._broken and self._mounted < self._ranks:
            meta.mount = self._mount
        return meta

    def _note_requests_without_room(self, output: SchedulerOutput) -> None:
        did_nothing = not output.total_num_scheduled_tokens and not self._jobs.busy()
        if self._last_answered is not None and did_nothing:
            self._without_room.add(self._last_answered)
        else:
            self._without_room.clear()
        self._last_answered = None

    def reporting_meta(self, output: SchedulerOutput) -> StepMeta:
        """Returns the metadata of a step that begins nothing new: promises and reports only."""
        meta = self._next_meta
        self._next_meta = StepMeta()
        meta.preempted = set(output.preempted_req_ids or ())
        meta.has_forward = output.total_num_scheduled_tokens > 0
        return meta

    # --- results ----------------------------------------------------------------------------------

    def update_from_workers(self, meta: WorkerMeta) -> None:
        """Takes the workers' reports, summed over ranks."""
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
        if meta.switched_off:
            self.disable("a worker has switched itself off")
        elif meta.errors and self._mounted < self._ranks:
            # Only the mapping can fail so early; it is not tried again.
            self.disable(meta.errors[0])
        for number, sent in self._jobs.ended(meta.jobs):
            self._end_job(number, sent)

    def _end_job(self, number: int, sent: SentJob) -> None:
        tracked = self._tracked.get(sent.req_id)
        if tracked is not None:
            tracked.stores.discard(number)
            failed_store = bool(sent.report.failed) and not sent.load
            if failed_store and not tracked.retried and self._cache.place_tier == "direct":
                # The device may be full: another chunk's place has room.
                tracked.retried = True
                tracked.advance(0)
            if tracked.loading == number:
                tracked.loading = None
                # A copy that failed may fail for ever; and vLLM counts such a request's blocks
                # twice when it asks for another asynchronous load, which can leave it and all
                # behind it waiting for good.
                if sent.report.failed or sent.lost:
                    tracked.load = False
        self._jobs.settle(sent, publish=not self._broken and self._holds(sent))

    def _holds(self, sent: SentJob) -> bool:
        """Whether an adapter's files are unchanged now that vLLM has computed with them.

        vLLM may load them when it computes, long after their digest was taken.
        """
        return sent.load or sent.adapter is None or self._adapters.digest(sent.adapter) is not None

    # --- ends -------------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: list[int]) -> bool:
        """Returns whether a copy still reads the blocks.

        Then vLLM keeps them until the workers report its end.
        """
        self._media.forget(request.request_id)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        self._forget(request.request_id)
        self._without_room.discard(request.request_id)
        if tracked.loading is not None:
            return False  # vLLM keeps the blocks itself until the workers report the load's end
        if self._rules.save_decode and tracked.blocks and not _aborted(request):
            self._offer_last(tracked, request, block_ids)
        if not tracked.stores:
            return False
        self._next_meta.finishing.append(request.request_id)
        return True

    def _offer_last(self, tracked: Tracked, request: Request, block_ids: list[int]) -> None:
        if self._broken or self._hung or self._mounted < self._ranks:
            return
        tracked.blocks = list(block_ids)
        # The last sampled token has no KV; with async scheduling the count may run ahead of the
        # known tokens.
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        self._next_meta.stores += self._offers.offer(tracked, computed)

    def busy(self) -> bool:
        """Returns whether an idle vLLM must step on, for work that is not past its deadline."""
        if self._mounted < self._ranks:
            return self._starting()
        return (not self._broken and self._cache.busy()) or self._jobs.busy()

    def reset(self) -> None:
        """Makes everything stored so far unfindable in every tier.

        Chunks in flight are never published.

        The weights may have changed, so a request that has computed something takes no further
        part.
        """
        self._resets += 1
        self._namespace = self._namespace.derive("reset", f"{self._clock.wall()!r}/{self._resets}")
        self._cache.reset()
        for req_id, tracked in self._tracked.items():
            self._cache.forget(req_id)
            fresh = not tracked.blocks and tracked.loading is None
            keeps_part = fresh and tracked.namespace is not None
            tracked.rekey(self._namespace_of(tracked.request) if keeps_part else None)

    def disable(self, why: str) -> None:
        """Switches kvstow off in this engine: every later query misses, and nothing more is stored.

        Loads that were promised and not sent are reported as lost, so that vLLM computes their
        blocks.
        """
        if self._broken:
            return
        self._broken = True
        logger.error(
            "kvstow is switched off in this engine, requests are computed as without it: %s", why
        )
        self._without_room.clear()
        for tracked in self._tracked.values():
            tracked.rekey(None)
        for job in self._next_meta.loads:
            job.lost = [block for copy in job.copies for block in copy.block_ids] + job.lost
            job.copies = []

    def take_stats(self) -> dict[str, Any] | None:
        """Returns the metrics' changes since the last call, or None if there are none."""
        self._cache.show()
        return self._metrics.take()

    def close(self) -> None:
        self._cache.close(timeout_s=CLOSE_TIMEOUT_S)


def _aborted(request: Request) -> bool:
    return request.status.name in ("FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED")
