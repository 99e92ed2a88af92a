"""The messages between the scheduler's and the workers' side: plain data that vLLM carries."""

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
class Handshake(KVConnectorHandshakeMetadata):
    """One rank's answer at start: what its device recognised, and where it runs.

    ``shard`` is the pipeline rank and the number of the distinct slice of KV heads; ranks with
    equal bytes have equal shards. ``host`` is the boot id: every rank must share the scheduler's
    host memory. ``backends`` names the rank's attention backends.
    """

    groups: tuple[GroupPages, ...]
    shard: tuple[int, int]
    host: str
    backends: str


@dataclass
class Mount:
    """How workers reach the host pool or direct storage, and what each rank copies there.

    ``shards`` maps each ``(pp_rank, tp_rank)`` to the index of its span in a place. A rank that is
    not in ``writers`` only reads.
    """

    places: PoolRef | DirectRef
    shards: dict[tuple[int, int], int]
    writers: frozenset[tuple[int, int]]


@dataclass(slots=True)
class Copy:
    """The copy of a chunk, or of its tail from ``first_block`` on, to or from ``block_ids``."""

    place: Place
    block_ids: list[int]
    first_block: int = 0


@dataclass(slots=True)
class Job:
    """Copies of one request in one step.

    ``lost`` are device blocks of a load that no place can fill any more.
    """

    job: int
    req_id: str
    copies: list[Copy]
    lost: list[int] = field(default_factory=list)


@dataclass
class StepMeta(KVConnectorMetadata):
    """Scheduler to workers, every step.

    The step's forward pass may reuse the blocks of ``preempted`` requests. A request in
    ``finishing`` is reported as ``finished_sending`` once its stores have ended. ``mount`` is sent
    until every rank has reported it. The workers give ``step`` back once the step is done; 0 asks
    for no answer.
    """

    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    preempted: set[str] = field(default_factory=set)
    finishing: list[str] = field(default_factory=list)
    has_forward: bool = True
    mount: Mount | None = None
    step: int = 0


@dataclass(slots=True)
class JobReport:
    """A job's end on ``ranks`` ranks.

    ``failed`` holds the indices of failed copies; ``seconds`` is the slowest rank's time.
    """

    ranks: int
    failed: set[int]
    moved_bytes: int
    seconds: float

    def merge(self, other: JobReport) -> None:
        self.ranks += other.ranks
        self.failed |= other.failed
        self.moved_bytes += other.moved_bytes
        self.seconds = max(self.seconds, other.seconds)


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """Workers to scheduler; vLLM sums it over ranks.

    ``step`` is the step that has been done, ``mounted`` the number of ranks that mapped the places
    in it. ``hung`` maps a rank to whether its NVMe has stopped answering. ``errors`` say why a rank
    cannot take part or why copies failed. ``switched_off``: a rank takes no further part, after an
    error that was not foreseen.
    """

    jobs: dict[int, JobReport] = field(default_factory=dict)
    step: int = 0
    mounted: int = 0
    hung: dict[tuple[int, int], bool] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    switched_off: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMeta)
        for job, report in other.jobs.items():
            self.jobs.setdefault(job, JobReport(0, set(), 0, 0.0)).merge(report)
        self.step = max(self.step, other.step)
        self.mounted += other.mounted
        self.hung |= other.hung
        self.errors += other.errors
        self.switched_off = self.switched_off or other.switched_off
        return self
