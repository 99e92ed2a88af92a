"""The diagnosis: what three snapshots of ``/metrics`` and two answers say about offloading."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from kvstow.cli.verify.client import Answer
from kvstow.cli.verify.snapshot import Snapshot

PROMPT: Final = "vllm:prompt_tokens_total"
OWN: Final = "vllm:prefix_cache_hits_total"
EXTERNAL: Final = "vllm:external_prefix_cache_hits_total"
SOURCES: Final = "vllm:prompt_tokens_cached_by_source_total"
FINISHED: Final = "vllm:request_success_total"
HITS: Final = "kvstow_hit_tokens_total"
REQUESTED: Final = "kvstow_requested_tokens_total"
STORED: Final = "kvstow_stored_chunks_total"
LOADED: Final = "kvstow_loaded_chunks_total"
REFUSED: Final = "kvstow_refused_chunks_total"
FAILED: Final = "kvstow_failed_chunks_total"
CORRUPT: Final = "kvstow_corrupt_chunks_total"
EVICTED: Final = "kvstow_evicted_chunks_total"
DEADLINE: Final = "kvstow_fetch_deadline_exceeded_total"
DECISIONS: Final = "kvstow_fetch_decisions_total"
STATE: Final = "kvstow_tier_state"
CHUNK: Final = "kvstow_chunk_tokens"
OPEN: Final = 2.0


class Code(StrEnum):
    """Results by name, for programs."""

    RESTORED = "restored"
    OWN_CACHE = "own_cache"
    TOO_SHORT = "prompt_too_short"
    OTHER_SERVER = "other_server"
    SEVERAL_ENGINES = "several_engines"
    SWITCHED_OFF = "switched_off"
    NOT_STORED = "not_stored"
    REFUSED = "store_refused"
    FAILED = "transfer_failed"
    NOT_ASKED = "not_asked"
    EVICTED = "evicted"
    DEADLINE = "fetch_deadline"
    COMPUTED = "computed_instead"
    CORRUPT = "corrupt"
    BYPASSED = "tier_bypassed"
    MISSED = "missed"
    NO_KVSTOW = "no_kvstow"
    UNREACHABLE = "unreachable"
    AUTH = "auth"
    HTTP = "http_error"


class Observation(NamedTuple):
    """The two answers, and ``/metrics`` before, between and after them."""

    before: Snapshot
    between: Snapshot
    after: Snapshot
    first: Answer
    second: Answer
    chunk_tokens: int


class Verdict(NamedTuple):
    """The result, why it is that, and what to do about it."""

    code: Code
    why: str
    fix: str = ""

    @property
    def works(self) -> bool:
        """Whether KV is stored and, if it was needed, restored."""
        return self.code in (Code.RESTORED, Code.OWN_CACHE)


_REASONS: Final[Mapping[str, str]] = {
    "pool_full": "every slot is pinned: set memory.size to more",
    "queue_full": "the tier is slower than what is stored: see docs/how-to/disk.md",
    "queue_slow": "the tier is slower than what is stored: see docs/how-to/disk.md",
    "unavailable": "the tier fails: vLLM's log says why, and so may `kvstow doctor`",
    "rejected": "no room, or admission said no (disk.admission second_sight)",
}


def diagnose(observed: Observation) -> Verdict:
    """Finds out whether KV was restored and, if not, the likeliest cause."""
    whole = observed.after.since(observed.before)
    second = observed.after.since(observed.between)
    hits = second.sums_by(HITS, "tier")
    stored = whole.total(STORED)
    if hits:
        tiers = ", ".join(f"{tokens:.0f} tokens from {tier}" for tier, tokens in hits.items())
        return Verdict(Code.RESTORED, f"the second request reused KV: {tiers}")
    if observed.second.prompt_tokens < observed.chunk_tokens:
        tokens = observed.second.prompt_tokens
        why = f"the prompt has {tokens} tokens, and a chunk {observed.chunk_tokens}"
        return Verdict(
            Code.TOO_SHORT,
            why,
            f"--prompt-tokens {3 * observed.chunk_tokens}; a longer --max-model-len",
        )
    if second.total(PROMPT) < observed.second.prompt_tokens:
        return Verdict(
            Code.OTHER_SERVER,
            "the server whose /metrics were read did not count the request: another answered",
            "give the URL of one server, not of a load balancer in front of several",
        )
    if second.total(OWN) and stored:
        return Verdict(
            Code.OWN_CACHE,
            "vLLM's own prefix cache, on the device, answered the second request; "
            f"kvstow has stored the prompt ({stored:.0f} chunks) for when it is gone there",
            "to see a restore, start vLLM with --no-enable-prefix-caching, and verify again",
        )
    if not stored:
        return _not_stored(whole)
    return _not_found(observed, whole, second)


def _not_stored(whole: Snapshot) -> Verdict:
    if refused := whole.sums_by(REFUSED, "tier", "reason"):
        fixes = {_REASONS.get(key.split()[-1], "see vLLM's log") for key in refused}
        return Verdict(
            Code.REFUSED, f"chunks were refused: {_shown(refused)}", "; ".join(sorted(fixes))
        )
    if failed := whole.sums_by(FAILED, "tier", "reason"):
        return Verdict(Code.FAILED, f"copies failed: {_shown(failed)}", "vLLM's log says why")
    if not whole.total(REQUESTED):
        return Verdict(
            Code.SWITCHED_OFF,
            "kvstow neither looked for the prompt nor stored it: it is switched off",
            "look for `kvstow is switched off` and `A worker reports` in vLLM's log, and restart "
            "vLLM",
        )
    return Verdict(
        Code.NOT_STORED,
        "kvstow looked for the prompt and stored nothing",
        "kv_role must be kv_both (not kv_consumer), and `Host pool mapped by` must be in vLLM's "
        "log",
    )


def _not_found(observed: Observation, whole: Snapshot, second: Snapshot) -> Verdict:
    engines = observed.after.label_values(CHUNK, "engine")
    if len(engines) > 1:
        return Verdict(
            Code.SEVERAL_ENGINES,
            f"the prompt was stored, by one of {len(engines)} engines, each with its own "
            "memory; the second request went to another",
            "a shared tier (disk.paths, redis.url), or sticky routing",
        )
    if not second.total(REQUESTED):
        fix = "kv_role must be kv_both (not kv_producer)"
        return Verdict(
            Code.NOT_ASKED, "the prompt was stored, and kvstow was not asked for it again", fix
        )
    for cause in _causes(observed, whole, second):
        if cause.counts:
            why = f"the prompt was stored, and not found again: {cause.description}"
            return Verdict(cause.code, f"{why} ({_shown(cause.counts)})", cause.fix)
    return Verdict(
        Code.MISSED,
        "the prompt was stored, and not found again: between the two the namespace changed (the "
        "cache was reset, or weights updated), or the requests differ",
        "verify again; where two servers share a tier see `kvstow namespaces`",
    )


class Cause(NamedTuple):
    """A possible cause. It applies if ``counts``, by tier or reason, is not empty."""

    code: Code
    counts: Mapping[str, float]
    description: str
    fix: str


def _causes(observed: Observation, whole: Snapshot, second: Snapshot) -> Iterator[Cause]:
    """Yields possible causes of a miss, the likeliest first."""
    log = "vLLM's log says why"
    yield Cause(Code.FAILED, second.sums_by(FAILED, "tier", "reason"), "transfers failed", log)
    damaged = second.sums_by(CORRUPT, "tier")
    fix = "suspect the disk or the memory"
    yield Cause(Code.CORRUPT, damaged, "chunks came back damaged", fix)
    late = second.sums_by(DEADLINE, "tier")
    yield Cause(Code.DEADLINE, late, "reading took too long", "set fetch.deadline_ms to more")
    fix = "see `kvstow doctor`, and vLLM's log"
    yield Cause(Code.BYPASSED, dict(_open(observed.after)), "a tier is bypassed", fix)
    decisions = second.sums_by(DECISIONS, "tier", "decision")
    against = {
        key: count for key, count in decisions.items() if key.split()[-1] in ("short", "recompute")
    }
    yield Cause(
        Code.COMPUTED,
        against,
        "kvstow decided against loading it: computing is expected to be faster",
        "a longer prompt (--prompt-tokens); fetch.min_tokens 0 loads always",
    )
    evicted = whole.sums_by(EVICTED, "tier")
    yield Cause(Code.EVICTED, evicted, "chunks had to make room", "set memory.size to more")


def _open(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    """Yields the tiers whose breaker is open, and their state."""
    for tier, state in snapshot.sums_by(STATE, "tier").items():
        if state >= OPEN:
            yield tier, state


def notes(observed: Observation) -> list[str]:
    """Remarks beside the verdict."""
    second = observed.after.since(observed.between)
    remarks = [f"tier {tier} is bypassed: see vLLM's log" for tier, _ in _open(observed.after)]
    lower = {
        tier: chunks for tier, chunks in second.sums_by(LOADED, "tier").items() if tier != "memory"
    }
    remarks += [f"{chunks:.0f} chunks were read from tier {tier}" for tier, chunks in lower.items()]
    if observed.first.text != observed.second.text:
        remarks.append(
            "the two texts differ: other batches compute other low bits, which may flip a near "
            "tie; with exact codecs restored KV is byte-equal"
        )
    if second.total(FINISHED) > 1:
        remarks.append("other requests ended meanwhile, and are in these figures")
    return remarks


def _shown(found: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.0f}" for key, value in found.items())
