"""The connector in a vLLM worker process: copies between pages and places, and reports their ends.

One thread, the worker's, calls everything here.
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
from kvstow.vllm.metadata import Hello, Job, JobReport, Mount, StepMeta, WorkerMeta

logger = logging.getLogger("kvstow")

MAX_ERRORS: Final = 8  # that a worker says, to the log and to the scheduler, ...
ERRORS_WINDOW_S: Final = 60.0  # ... in so long: a device that fails does it in every step


@dataclass(slots=True)
class _Open:
    job: Job
    load: bool


class WorkerSide:
    """``rank`` is ``(pp_rank, tp_rank)``; ``make_device`` gives the device for a torch device type such as "cpu"."""

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
        self._said = deque[float](maxlen=MAX_ERRORS)  # when
        self._make_device = make_device
        self._specs = specs
        self._rank = rank
        self._shard = shard
        self._host = host
        self._backends = backends
        self._device: Device | None = None
        self._hung = False
        self._kv_device = torch.device("cpu")
        self._groups: tuple[GroupPages, ...] = ()
        self._mounted = False
        self._mount_failed = False
        self._writes = False
        self._stores_submitted = True
        self._open: dict[int, _Open] = {}
        self._storing: dict[str, set[int]] = {}  # request to its store jobs that have not ended
        self._finishing: set[str] = set()
        self._received: set[str] = set()
        self._lost_blocks: set[int] = set()
        self._report = WorkerMeta()

    @property
    def device(self) -> Device | None:
        """The device, once caches are registered."""
        return self._device

    def register_kv_caches(self, kv_caches: Mapping[str, KVCache]) -> None:
        """Recognise the engine's pages. Raises ``UnsupportedError`` for a layout that is not known."""
        if self._device is None:
            first = next(iter(kv_caches.values()))
            tensor = first if isinstance(first, torch.Tensor) else first[0]
            self._kv_device = tensor.device
            self._device = self._make_device(tensor.device.type)
        self._groups = self._device.attach(kv_caches, self._specs)

    def hello(self) -> Hello:
        """This rank's answer to the scheduler's handshake."""
        return Hello(self._groups, self._shard, self._host, self._backends)

    # --- a step, in vLLM's order -----------------------------------------------------------------------------------

    def handle_preemptions(self, meta: StepMeta) -> None:
        """Before the forward: blocks of preempted requests may be overwritten by it, so their copies must be out."""
        fenced = [job for req_id in meta.preempted for job in self._storing.get(req_id, ())]
        if fenced and self._device is not None:
            try:
                self._device.fence(fenced)
            except (
                CopyError
            ) as error:  # what they copy is given up, and reported as failed when they end
                self._say(f"stores of preempted requests: {error}")

    def bind(self, meta: StepMeta) -> None:
        """A new step's metadata."""
        self._stores_submitted = False
        self._report.step = meta.step
        self._finishing.update(meta.finishing)
        for job in (
            meta.stores
        ):  # from now on: with speculative decoding vLLM takes the step's ends before it saves
            self._storing.setdefault(job.req_id, set()).add(job.job)
        if meta.mount is not None and not self._mounted and not self._mount_failed:
            self._mount(meta.mount)

    def _mount(self, mount: Mount) -> None:
        assert self._device is not None
        try:
            if isinstance(mount.pool, DirectRef):
                self._device = open_direct(
                    self._device, mount.pool, mount.shards[self._rank], self._kv_device
                )
            else:
                self._device.map_pool(map_pool(mount.pool), mount.shards[self._rank])
        except (KVStowError, OSError) as error:
            self._mount_failed = True
            what = (
                "open direct storage" if isinstance(mount.pool, DirectRef) else "map the host pool"
            )
            self._say(
                f"rank {self._rank} cannot {what}, so nothing will be stored or restored: {error}"
            )
            return
        self._writes = self._rank in mount.writers
        self._mounted = True
        self._report.mounted += 1

    def submit_loads(self, meta: StepMeta) -> None:
        """Start this step's loads. Called once a step."""
        for job in meta.loads:
            self._start(job, load=True)

    def submit_stores(self, meta: StepMeta) -> None:
        """Start this step's stores, after its forward. Calls after the first do nothing."""
        if self._stores_submitted:
            return
        self._stores_submitted = True
        for job in meta.stores:
            self._start(job, load=False)

    def _start(self, job: Job, *, load: bool) -> None:
        self._open[job.job] = _Open(job, load)
        transfers = [Transfer(copy.place, copy.block_ids, copy.first_block) for copy in job.copies]
        device = self._device
        if not transfers or (self._mounted and not load and not self._writes):
            self._end(Finished(job.job, (), None, 0, 0.0))
        elif device is None or not self._mounted:
            self._end(
                Finished(
                    job.job, tuple(range(len(transfers))), "the host pool is not mapped", 0, 0.0
                )
            )
        elif load:
            device.copy_in(job.job, transfers)
        else:
            device.copy_out(job.job, transfers)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _end(self, finished: Finished) -> None:
        opened = self._open.pop(finished.ticket, None)
        if opened is None:
            return
        job = opened.job
        self._report.jobs[job.job] = JobReport(
            1, set(finished.failed), finished.moved_bytes, finished.seconds
        )
        if finished.error is not None:
            self._say(
                f"{'load' if opened.load else 'store'} of request {job.req_id}: {finished.error}"
            )
        if opened.load:
            self._received.add(job.req_id)
            if finished.failed:
                # A prefix ends at its first hole: what follows is not used, so all of it is reported.
                for copy in job.copies[min(finished.failed) :]:
                    self._lost_blocks.update(copy.block_ids)
            self._lost_blocks.update(job.lost)
            return
        jobs = self._storing[job.req_id]
        jobs.discard(job.job)
        if not jobs:
            del self._storing[job.req_id]

    def _say(self, error: str) -> None:
        now = self._clock.monotonic()
        if len(self._said) < MAX_ERRORS or now - self._said[0] >= ERRORS_WINDOW_S:
            self._said.append(now)
            logger.error("%s", error)
            self._report.errors.append(error)

    def poll(self) -> None:
        """Take the ends of copies from the device."""
        if self._device is not None:
            for finished in self._device.finished():
                self._end(finished)
        if isinstance(self._device, DirectDevice) and self._device.hung is not self._hung:
            self._hung = self._report.hung[self._rank] = self._device.hung

    def take_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Requests that finished sending and receiving, each once: vLLM frees or starts them."""
        self.poll()
        sent = {req_id for req_id in self._finishing if req_id not in self._storing}
        self._finishing -= sent
        received, self._received = self._received, set()
        return sent or None, received or None

    def take_lost_blocks(self) -> set[int]:
        """Device blocks whose load failed, once."""
        lost, self._lost_blocks = self._lost_blocks, set()
        return lost

    def take_report(self) -> WorkerMeta | None:
        """What the scheduler must hear; None when there is nothing."""
        report = self._report
        if not any((report.jobs, report.mounted, report.hung, report.errors, report.step)):
            return None
        self._report = WorkerMeta()
        return report

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
