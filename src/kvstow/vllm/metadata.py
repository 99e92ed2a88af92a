"""What the scheduler's and the workers' connectors tell each other. Plain data; vLLM carries it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvstow.direct.geometry import DirectRef
from kvstow.layout import GroupPages, Place
from kvstow.pool.pool import PoolRef


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """One rank's answer at start: what its device recognised, and where it runs."""

    groups: tuple[GroupPages, ...]
    shard: tuple[
        int, int
    ]  # (pipeline rank, which distinct slice of the KV heads); equal on ranks with equal bytes
    host: str  # boot id: every rank must share the scheduler's host memory
    backends: str  # names of its attention backends


@dataclass
class Mount:
    """The places, host pool or direct storage, and which of a place's spans each ``(pp_rank, tp_rank)`` copies; a
    non-writer only reads."""

    pool: PoolRef | DirectRef
    shards: dict[tuple[int, int], int]
    writers: frozenset[tuple[int, int]]


@dataclass(slots=True)
class Copy:
    """One chunk, or its tail: device blocks ``block_ids`` are its blocks ``first_block, first_block + 1, ...``"""

    place: Place
    block_ids: list[int]
    first_block: int = 0


@dataclass(slots=True)
class Job:
    """Copies of one request in one step. ``lost`` are device blocks of a load that no place can fill any more."""

    job: int
    req_id: str
    copies: list[Copy]
    lost: list[int] = field(default_factory=list)


@dataclass
class StepMeta(KVConnectorMetadata):
    """Scheduler to workers, every step."""

    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    preempted: set[str] = field(
        default_factory=set
    )  # their blocks may be reused by this step's forward
    finishing: list[str] = field(
        default_factory=list
    )  # report finished_sending once their stores have ended
    has_forward: bool = True
    mount: Mount | None = None  # sent until every rank has reported it
    step: int = 0  # to be given back once the step is done; 0: not


@dataclass(slots=True)
class JobReport:
    """The end of a job on ``ranks`` ranks. ``failed`` are indices of its copies."""

    ranks: int
    failed: set[int]
    moved_bytes: int
    seconds: float  # the slowest rank's

    def merge(self, other: JobReport) -> None:
        self.ranks += other.ranks
        self.failed |= other.failed
        self.moved_bytes += other.moved_bytes
        self.seconds = max(self.seconds, other.seconds)


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """Workers to scheduler, summed over ranks by vLLM before the scheduler sees it."""

    jobs: dict[int, JobReport] = field(default_factory=dict)
    step: int = 0  # the one that has been done
    mounted: int = 0  # ranks that mapped the pool in this step
    hung: dict[tuple[int, int], bool] = field(
        default_factory=dict
    )  # ranks whose NVMe stopped answering, or does again
    errors: list[str] = field(
        default_factory=list
    )  # why a rank cannot take part, or why copies failed

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMeta)
        for job, report in other.jobs.items():
            self.jobs.setdefault(job, JobReport(0, set(), 0, 0.0)).merge(report)
        self.step = max(self.step, other.step)
        self.mounted += other.mounted
        self.hung |= other.hung
        self.errors += other.errors
        return self
