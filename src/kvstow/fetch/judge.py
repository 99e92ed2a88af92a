"""Which fetches are worth their wait, by what is on its way from each tier and what the engine has learned.

Owner's thread only; waits for nothing. ``Costs`` has the arithmetic; what is known here is the time, and the queues.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from kvstow.fetch.wait import Flight, Question, Queue, Read, Wait
from kvstow.metrics import Metrics
from kvstow.runtime import Clock
from kvstow.tiers.base import Call, Costs, Lower

logger = logging.getLogger("kvstow")

KEEP_S: Final = 0.2  # what was fetched stays pinned so long for a request that vLLM has no room for
COLD_LIMIT_S: Final = (
    2.0  # longest wait while it isn't known how fast this engine computes; only ever the first few
)
EXPLORE_EVERY: Final = 16  # decisions against a tier between two reads that nobody waits for
EXPLORE_AFTER_S: Final = 5.0  # or so long after its last read
EXPLORE_CHUNKS: Final = (
    4  # at most; every second time one, so that what is fixed can be told from what grows
)
EXPLORE_LIMIT_S: Final = 10.0  # such a read is forgotten then, if it hasn't come


class Judge:
    """``sizes``: bytes of a chunk, by group. ``deadline_s``: a fixed bound on an owner's wait; None: learned."""

    def __init__(
        self,
        tiers: Sequence[Lower],
        costs: Costs,
        sizes: Sequence[int],
        *,
        clock: Clock,
        metrics: Metrics,
        deadline_s: float | None,
    ) -> None:
        self._tiers = tiers
        self._costs = costs
        self._sizes = sizes
        self._clock = clock
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._queues = [Queue() for _ in tiers]

    # --- what moves ---------------------------------------------------------------------------------------------------

    def promise(self, flight: Flight) -> None:
        if not flight.promised:
            flight.promised = True
            self._queues[flight.tier].promised += self._sizes[flight.key.group]

    def unpromise(self, flight: Flight) -> None:
        if flight.promised:
            flight.promised = False
            self._queues[flight.tier].promised -= self._sizes[flight.key.group]

    def submitted(self, tier: int, read: Read) -> None:
        queue = self._queues[tier]
        read.size = sum(self._sizes[flight.key.group] for flight in read.flights)
        queue.reading += read.size
        read.behind, read.since_s = queue.reading, self._clock.monotonic()
        queue.reads[read] = None

    def gone(self, tier: int, read: Read) -> None:
        """It was cancelled before it began, or refused."""
        queue = self._queues[tier]
        if queue.reads.pop(read, 0) is None:
            queue.reading -= read.size

    def ended(self, tier: int, read: Read, *, whole: bool) -> None:
        """A read has ended. One that brought nothing says only that the tier is no faster than this."""
        queue, now = self._queues[tier], self._clock.monotonic()
        self.gone(tier, read)
        queue.heard_s, queue.passed_over = now, 0
        took_s, line = self._ended_s(read.call) - read.since_s, self._costs.reads[tier]
        if whole or took_s > line.seconds(read.behind):
            line.observe(read.behind, took_s)
            name = self._tiers[tier].name
            self._metrics.gauge("load_fixed_seconds", line.fixed_s, tier=name)
            self._metrics.gauge("load_seconds_per_byte", line.each_s, tier=name)

    def answered(self, tier: int, question: Question) -> None:
        self._costs.probes[tier].observe(self._ended_s(question.call) - question.since_s)

    def _ended_s(self, call: Call | None) -> float:
        """Of a call that has ended. Its owner hears of it a step later, which is no fault of the tier's."""
        return (
            call.ended_s
            if call is not None and call.ended_s is not None
            else self._clock.monotonic()
        )

    # --- what to expect -----------------------------------------------------------------------------------------------

    def _late_s(self, tier: int, now_s: float) -> float:
        """How far the oldest read is behind what was expected of it: so is everything after it."""
        read = next(iter(self._queues[tier].reads), None)
        return (
            0.0
            if read is None
            else max(0.0, now_s - read.since_s - self._costs.reads[tier].seconds(read.behind))
        )

    def pace_s(self, tier: int, group: int) -> tuple[float | None, float]:
        """Until what is wanted of this tier already were here (None: nobody knows), and for each chunk more."""
        queue, line = self._queues[tier], self._costs.reads[tier]
        load_s = self._costs.load_s(tier, queue.reading + queue.promised)
        late_s = self._late_s(tier, self._clock.monotonic())
        return None if load_s is None else load_s + late_s, line.each_s * self._sizes[group]

    def due_s(self, tier: int, read: Read) -> float | None:
        """Until ``read`` ends. When it should have ended long ago: as long again."""
        load_s = self._costs.load_s(tier, read.behind)
        return None if load_s is None else abs(read.since_s + load_s - self._clock.monotonic())

    def stirred(self, since_s: float) -> bool:
        """Whether anything has come from any tier since."""
        return any(queue.heard_s > since_s for queue in self._queues)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def worth_asking(self, tier: int, chunks: int, group: int, gained: int) -> bool:
        """Whether ``chunks`` that would bring ``gained`` are worth a question to this tier."""
        queue = self._queues[tier]
        size = queue.reading + queue.promised + chunks * self._sizes[group]
        if self._costs.worth(tier, size, gained):
            return True
        self._pass_over(tier, "short")
        return False

    def plan(self, wait: Wait, first: Flight, ready_s: Sequence[float | None]) -> int:
        """How many chunks of a run to wait for; ``first``: of what it is to be decided on. Counted and logged."""
        tier, chunks = first.tier, self._costs.plan(ready_s, had=sum(wait.origins.values()))
        name = self._tiers[tier].name
        if chunks == 0:
            self._pass_over(tier, "recompute")
        else:
            unknown = self._costs.prefill_s is None or None in ready_s
            decision = "cold" if unknown else "load" if chunks == len(ready_s) else "part"
            self._metrics.count("fetch_decisions", tier=name, decision=decision)
        if logger.isEnabledFor(logging.DEBUG):
            queue = self._queues[tier]
            pays = self._costs.pays_from(
                tier, self._sizes[first.key.group], queue.reading + queue.promised
            )
            had = f"had {len(ready_s)} chunks, loading pays from {'no number' if pays is None else pays}"
            logger.debug("Request %s: tier %s %s; %d are loaded", wait.owner, name, had, chunks)
        return chunks

    def still(self, ready_s: Sequence[float | None]) -> int:
        """How many chunks of a run are still worth waiting for."""
        chunks = self._costs.plan(ready_s, going_on=True)
        self._metrics.count("fetch_extensions", int(chunks > 0))
        return chunks

    def _pass_over(self, tier: int, decision: str) -> None:
        self._queues[tier].passed_over += self._costs.learned
        self._metrics.count("fetch_decisions", tier=self._tiers[tier].name, decision=decision)

    def begin(self, wait: Wait, gained: int) -> None:
        """Set a new owner's patience and its limit; ``gained``: chunks, at most."""
        if self._deadline_s is not None:
            wait.deadline_s = wait.limit_s = wait.began_s + self._deadline_s
            return
        compute_s = self._costs.compute_s(gained)
        wait.limit_s = wait.began_s + (COLD_LIMIT_S if compute_s is None else compute_s)
        wait.worth_s = compute_s
        probes = [
            probe
            for tier, probe in zip(self._tiers, self._costs.probes, strict=True)
            if tier.usable
        ]
        known = all(probe.known for probe in probes)
        self._renew(wait, max((probe.seconds for probe in probes), default=0.0) if known else None)

    def renew(self, wait: Wait, ready_s: Sequence[float | None]) -> None:
        """It is worth waiting for this run: until the next chunk should have come."""
        next_s = next((each for each in ready_s if each != 0.0), 0.0)
        self._renew(wait, next_s)

    def _renew(self, wait: Wait, next_s: float | None) -> None:
        wait.looked_s = now = self._clock.monotonic()
        if self._deadline_s is None:
            wait.deadline_s = min(wait.limit_s, now + self._costs.patience_s(next_s, wait.worth_s))

    def keep(self, wait: Wait) -> None:
        """Everything has come: it stays pinned a little, until vLLM has room for the request."""
        if self._deadline_s is None:
            wait.deadline_s = max(wait.deadline_s, self._clock.monotonic() + KEEP_S)

    # --- exploring ----------------------------------------------------------------------------------------------------

    def due_to_explore(self) -> int | None:
        """A tier whose estimate has been against it for so long that it must be looked at again."""
        now = self._clock.monotonic()
        for tier, queue in enumerate(self._queues):
            if queue.explorer is not None and queue.explorer.over:
                queue.explorer = None
            if not queue.passed_over or queue.explorer is not None or not self._tiers[tier].usable:
                continue
            if queue.passed_over >= EXPLORE_EVERY or now - queue.heard_s > EXPLORE_AFTER_S:
                return tier
        return None

    def explores(self, tier: int) -> int:
        """How many chunks to read of it."""
        return EXPLORE_CHUNKS if self._queues[tier].explored % 2 else 1

    def explore(self, tier: int, wait: Wait) -> None:
        """``wait`` reads of ``tier``, and nobody waits for it."""
        wait.explores = tier
        wait.deadline_s = wait.limit_s = wait.began_s + EXPLORE_LIMIT_S
        self._queues[tier].explorer = wait
        self._queues[tier].explored += 1
        self._metrics.count("fetch_decisions", tier=self._tiers[tier].name, decision="explore")

    def reset(self) -> None:
        for queue in self._queues:
            queue.promised = 0
