"""What the ranks of one engine must have in common, and which part of a place each rank copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvstow.direct.geometry import DirectRef
from kvstow.errors import UnsupportedError
from kvstow.pool.pool import PoolRef
from kvstow.vllm.metadata import Handshake, Mount

Rank: TypeAlias = tuple[int, int]  # (pipeline rank, tensor parallel rank)


def own_handshakes(metadata: dict[Rank, object]) -> dict[Rank, Handshake]:
    """Returns the ranks' answers.

    Raises ``UnsupportedError`` where another connector's answers came in their place.
    """
    own = {rank: answer for rank, answer in metadata.items() if isinstance(answer, Handshake)}
    foreign = [answer for answer in metadata.values() if not isinstance(answer, Handshake)]
    if foreign and not own:
        raise UnsupportedError(
            f"vLLM's MultiConnector passes on the handshake of its first connector only, here a "
            f"{type(foreign[0]).__name__}, and kvstow needs its own. Add "
            '"kv_connector_module_path": "kvstow.vllm.multi" beside '
            '"kv_connector": "MultiConnector" in '
            "--kv-transfer-config: that MultiConnector passes on each connector's"
        )
    return own


def check_ranks(handshakes: dict[Rank, Handshake], world_size: int, host: str) -> None:
    """Checks that every rank answered, on this host, with the pages of its pipeline stage.

    Raises ``UnsupportedError`` otherwise.
    """
    if len(handshakes) != world_size:
        raise UnsupportedError(
            f"{len(handshakes)} of {world_size} ranks answered kvstow's handshake: all must be on "
            "this host"
        )
    pages_of: dict[Rank, object] = {}
    for rank, handshake in sorted(handshakes.items()):
        if handshake.host != host:
            raise UnsupportedError(
                f"rank (pp, tp) {rank} runs on another host; kvstow shares host memory among ranks "
                "of one host"
            )
        if pages_of.setdefault(handshake.shard, handshake.groups) != handshake.groups:
            raise UnsupportedError(
                f"rank (pp, tp) {rank} recognised other KV pages than a rank with the same heads"
            )


def mount_of(
    reference: PoolRef | DirectRef, handshakes: dict[Rank, Handshake], shards: Sequence[Rank]
) -> Mount:
    """Assigns each rank its span of a place.

    Of the ranks that hold the same bytes the first one writes them.

    Args:
        reference: How workers reach the pool or the direct storage.
        handshakes: Every rank's answer.
        shards: The distinct shards, in the order of a place's spans.
    """
    writers: dict[Rank, Rank] = {}
    for rank in sorted(handshakes):
        writers.setdefault(handshakes[rank].shard, rank)
    spans = {rank: shards.index(handshake.shard) for rank, handshake in handshakes.items()}
    return Mount(reference, spans, frozenset(writers.values()))
