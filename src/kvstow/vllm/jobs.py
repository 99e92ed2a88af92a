"""The copy jobs that were sent to the workers, and the leases that pin their places."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstow.cache import Cache
from kvstow.metrics import Metrics
from kvstow.pool.slots import Lease
from kvstow.runtime import Clock
from kvstow.vllm.metadata import Copy, Job, JobReport
from kvstow.vllm.requests import Tracked

logger = logging.getLogger("kvstow")

JOB_DEADLINE_S: Final = 60.0  # vLLM is kept stepping at most this long for a worker's answer


@dataclass(slots=True)
class SentJob:
    """A job that not all workers have acknowledged.

    ``leases[i]`` pins the place of copy ``i``. ``level`` is that of the job's line in the log.
    ``lost``: part of a load had no place any more, and the workers report its blocks. ``adapter``
    is the request's LoRA adapter as vLLM describes it.
    """

    req_id: str
    load: bool
    leases: list[Lease]
    required_tokens: int
    moved_tokens: int
    total_tokens: int
    since_s: float
    level: int
    lost: bool = False
    adapter: object | None = None
    report: JobReport = field(default_factory=lambda: JobReport(0, set(), 0, 0.0))


class Jobs:
    """Jobs by number, on the owner's thread only.

    A job has ended once all ``ranks`` ranks have reported it.
    """

    def __init__(
        self, cache: Cache, ranks: int, chunk_tokens: int, *, clock: Clock, metrics: Metrics
    ) -> None:
        self._cache = cache
        self._ranks = ranks
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._metrics = metrics
        self._sent: dict[int, SentJob] = {}
        self._next = 0

    def new(
        self,
        tracked: Tracked,
        copies: list[Copy],
        leases: list[Lease],
        *,
        load: bool,
        required: int,
        moved: int,
        lost: list[int] | None = None,
    ) -> Job:
        """Numbers a job of one request and keeps its leases.

        Args:
            tracked: The request.
            copies: What the workers copy.
            leases: Pins of the copies' places, in the same order.
            load: True to copy into device blocks, False to copy out of them.
            required: Tokens that vLLM was promised, or that are to be stored.
            moved: Tokens that the copies move.
            lost: Blocks of a load that no copy fills.
        """
        request = tracked.request
        job = Job(self._next, request.request_id, copies)
        self._next += 1
        job.lost = lost or []
        # Chunks of a request that decodes come one by one, several in every step of a busy engine:
        # no line for each.
        level = logging.DEBUG if request.num_output_tokens and not load else logging.INFO
        self._sent[job.job] = SentJob(
            job.req_id,
            load,
            leases,
            required,
            moved,
            request.num_tokens,
            self._clock.monotonic(),
            level,
            bool(lost),
            request.lora_request,
        )
        return job

    def ended(self, reports: Mapping[int, JobReport]) -> Iterator[tuple[int, SentJob]]:
        """Adds the workers' reports and yields each job that has ended by them, with its number."""
        for number, report in reports.items():
            sent = self._sent.get(number)
            if sent is None:
                continue
            sent.report.merge(report)
            if sent.report.ranks >= self._ranks:
                del self._sent[number]
                yield number, sent

    def settle(self, sent: SentJob, *, publish: bool) -> None:
        """Releases every place of an ended job, counts and logs it.

        ``publish``: commits stored chunks first.
        """
        report = sent.report
        tier = self._cache.place_tier
        for index, lease in enumerate(sent.leases):
            if index in report.failed:
                self._cache.failed(lease)
            elif publish and not sent.load:
                self._cache.commit(lease)
            lease.release()
        failed = len(report.failed)
        done = len(sent.leases) - failed
        verb = "load" if sent.load else "store"
        if failed:
            self._metrics.count("failed_chunks", failed, tier=tier, reason=f"{verb}_copy")
        if done:
            self._metrics.count("loaded_chunks" if sent.load else "stored_chunks", done, tier=tier)
            self._metrics.count(
                "loaded_bytes" if sent.load else "stored_bytes", report.moved_bytes, tier=tier
            )
            self._metrics.observe(f"{verb}_seconds", report.seconds, tier=tier)
        self._log(sent, done)

    def _log(self, sent: SentJob, done: int) -> None:
        if not logger.isEnabledFor(sent.level):
            return
        report = sent.report
        moved = sent.moved_tokens if done == len(sent.leases) else done * self._chunk_tokens
        rate = report.moved_bytes / report.seconds / 1e9 if report.seconds > 0 else 0.0
        if sent.load:
            what = (
                f"Retrieved {moved} out of {sent.required_tokens} required tokens "
                f"(from {sent.total_tokens} total tokens)"
            )
        else:
            what = f"Stored {moved} out of {sent.total_tokens} total tokens"
        logger.log(
            sent.level,
            "%s, size: %.2f MB, cost %.1f ms, throughput: %.2f GB/s, request %s",
            what,
            report.moved_bytes / 1e6,
            report.seconds * 1e3,
            rate,
            sent.req_id,
        )

    def busy(self) -> bool:
        """Returns whether an answer is outstanding and not past its deadline."""
        now = self._clock.monotonic()
        return any(now - sent.since_s < JOB_DEADLINE_S for sent in self._sent.values())
