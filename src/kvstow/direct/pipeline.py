"""A worker's transfers: pages to extents and back through a bounded number of staging areas.

    store   waits for an area ─> pages to area ─> area to extent ─> done
    load    waits for an area ─> extent to area, checked ─> area to pages ─> done

Chunks start one by one as areas become free, so a prompt may be larger than the staging memory.
While one chunk is on NVMe the next one is copied.

A chunk on NVMe for more than ``HUNG_S`` fails, and NVMe counts as hung. Its staging area stays
reserved until the call returns. While NVMe is hung every transfer fails at once; only a trial,
which reads the extent that hung and which no request waits for, is sent to it. An answered trial
ends that state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kvstow.direct.base import Extent, Media
from kvstow.errors import CopyError, FrameError
from kvstow.runtime import Clock, Executor

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
DRAIN_TIMEOUT_S: Final = 30.0  # gigabytes at the speed of a slow disk
HUNG_S: Final = 30.0  # one chunk on NVMe, or no transfer that ends while others wait
BACKGROUND_PAUSE_S: Final = 10.0  # between trials of hung NVMe, and between scrubs
_ANSWERS: Final = (OSError, CopyError, FrameError)  # NVMe answered, with an error


class CopyEnd(NamedTuple):
    """The end of a copy between pages and an area. ``error`` is None when it succeeded."""

    ticket: int
    error: str | None
    moved_bytes: int


class PageCopier(Protocol[T_contra]):
    """Copies between pages and staging areas: the part of a device that a pipeline needs."""

    def start(self, ticket: int, item: T_contra, area: int, *, load: bool, length: int) -> None:
        """Starts a copy of ``length`` payload bytes."""
        ...

    def ended(self) -> Iterable[CopyEnd]:
        """Returns the copies that ended since the last call, each once."""
        ...

    def fence(self, tickets: Sequence[int]) -> None:
        """Orders these copies against later work, like ``Device.fence``. Raises ``CopyError``."""
        ...


class JobEnd(NamedTuple):
    """The end of a job.

    ``failed`` has the indices of its failed items; ``io_failed`` counts those that failed on NVMe.
    """

    ticket: int
    load: bool
    failed: tuple[int, ...]
    io_failed: int
    error: str | None
    moved_bytes: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    ticket: int
    load: bool
    left: int
    began_s: float
    failed: dict[int, str] = field(default_factory=dict)
    io_failed: int = 0
    moved_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Item(Generic[T]):
    job: _Job
    index: int
    item: T
    extent: Extent
    area: int = -1
    began_s: float | None = None  # when its call began; written by the call's thread


class Pipeline(Generic[T]):
    """Runs jobs of transfers. Owner's thread only; only ``fence``, ``drain`` and ``close`` wait.

    ``executor`` runs the media's calls and is closed with this object. A quarter of the areas is
    reserved for loads, since requests wait for them.
    """

    def __init__(
        self, media: Media, copier: PageCopier[T], executor: Executor, clock: Clock
    ) -> None:
        self._media = media
        self._copier = copier
        self._executor = executor
        self._clock = clock
        self._areas = list(range(media.areas))
        self._kept_for_loads = min(media.areas // 4, media.areas - 1)
        self._loads: deque[_Item[T]] = deque()
        self._stores: deque[_Item[T]] = deque()
        self._copying: dict[int, _Item[T]] = {}  # by the copier's ticket
        self._moving: set[_Item[T]] = set()  # on the executor, and not failed yet
        self._progress_s = clock.monotonic()
        self._hung: Extent | None = None
        self._background_running = False  # whether a trial or a scrub is under way
        self._next_background_s = self._progress_s + BACKGROUND_PAUSE_S  # not sooner
        self._next = 0
        self._jobs: dict[int, _Job] = {}
        self._ended: list[JobEnd] = []
        self._closed = False

    @property
    def hung(self) -> bool:
        """Whether NVMe has stopped answering."""
        return self._hung is not None

    def submit(self, ticket: int, items: Sequence[tuple[T, Extent]], *, load: bool) -> None:
        """Starts a job of at least one item."""
        job = self._jobs[ticket] = _Job(ticket, load, len(items), self._clock.monotonic())
        queue = self._loads if load else self._stores
        queue.extend(_Item(job, index, item, extent) for index, (item, extent) in enumerate(items))
        self._fill()

    def ended(self) -> list[JobEnd]:
        """Advances every transfer. Returns the jobs that ended since the last call, each once."""
        self._advance()
        ended, self._ended = self._ended, []
        return ended

    def fence(self, tickets: Sequence[int]) -> None:
        """Ends these jobs' use of pages.

        Stores that have not begun to copy pages fail; copies in progress are waited for, NVMe is
        not. Raises ``CopyError`` when the copier does.
        """
        wanted = set(tickets)
        for item in [item for item in self._stores if item.job.ticket in wanted]:
            self._stores.remove(item)
            self._end(item, "given up: its pages were needed before staging had room")
        copying = [number for number, item in self._copying.items() if item.job.ticket in wanted]
        self._copier.fence(copying)

    def drain(self) -> None:
        """Wait, at most ``DRAIN_TIMEOUT_S``, until every job has ended; ``ended`` tells how."""
        deadline_s = self._clock.monotonic() + DRAIN_TIMEOUT_S
        while self._jobs:
            with suppress(CopyError):
                self._copier.fence(tuple(self._copying))
            self._advance()
            left_s = deadline_s - self._clock.monotonic()
            if left_s <= 0 or (
                not self._copying and self._executor.outstanding and not self._executor.wait(left_s)
            ):
                return

    def close(self) -> None:
        """Ends everything: waits a bounded time for transfers in progress and fails the others."""
        if self._closed:
            return
        self._closed = True
        for queue in (self._loads, self._stores):
            while queue:
                self._end(queue.popleft(), "the device is closed")
        self.drain()
        self._executor.poll()
        hangs = self._executor.outstanding > self._background_running or (
            self.hung and self._background_running
        )
        if self._executor.close(0.0 if hangs else DRAIN_TIMEOUT_S):
            self._media.close()  # else a thread may still use its descriptor

    def _advance(self) -> None:
        for copied in self._copier.ended():
            item = self._copying.pop(copied.ticket, None)
            if item is None:
                continue
            self._progress_s = self._clock.monotonic()
            item.job.moved_bytes += copied.moved_bytes
            if copied.error is not None or item.job.load:
                self._end(item, copied.error)
            else:
                self._io(item, self._media.write)
        self._executor.poll()
        self._fail_late()
        self._fill()
        self._start_background()

    def _fail_late(self) -> None:
        """Fails transfers that make no progress, so that no request waits for them and no page is
        held.
        """
        now_s = self._clock.monotonic()
        late = [
            item
            for item in [*self._moving, *self._loads, *self._stores]
            if now_s
            - (max(item.job.began_s, self._progress_s) if item.began_s is None else item.began_s)
            > HUNG_S
        ]
        if not self.hung and any(item in self._moving for item in late):
            # Others are queued behind what has begun; where nothing has, behind a scrub.
            stuck = min(
                self._moving, key=lambda item: inf if item.began_s is None else item.began_s
            )
            self._hung, self._next_background_s = stuck.extent, now_s + BACKGROUND_PAUSE_S
        what = "NVMe did not answer" if self.hung else "no staging was free"
        for item in late:
            self._drop(item, f"{what} within {HUNG_S:g} s")
        for item in [*self._moving, *self._loads, *self._stores] if self.hung else ():
            if item.began_s is None:
                self._drop(item, "not asked: NVMe does not answer")

    def _drop(self, item: _Item[T], why: str) -> None:
        if item in self._moving:
            self._moving.remove(item)
            item.area = -1  # ``_moved`` returns it when the call ends
        else:
            (self._loads if item.job.load else self._stores).remove(item)
        item.job.io_failed += self.hung
        self._end(item, why)

    def _start_background(self) -> None:
        """Starts one background call: a trial while NVMe is hung, else a scrub when there are no
        jobs.

        A trial that ends with an error counts as answered.
        """
        hung = self._hung
        busy = self._background_running or not self._areas or (hung is None and self._jobs)
        if busy or self._closed or self._clock.monotonic() < self._next_background_s:
            return
        area = self._areas.pop()

        def ended(_: None, error: BaseException | None) -> None:
            self._background_running = False
            self._areas.append(area)
            self._next_background_s = self._clock.monotonic() + BACKGROUND_PAUSE_S
            if hung is not None and (error is None or isinstance(error, _ANSWERS)):
                self._hung, self._progress_s = None, self._clock.monotonic()

        media = self._media
        work = partial(media.scrub, area) if hung is None else partial(media.probe, area, hung)
        self._background_running = self._executor.submit(work, ended, urgent=hung is not None)
        if not self._background_running:
            self._areas.append(area)

    def _fill(self) -> None:
        """Starts waiting transfers on free areas."""
        while self._areas and self._loads and self._hung is None:
            item = self._loads.popleft()
            item.area = self._areas.pop()
            self._io(item, self._media.read)
        while len(self._areas) > self._kept_for_loads and self._stores and self._hung is None:
            item = self._stores.popleft()
            item.area = self._areas.pop()
            self._copy(item)

    def _copy(self, item: _Item[T]) -> None:
        number, self._next = self._next, self._next + 1
        self._copying[number] = item
        self._copier.start(
            number, item.item, item.area, load=item.job.load, length=item.extent.length
        )

    def _io(self, item: _Item[T], move: Callable[[int, Extent], None]) -> None:
        area = item.area

        def work() -> None:
            if item in self._moving:
                item.began_s = self._clock.monotonic()
                move(area, item.extent)

        self._moving.add(item)
        if not self._executor.submit(
            work, lambda _, error: self._moved(item, area, error), urgent=item.job.load
        ):
            self._moving.remove(item)
            self._end(item, "too much is queued for NVMe")

    def _moved(self, item: _Item[T], area: int, error: BaseException | None) -> None:
        self._progress_s = self._clock.monotonic()
        if item not in self._moving:
            self._areas.append(area)
            return
        self._moving.remove(item)
        if error is not None:
            item.job.io_failed += 1
            self._end(item, f"{type(error).__name__}: {error}")
        elif not item.job.load:
            self._end(item, None)
        elif self._closed:
            self._end(item, "the device is closed")
        else:
            self._copy(item)

    def _end(self, item: _Item[T], error: str | None) -> None:
        job = item.job
        if item.area >= 0:
            self._areas.append(item.area)
            item.area = -1
        if error is not None:
            job.failed[item.index] = error
        job.left -= 1
        if job.left:
            return
        del self._jobs[job.ticket]
        seconds = self._clock.monotonic() - job.began_s
        why = next(iter(job.failed.values()), None)
        failed = tuple(sorted(job.failed))
        self._ended.append(
            JobEnd(job.ticket, job.load, failed, job.io_failed, why, job.moved_bytes, seconds)
        )
