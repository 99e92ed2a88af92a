"""Settings against the facts of the engine and the host. Pure: facts in, ``SettingsError`` out.

Each error names the setting, the number and what to set instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstow.errors import SettingsError
from kvstow.fields.values import format_size, round_up_to_mb
from kvstow.layout import MIN_CHUNKS, auto_chunk_tokens
from kvstow.settings.machine import HostFacts
from kvstow.settings.schema import Settings

_MEMORY_HINT: Final = (
    "Set memory.size to less, or give the container more "
    "(docker run --memory, resources.limits.memory in Kubernetes)"
)


def chunk_tokens(settings: Settings, block_tokens: int, block_bytes: Sequence[int]) -> int:
    """Tokens of a chunk: as set, or what ``auto`` comes to.

    ``block_tokens``: vLLM's block size (of several, their least common multiple); ``block_bytes``: bytes of one
    block of each group and distinct shard.
    """
    if settings.chunk_size == "auto":
        return auto_chunk_tokens(block_tokens, block_bytes)
    wanted = settings.chunk_size
    if wanted % block_tokens:
        below = wanted // block_tokens * block_tokens
        valid = " or ".join(str(tokens) for tokens in (below, below + block_tokens) if tokens)
        raise SettingsError(
            f"chunk_size {wanted} is not a multiple of vLLM's block size {block_tokens}: set it to {valid}, or to auto"
        )
    return wanted


def check_pool(settings: Settings, frame_bytes: int, chunk: int) -> None:
    """The pool must hold ``MIN_CHUNKS`` chunks. ``frame_bytes``: host memory of one of ``chunk`` tokens, all ranks."""
    size, least = settings.memory.size, MIN_CHUNKS * frame_bytes
    if size < least:
        raise SettingsError(
            f"memory.size {format_size(size)} holds {size // frame_bytes} chunks: a chunk of {chunk} tokens takes "
            f"{format_size(frame_bytes)} over all ranks and layers. Set memory.size to at least "
            f"{round_up_to_mb(least)} ({MIN_CHUNKS} chunks), or chunk_size to less than {chunk}"
        )


def check_host(settings: Settings, facts: HostFacts, engines: int = 1) -> None:
    """The pool must fit into what is left of memory, and of its directory; all ``engines`` of this host (data
    parallel; each has its own pool) into what there is."""
    size, memory = settings.memory.size, facts.memory
    if memory is not None:
        owner, total, left = (
            memory.owner,
            format_size(memory.total_bytes),
            format_size(memory.available_bytes),
        )
        if size * engines > memory.total_bytes:
            pools = f" for each of {engines} engines on this host" if engines > 1 else ""
            raise SettingsError(
                f"memory.size {format_size(size)}{pools} is more than the {total} of memory that {owner} has. "
                f"{_MEMORY_HINT}"
            )
        if size > memory.available_bytes:
            held = "".join(
                f". Process {h.pid} holds a kvstow pool of {format_size(h.pool_bytes)}, perhaps of a server that was "
                "killed: end it if so"
                for h in facts.holders
            )
            raise SettingsError(
                f"memory.size {format_size(size)} is more than the {left} of memory that {owner} has left. "
                f"{_MEMORY_HINT}{held}"
            )
    _check_pool_dir(settings, facts)


def _check_pool_dir(settings: Settings, facts: HostFacts) -> None:
    size, folder, free = settings.memory.size, settings.memory.pool_dir, facts.pool_dir_free_bytes
    if facts.pool_dir_problem is not None:
        raise SettingsError(
            f"memory.pool_dir {folder} {facts.pool_dir_problem}: create it, or leave it unset"
        )
    if free is not None and size > free:
        raise SettingsError(
            f"memory.size {format_size(size)} is more than the {format_size(free)} free in memory.pool_dir {folder}. "
            "Set memory.size to less, leave memory.pool_dir unset (no directory is needed then), or enlarge it "
            "(docker run --shm-size, an emptyDir of medium Memory in Kubernetes)"
        )
