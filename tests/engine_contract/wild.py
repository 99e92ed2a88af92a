"""One engine core under vLLM's own scheduler with everything at once: tiers that fail and hang, pipelines, drafts.

``Wild`` is a ``Driver`` whose steps overlap as vLLM's do (asynchronous scheduling, pipelines), with
speculative decoding, priorities, adapters, salts, images and embedded prompts, several lower tiers
and every setting of kvstow's that changes an order of events.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoRAConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from kvstow.backends.base import REJECTED, Buffer, Done, Outcome
from kvstow.backends.disk.admission import SecondSight
from kvstow.build import codec as build_codec
from kvstow.codec.shape import KVShape
from kvstow.errors import StoreRefused, StoreUnavailable
from kvstow.fetch.decide import EXPLORE_AFTER_S
from kvstow.key import ChunkKey
from kvstow.pool.policy.lru import LRU
from kvstow.pool.policy.s3fifo import S3FIFO
from kvstow.runtime import Work
from kvstow.testing.faults import Gate
from kvstow.testing.manual import ManualExecutor
from kvstow.testing.memory_store import MemoryStore
from kvstow.tiers import Tier, TierLimits
from tests.engine_contract.stack import SAVES_ON_EMPTY, Shape
from tests.engine_contract.vllm_scheduler import Driver
from tests.rigs.paced import PacedClock, PacedExecutor, PacedStore
from tests.rigs.sim_pages import mix
from tests.rigs.sim_worker import SimWorker

DRAFTS = 3
HUNG_AFTER_S = 0.5


class Capricious:
    """A store that evicts, admits on second sight perhaps, and does anything a store may do, by chance."""

    def __init__(self, rng: random.Random, chance: float, *, keys: int, second_sight: bool) -> None:
        self.inner = MemoryStore()
        self.chance = chance
        self._rng = rng
        self._keys = keys
        self._admit: Callable[[bytes], bool] = SecondSight() if second_sight else lambda _: True

    def _fault(self) -> None:
        if self._rng.random() < self.chance:
            raise self._rng.choice(
                (StoreUnavailable("chance"), StoreRefused("chance"), ValueError("chance"))
            )

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        self._fault()
        lies = self._rng.random() < self.chance  # what was there is evicted before it is read
        return [True] * len(keys) if lies else self.inner.contains(keys)

    def read(self, items: Sequence[tuple[ChunkKey, Buffer]]) -> list[Outcome]:
        self._fault()
        outcomes = self.inner.read(items)
        for i, (_, buffer) in enumerate(items):
            if isinstance(outcomes[i], Done) and self._rng.random() < self.chance:
                if self._rng.random() < 0.5:
                    outcomes[i] = Done(self._rng.randrange(len(buffer)))
                else:
                    buffer[self._rng.randrange(len(buffer))] ^= 0x10
        return outcomes

    def write(self, items: Sequence[tuple[ChunkKey, Sequence[Buffer]]]) -> list[Outcome]:
        self._fault()
        if not all(self._admit(bytes(key)[-8:]) for key, _ in items):
            return [REJECTED] * len(items)
        done = self.inner.write(items)
        held = list(self.inner._values)
        if len(held) > self._keys:
            self.inner.delete([self._rng.choice(held)])
        return done

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        self._fault()
        self.inner.delete(keys)

    def close(self) -> None:
        self.inner.close()


class HangingExecutor(ManualExecutor):
    """Work begins, and some of it hangs on a thread of its own until ``release``."""

    def __init__(self, clock: Any, rng: random.Random, chance: float) -> None:
        super().__init__(clock, run_in_wait=True)
        self._rng = rng
        self._chance = chance
        self._hung: list[tuple[Gate, threading.Thread, Work]] = []
        self.gate: Gate | None = None
        self.hung = 0

    def run(self, index: int) -> None:
        if self._rng.random() >= self._chance:
            super().run(index)
            return
        urgent = len(self._urgent)
        work = self._urgent.pop(index) if index < urgent else self._background.pop(index - urgent)
        gate = self.gate = Gate()
        thread = threading.Thread(target=work.run, daemon=True)
        thread.start()
        while thread.is_alive() and not gate.wait_arrived(timeout_s=0.01):
            pass
        self.gate = None
        self._hung.append((gate, thread, work))
        self.hung += 1

    def heal(self) -> None:
        """Nothing hangs any more."""
        self._chance = 0.0
        self.release(1.0)

    def release(self, chance: float) -> None:
        for one in [one for one in self._hung if self._rng.random() < chance]:
            self._hung.remove(one)
            gate, thread, work = one
            gate.release()
            thread.join()
            self._done.append(work)


class Gated:
    """Holds a call whose executor has told it to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.executor: Any = None

    def __getattr__(self, name: str) -> Any:
        method, executor = getattr(self.inner, name), self.executor

        def call(*arguments: Any) -> Any:
            gate = executor.gate
            if gate is not None:
                gate()
            return method(*arguments)

        return call


class WildWorker(SimWorker):
    """``truth``: what a request's prompt stands for, where its token ids do not say: images, embedded prompts, salts.
    Drafts that the scheduler does not know (-1) are those that this rank proposed."""

    truth: dict[str, list[int]]
    drafts: int = 0

    def _update_states(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            if new.prompt_token_ids is None:
                new.prompt_token_ids = [0] * len(new.prompt_embeds)
        super()._update_states(output)
        ids = [new.req_id for new in output.scheduled_new_reqs]
        for req_id in [*ids, *output.scheduled_cached_reqs.resumed_req_ids]:
            tokens = self.truth[req_id]
            self._sequences[req_id].tokens[: len(tokens)] = tokens

    def _forward(self, output: Any) -> dict[str, list[int]]:
        scheduled, cached = output.scheduled_spec_decode_tokens, output.scheduled_cached_reqs
        for req_id, drafts in scheduled.items():
            known = len(self._sequences[req_id].tokens)
            if -1 in drafts:
                scheduled[req_id] = self.propose(
                    req_id, len(drafts), random.Random(f"{req_id} {known}")
                )
        for i, req_id in enumerate(cached.req_ids):
            sequence = self._sequences[req_id]
            known = len(sequence.tokens) - 1
            if cached.num_computed_tokens[i] > known:  # vLLM counts on drafts that were refused
                cached.num_computed_tokens[i] = known
        return super()._forward(output)


@dataclass
class Settings:
    """What a seed decides, apart from the shape."""

    depth: int
    drafts: int
    policy: str
    priorities: bool
    adapters: int
    pages: str
    tiers: int
    tier_faults: float
    tier_hangs: float
    codec: bool
    paced: bool
    more: dict[str, Any] = field(default_factory=dict)


def random_settings(rng: random.Random, shape: Shape) -> Settings:
    learned = rng.random() < 0.4
    depth = 2 if shape.async_scheduling else rng.choice((1, 1, 2, 3))
    return Settings(
        depth=depth,
        drafts=rng.choice((0, 0, DRAFTS)) if shape.async_scheduling or depth == 1 else 0,
        policy=rng.choice(("lru", "s3fifo")),
        priorities=rng.random() < 0.5 and not shape.prefix_caching and SAVES_ON_EMPTY,
        adapters=rng.choice((0, 0, 2)),
        pages=rng.choice(("plain", "plain", "mixed")),
        tiers=rng.choice((0, 1, 2, 2, 3)),
        tier_faults=rng.choice((0.0, 0.0, 0.02, 0.1, 0.3)),
        tier_hangs=rng.choice((0.0, 0.0, 0.1)),
        codec=rng.random() < 0.3,
        paced=rng.random() < 0.5,
        more={
            "fetch_min_tokens": None if learned else rng.choice((0, 0, 48)),
            "fetch_deadline_s": None if learned else rng.choice((0.004, 0.05, 1.0)),
        },
    )


class Wild(Driver):
    """``adapters``: directories of adapters."""

    def __init__(
        self, shape: Shape, seed: int, settings: Settings, adapters: Sequence[str], **stack: Any
    ) -> None:
        self.rng = random.Random(seed + 1)
        self.settings = settings
        self.hanging: list[HangingExecutor] = []
        self.stores: list[Capricious] = []
        self.truth: dict[str, list[int]] = {}
        self.adapters = [LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(adapters)]
        policy = S3FIFO() if settings.policy == "s3fifo" else LRU()
        super().__init__(
            shape,
            seed,
            make_tiers=self._tiers,
            policy=policy,
            clock=PacedClock(),
            worker_of=self._worker,
            adapter_of=lambda lora: lora.lora_int_id,
            configure=self._configure,
            depth=settings.depth,
            **settings.more,
            **stack,
        )
        self.scheduler.max_num_encoder_input_tokens = 4096
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)

    def _configure(self, config: VllmConfig) -> None:
        settings = self.settings
        config.scheduler_config.policy = "priority" if settings.priorities else "fcfs"
        if settings.adapters:
            config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=2)
        if settings.drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=settings.drafts,
                prompt_lookup_max=2,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
            )
        if settings.depth > 1 and not config.scheduler_config.async_scheduling:
            config.parallel_config.pipeline_parallel_size = settings.depth

    def _worker(self, *arguments: Any, **options: Any) -> SimWorker:
        worker = WildWorker(*arguments, **options)
        worker.truth = self.truth
        return worker

    def _tiers(self, background: list[ManualExecutor], **needs: Any) -> list[Tier]:
        settings, rng = self.settings, self.rng
        tiers = []
        group = needs["layout"].groups[0]
        for i in range(settings.tiers):
            store: Any = Capricious(
                rng,
                settings.tier_faults * rng.choice((0, 1, 1)),
                keys=rng.choice((4, 40, 400)),
                second_sight=rng.random() < 0.2,
            )
            self.stores.append(store)
            executor: Any
            if settings.paced and i == settings.tiers - 1:
                store = PacedStore(
                    store,
                    fixed_s=rng.choice((0.0, 0.005, 0.1)),
                    byte_s=rng.choice((0.0, 1e-7)),
                    probe_s=rng.choice((0.0, 0.003)),
                )
                executor = PacedExecutor(needs["clock"], store, threads=rng.choice((1, 4)))
            else:
                store = Gated(store)
                executor = store.executor = HangingExecutor(
                    needs["clock"], rng, settings.tier_hangs
                )
                background.append(executor)
                self.hanging.append(executor)
            limits = TierLimits(
                hung_after_s=HUNG_AFTER_S,
                breaker_open_s=0.05,
                max_queued_writes=rng.choice((2, 8, 512)),
                max_read_bytes=group.frame_bytes * rng.choice((1, 3, 100)),
                read_batch_bytes=group.frame_bytes * rng.choice((1, 4)),
                known_keys=rng.choice((4, 1000)),
            )
            coder = None
            if settings.codec and rng.random() < 0.7:
                shapes = [[KVShape.unknown("float32", length) for length in group.payload_lengths]]
                coder = build_codec._coder("disk", "lossless", needs["layout"], shapes)
            tiers.append(Tier(f"t{i}", store, executor, limits=limits, coder=coder, **needs))
        return tiers

    # --- requests ---------------------------------------------------------------------------------

    def add_any(
        self, req_id: str, prompt: Sequence[int], max_tokens: int, options: dict[str, Any]
    ) -> Request:
        """A request of a random kind, the same for prompts that begin alike.

        ``truth`` is what each position of its
        prompt stands for."""
        rng, kwargs = random.Random(str(prompt[:4])), dict(options)
        truth = list(prompt)
        if self.settings.priorities:
            kwargs["priority"] = self.rng.randrange(3)
        if self.adapters and rng.random() < 0.5:
            kwargs["lora"] = rng.choice(self.adapters)
        if self.settings.pages == "mixed":
            kind = rng.random()
            if kind < 0.2:
                kwargs["salt"] = rng.choice(("a", "b"))
                truth[0] = mix(truth[0], ord(kwargs["salt"]))
            elif kind < 0.4 and len(prompt) > 40:
                image = rng.randrange(3)
                at, length = rng.randrange(len(prompt) - 30), rng.randint(1, 30)
                kwargs["mm_features"] = [
                    MultiModalFeatureSpec(
                        data=MultiModalKwargsItem(
                            {
                                "image": MultiModalFieldElem(
                                    data=torch.tensor([image]),
                                    field=MultiModalSharedField(batch_size=1),
                                )
                            }
                        ),
                        modality="image",
                        identifier=f"image{image}",
                        mm_position=PlaceholderRange(offset=at, length=length),
                    )
                ]
                prompt = [*prompt[:at], *[5] * length, *prompt[at + length :]]
                truth = [
                    *prompt[:at],
                    *(mix(image, i) for i in range(length)),
                    *prompt[at + length :],
                ]
            elif kind < 0.55:
                number = rng.randrange(3)
                values = [mix(number, i) & 0xFFFF for i in range(len(prompt))]
                kwargs["prompt_embeds"] = torch.tensor(values, dtype=torch.float32).reshape(-1, 1)
                truth, prompt = [0x10000 + v for v in values], None
        self.truth[req_id] = truth
        return self.add(req_id, prompt, max_tokens, **kwargs)

    def _note_tokens(self, req_id: str, tokens: Sequence[int]) -> None:
        worker, request, got = self.stack.workers[0], self.requests[req_id], self.outputs[req_id]
        adapter = worker.adapter_of(request.lora_request) if request.lora_request is not None else 0
        for token in tokens:
            expected = worker.expected_token([*self.truth[req_id], *got], adapter)
            assert token == expected, (
                f"{req_id}: output {len(got)} is {token}, without a cache it is {expected}"
            )
            got.append(token)

    # --- time -------------------------------------------------------------------------------------

    def _executed(self, output: Any) -> None:
        """What vLLM's core does after a step that it has waited for."""
        if self.settings.drafts and not self.shape.async_scheduling:
            worker = self.stack.workers[0]
            ids = [r for r in output.num_scheduled_tokens if r in worker._sequences]
            drafts = [
                worker.propose(r, self.rng.randint(0, self.settings.drafts), self.rng) for r in ids
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))

    def pause(self, mode: str) -> None:
        """``sleep`` in vLLM's words: ``abort`` or ``keep``."""
        if mode == "abort":
            for req_id in self.unfinished:
                self.abort(req_id)
        self.scheduler.set_pause_state(
            PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        )

    def resume(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def forget_the_pool(self) -> None:
        """Everything is evicted that can be; what lower tiers have stays there."""
        index = self.stack.cache.index
        for key in [key for key in index._resident if index._evictable(key)]:
            lease = index.pin(key)
            assert lease is not None
            index.drop(lease)
            lease.release()

    def release(self, chance: float) -> None:
        for executor in self.hanging:
            executor.release(chance)

    # --- ends -------------------------------------------------------------------------------------

    def settle(self, chance: float = 1.0) -> None:
        for executor in self.hanging:
            executor.heal()
        super().settle(chance)

    def check_idle(self) -> None:
        # Reads for a tier's estimate are given up then, at the next step.
        self.stack.clock.advance(EXPLORE_AFTER_S)
        self.stack.cache.poll()
        super().check_idle()
        engine = self.stack.cache
        assert engine.fetcher.flights == 0, "flights without owners"
        assert engine.fetcher.open_waits == 0
        assert not engine._writes
        assert not engine.index.reserved
        assert not engine.index._filling
        for number, tier in enumerate(engine._tiers):
            assert engine.fetcher.pending_bytes(number) == 0, "a tier's queue is miscounted"
            assert not tier._calls
            counts = (tier._read_bytes, tier._queued_bytes, tier._queued_writes)
            assert counts == (0, 0, 0), "a tier's bytes are miscounted"
            assert not tier._health.hung_calls
        self._check_counters()

    def _check_counters(self) -> None:
        stack = self.stack
        if (taken := stack.side.take_stats()) is not None:
            stack.note_stats(taken)
        gauges, histograms = stack.totals.get("gauges", {}), stack.totals.get("histograms", {})
        assert gauges.get("pool_leased_slots", 0) == 0, "a gauge says that slots are leased"
        used = (stack.pool.slots - stack.pool.free) * stack.pool.slot_bytes
        assert gauges.get("pool_used_bytes", 0) == used, "the pool's gauge is off"
        for series, value in gauges.items():
            assert not series.startswith("queued_bytes") or value == 0, (
                f"{series} is {value} when nothing is queued"
            )
        waits = sum(cell[1] for cell in histograms.get("wait_seconds", ()))
        assert waits == stack.counter("waits"), "waits that began and that ended"
        assert len(stack.cache.index) == stack.pool.slots - stack.pool.free


def make_adapters(folder: Path) -> list[str]:
    paths = []
    for i in range(2):
        path = folder / f"a{i}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps({"r": i}))
        paths.append(str(path))
    return paths
