"""The connector in a vLLM worker process. It copies between pages and places.

The worker's thread is the one that calls it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from kvstow.device.base import Device, Finished, KVCache, KVSpec, Transfer
from kvstow.direct.geometry import DirectRef
from kvstow.errors import CopyError, KVStowError
from kvstow.layout import GroupPages
from kvstow.pool.pool import map_pool
from kvstow.runtime import Clock, SystemClock
from kvstow.vllm.direct import DirectDevice, open_direct
from kvstow.vllm.metadata import Handshake, Job, JobReport, Mount, StepMeta, WorkerMeta

logger = logging.getLogger("kvstow")

# Errors that a worker logs and reports in this window: a device that fails does it in every step.
MAX_ERRORS: Final = 8
ERRORS_WINDOW_S: Final = 60.0


@dataclass(slots=True)
class _OpenJob:
    job: Job
    load: bool


class WorkerSide:
    """Copies what the scheduler's side has decided.

    Args:
        make_device: Returns the device for a torch device type such as "cpu".
        specs: Per KV cache group, each layer's specification.
        rank: ``(pp_rank, tp_rank)``.
        shard: Names the distinct bytes that this rank holds.
        host: The boot id.
        backends: Names of the attention backends.
        clock: None means the system's.
    """

    def __init__(
        self,
        make_device: Callable[[str], Device],
        specs: list[dict[str, KVSpec]],
        rank: tuple[int, int],
        shard: tuple[int, int],
        host: str,
        backends: str,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._errors_at_s = deque[float](maxlen=MAX_ERRORS)
        self._make_device = make_device
        self._specs = specs
        self._rank = rank
        self._shard = shard
        self._host = host
        self._backends = backends
        self._device: Device | None = None
        self._hung = False
        self._released = False  # vLLM sleeps, and the memory of the KV caches is gone
        self._switched_off = ""  # why
        self._kv_device = torch.device("cpu")
        self._groups: tuple[GroupPages, ...] = ()
        self._mounted = False
        self._mount_failed = False
        self._writes = False
        self._stores_submitted = True
        self._open: dict[int, _OpenJob] = {}
        self._storing: dict[str, set[int]] = {}  # store jobs that have not ended, by request
        self._finishing: set[str] = set()
        self._received: set[str] = set()
        self._lost_blocks: set[int] = set()
        self._report = WorkerMeta()

    @property
    def device(self) -> Device | None:
        """The device; None before caches are registered."""
        return self._device

    def register_kv_caches(self, kv_caches: Mapping[str, KVCache]) -> None:
        """Recognises the engine's pages. Raises ``UnsupportedError`` for an unknown layout."""
        if self._device is None:
            first = next(iter(kv_caches.values()))
            tensor = first if isinstance(first, torch.Tensor) else first[0]
            self._kv_device = tensor.device
            self._device = self._make_device(tensor.device.type)
        self._groups = self._device.attach(kv_caches, self._specs)

    def handshake(self) -> Handshake:
        """Returns this rank's answer to the scheduler's handshake."""
        return Handshake(self._groups, self._shard, self._host, self._backends)

    def unregister_kv_caches(self) -> None:
        """Waits for the copies that use the KV caches, whose memory vLLM releases next.

        Later copies fail. Idempotent.

        vLLM has finished or aborted every request, but copies of their chunks may still run.
        """
        if self._released:
            return
        self._released = True
        if self._device is not None:
            try:
                self._device.fence(list(self._open))
            except CopyError as error:
                self._report_error(f"copies when vLLM went to sleep: {error}")
            if self._kv_device.type == "cuda":
                torch.cuda.synchronize(self._kv_device)  # a fence there only orders streams

    def restore_kv_caches(self) -> None:
        """Allows copies again: vLLM has mapped the KV caches' memory anew, at the same addresses.

        Idempotent.
        """
        self._released = False

    def disable(self, why: str) -> None:
        """Switches this rank off: every job that runs or comes later is reported as failed.

        Call ``close_device`` first, so that no copy runs any more.
        """
        if self._switched_off:
            return
        self._switched_off = why
        self._report.switched_off = True
        self._report_error(f"rank {self._rank} is switched off: {why}")
        for opened in list(self._open.values()):
            self._fail(opened.job, why)

    def close_device(self) -> None:
        """Closes the device, which waits for its copies within a bound, and takes their ends."""
        if self._device is not None:
            self._device.close()
            for finished in self._device.finished():
                self._end(finished)

    # --- a step, in vLLM's order ------------------------------------------------------------------

    def handle_preemptions(self, meta: StepMeta) -> None:
        """Fences copies of preempted requests: the forward pass may overwrite their blocks."""
        fenced = [job for req_id in meta.preempted for job in self._storing.get(req_id, ())]
        if fenced and self._device is not None:
            try:
                self._device.fence(fenced)
            except (
                CopyError
            ) as error:  # the device gives these copies up and reports them as failed
                self._report_error(f"stores of preempted requests: {error}")

    def bind(self, meta: StepMeta) -> None:
        """Takes a new step's metadata and maps the places once they are announced."""
        self._stores_submitted = False
        self._report.step = meta.step
        self._finishing.update(meta.finishing)
        # From now on: with speculative decoding vLLM takes the step's ends before it saves.
        for job in meta.stores:
            self._storing.setdefault(job.req_id, set()).add(job.job)
        if meta.mount is not None and not self._mounted and not self._mount_failed:
            self._mount(meta.mount)

    def _mount(self, mount: Mount) -> None:
        assert self._device is not None
        direct = isinstance(mount.places, DirectRef)
        try:
            if isinstance(mount.places, DirectRef):
                self._device = open_direct(
                    self._device, mount.places, mount.shards[self._rank], self._kv_device
                )
            else:
                self._device.map_pool(map_pool(mount.places), mount.shards[self._rank])
        except (KVStowError, OSError) as error:
            self._mount_failed = True
            what = "open direct storage" if direct else "map the host pool"
            self._report_error(
                f"rank {self._rank} cannot {what}, so nothing will be stored or restored: {error}"
            )
            return
        self._writes = self._rank in mount.writers
        self._mounted = True
        self._report.mounted += 1

    def submit_loads(self, meta: StepMeta) -> None:
        """Starts this step's loads. A job that has begun is not started again."""
        for job in meta.loads:
            self._start(job, load=True)

    def submit_stores(self, meta: StepMeta) -> None:
        """Starts this step's stores, after its forward pass. Calls after the first do nothing."""
        if self._stores_submitted:
            return
        self._stores_submitted = True
        for job in meta.stores:
            self._start(job, load=False)

    def _start(self, job: Job, *, load: bool) -> None:
        if job.job in self._open or job.job in self._report.jobs:
            return
        self._open[job.job] = _OpenJob(job, load)
        transfers = [Transfer(copy.place, copy.block_ids, copy.first_block) for copy in job.copies]
        device = self._device
        if self._switched_off:
            self._fail(job, self._switched_off)
        elif not transfers or (self._mounted and not load and not self._writes):
            self._end(Finished(job.job, (), None, 0, 0.0))
        elif device is None or not self._mounted:
            self._fail(job, "the host pool is not mapped")
        elif self._released:
            self._fail(job, "vLLM sleeps")
        elif load:
            device.copy_in(job.job, transfers)
        else:
            device.copy_out(job.job, transfers)

    # --- ends -------------------------------------------------------------------------------------

    def _fail(self, job: Job, why: str) -> None:
        self._end(Finished(job.job, tuple(range(len(job.copies))), why, 0, 0.0))

    def _end(self, finished: Finished) -> None:
        opened = self._open.pop(finished.ticket, None)
        if opened is None:
            return
        job = opened.job
        self._report.jobs[job.job] = JobReport(
            1, set(finished.failed), finished.moved_bytes, finished.seconds
        )
        if finished.error is not None and finished.error != self._switched_off:
            verb = "load" if opened.load else "store"
            self._report_error(f"{verb} of request {job.req_id}: {finished.error}")
        if opened.load:
            self._received.add(job.req_id)
            if finished.failed:
                # A prefix ends at its first hole: vLLM uses nothing behind it, so all of that is
                # reported.
                for copy in job.copies[min(finished.failed) :]:
                    self._lost_blocks.update(copy.block_ids)
            self._lost_blocks.update(job.lost)
            return
        jobs = self._storing.get(job.req_id, set())
        jobs.discard(job.job)
        if not jobs:
            self._storing.pop(job.req_id, None)

    def _report_error(self, error: str) -> None:
        now = self._clock.monotonic()
        few = len(self._errors_at_s) < MAX_ERRORS
        if few or now - self._errors_at_s[0] >= ERRORS_WINDOW_S:
            self._errors_at_s.append(now)
            logger.error("%s", error)
            self._report.errors.append(error)

    def poll(self) -> None:
        """Takes the ends of copies from the device."""
        if self._switched_off:
            return
        if self._device is not None:
            for finished in self._device.finished():
                self._end(finished)
        if isinstance(self._device, DirectDevice) and self._device.hung is not self._hung:
            self._hung = self._report.hung[self._rank] = self._device.hung

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests that finished sending, and receiving, each once."""
        self.poll()
        sent = {req_id for req_id in self._finishing if req_id not in self._storing}
        self._finishing -= sent
        received, self._received = self._received, set()
        return sent or None, received or None

    def take_lost_blocks(self) -> set[int]:
        """Returns the device blocks whose load failed, each once."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_report(self) -> WorkerMeta | None:
        """Returns the report to the scheduler's side, or None when there is nothing to report."""
        report = self._report
        if report == WorkerMeta():
            return None
        self._report = WorkerMeta()
        return report

    def close(self) -> None:
        """Closes the device after its copies have ended."""
        if self._device is not None:
            self._device.close()
