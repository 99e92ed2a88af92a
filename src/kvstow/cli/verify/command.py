"""``kvstow verify-offload``: asks a running server whether it restores KV."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Any, Final

import typer

from kvstow.cli.output import JsonOption
from kvstow.cli.verify import diagnosis
from kvstow.cli.verify.client import Model, Server, ServerFault
from kvstow.cli.verify.diagnosis import Code, Observation, Verdict, diagnose, notes
from kvstow.cli.verify.snapshot import Snapshot
from kvstow.errors import SettingsError
from kvstow.runtime import Clock, SystemClock, run_within
from kvstow.settings import variable
from kvstow.text import printable

EXIT_FAILED: Final = 1
ANSWER_TOKENS: Final = 16
UNKNOWN_CHUNK_TOKENS: Final = 256  # where neither the server nor the user says
CHUNKS: Final = 3
MAX_PROMPT_TOKENS: Final = 1 << 20
SETTLE_S: Final = 5.0  # for counts to reach /metrics
POLL_S: Final = 0.25
CONFIG: Final = '{"kv_connector":"KVStowConnector","kv_role":"kv_both"}'
START: Final = f"start vLLM with --kv-transfer-config '{CONFIG}', and without --disable-log-stats"
GRACE_S: Final = 5.0  # beyond --timeout, for a call of the system that has begun
_TEXT: Final = (
    "the of and to in is was for on that by this with from they are which not have were one all we "
    "can has been out other time some would these more her two its then do first any my now such "
    "like our over man me even most made after also did many before must through years where much "
    "your way well down should because each just those people"
)
WORDS: Final = tuple(_TEXT.split())

Wait = Callable[[float], object]


def verify_offload(
    url: Annotated[
        str, typer.Option(help="Of one vLLM server, without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="The model's name. Default: the server's first.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="The variable that holds the server's API key.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Its approximate length. Default: three chunks.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help="Where the server does not tell it.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, max=3600, help="Seconds for all of it.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Send a new prompt twice and say whether the second time its KV was reused, from where, and if
    not, why.

    Exit code 0: it was, or vLLM's own cache was faster and the prompt is stored; 1: it was not.
    """
    from rich.console import Console

    key = None
    if api_key_env is not None:
        key = (variable(api_key_env) or "").strip()
        if not key:
            raise SettingsError(f"--api-key-env {api_key_env}: that variable is not set")
        if not (key.isascii() and key.isprintable()):
            raise SettingsError(
                f"--api-key-env {api_key_env}: what it holds is no key: one line of ASCII is "
                f"expected"
            )
    clock = SystemClock()
    deadline_s = clock.monotonic() + timeout

    def work() -> dict[str, Any]:
        with closing(Server(url, key, clock, deadline_s)) as server:
            return verify(server, model, prompt_tokens, chunk_tokens, clock, threading.Event().wait)

    # A spinner, on a terminal only.
    with Console(stderr=True).status(f"sending a prompt twice, at most {timeout:g} s"):
        report = _within(timeout + GRACE_S, work)
    print(json.dumps(report, indent=2)) if as_json else _show(report)
    if not report["works"]:
        raise typer.Exit(EXIT_FAILED)


def verify(
    server: Server,
    model: str | None,
    prompt_tokens: int | None,
    chunk_tokens: int | None,
    clock: Clock,
    wait: Wait,
) -> dict[str, Any]:
    """Returns the report, also of a server that can't be asked.

    ``wait`` pauses for some seconds between two requests for ``/metrics``.
    """
    try:
        chosen = _model(server.models(), model)
        before = Snapshot.parse(server.metrics())
        if not before.has_kvstow:
            return _report(Verdict(Code.NO_KVSTOW, "the server has no kvstow metrics", START))
        chunk = chunk_tokens or int(before.largest(diagnosis.CHUNK)) or UNKNOWN_CHUNK_TOKENS
        prompt = make_prompt(prompt_tokens or CHUNKS * chunk + 1, chosen.max_tokens)
        first = server.complete(chosen.name, prompt, ANSWER_TOKENS)
        full = first.prompt_tokens // chunk
        between = _wait_for_metrics(
            server, clock, wait, lambda now: now.since(before).total(diagnosis.STORED) >= full
        )
        second = server.complete(chosen.name, prompt, ANSWER_TOKENS)
        asked = second.prompt_tokens
        after = _wait_for_metrics(
            server, clock, wait, lambda now: now.since(between).total(diagnosis.PROMPT) >= asked
        )
    except ServerFault as fault:
        return _report(_fault(fault))
    observed = Observation(before, between, after, first, second, chunk)
    return _report(diagnose(observed), observed, chosen.name)


def make_prompt(tokens: int, max_tokens: int | None) -> str:
    """Returns new text of about ``tokens`` tokens, at most half of ``max_tokens``.

    Its short words are a token each. ``max_tokens`` is the model's limit, or None if it is unknown.
    """
    count = min(tokens, MAX_PROMPT_TOKENS, max(1, (max_tokens or tokens * 2) // 2))
    return f"{secrets.token_hex(8)} " + " ".join(
        WORDS[byte % len(WORDS)] for byte in secrets.token_bytes(count)
    )


def _model(models: list[Model], wanted: str | None) -> Model:
    there = [model.name for model in models]
    if wanted is not None and wanted not in there:
        raise ServerFault(
            f"the server has no model {wanted}; it has {', '.join(there) or 'none'}", 404
        )
    if not models:
        raise ServerFault("the server has no model", 404)
    return models[0] if wanted is None else models[there.index(wanted)]


def _wait_for_metrics(
    server: Server, clock: Clock, wait: Wait, enough: Callable[[Snapshot], bool]
) -> Snapshot:
    """Polls ``/metrics`` until ``enough`` or for ``SETTLE_S``. Returns the last snapshot."""
    until_s = clock.monotonic() + SETTLE_S
    while True:
        snapshot = Snapshot.parse(server.metrics())
        if enough(snapshot) or clock.monotonic() >= until_s:
            return snapshot
        wait(POLL_S)


def _fault(fault: ServerFault) -> Verdict:
    """The verdict on a server that can't be asked."""
    if 300 <= fault.status < 400:
        return Verdict(
            Code.HTTP, str(fault), "--url with that address: it is not followed, for the key's sake"
        )
    if fault.status in (401, 403):
        return Verdict(
            Code.AUTH, str(fault), "name the variable that holds the key: --api-key-env NAME"
        )
    if "CERTIFICATE_VERIFY_FAILED" in str(fault):
        fix = "name the file of its authority's certificate in the variable SSL_CERT_FILE"
        return Verdict(Code.UNREACHABLE, str(fault), fix)
    if fault.status == 0:
        return Verdict(
            Code.UNREACHABLE, str(fault), "see that vLLM runs and answers there; --url, --timeout"
        )
    fix = (
        "fewer --prompt-tokens, if the prompt is too long"
        if fault.status == 400
        else "is it vLLM's own server?"
    )
    return Verdict(Code.HTTP, str(fault), fix)


def _report(
    verdict: Verdict, observed: Observation | None = None, model: str = ""
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "verdict": str(verdict.code),
        "works": verdict.works,
        "why": verdict.why,
        "fix": verdict.fix,
    }
    if observed is None:
        return report
    second = observed.after.since(observed.between)
    answers = {
        name: {key: value for key, value in answer._asdict().items() if key != "text"}
        for name, answer in (("first", observed.first), ("second", observed.second))
    }
    return {
        **report,
        "model": model,
        "chunk_tokens": observed.chunk_tokens,
        "restored_tokens": second.sums_by(diagnosis.HITS, "tier"),
        "external_hit_tokens": second.total(diagnosis.EXTERNAL),
        "own_hit_tokens": second.total(diagnosis.OWN),
        "cached_tokens_by_source": second.sums_by(diagnosis.SOURCES, "source"),
        "stored_chunks": observed.after.since(observed.before).sums_by(diagnosis.STORED, "tier"),
        "identical": observed.first.text == observed.second.text,
        **answers,
        "notes": notes(observed),
    }


def _within(limit_s: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what ``work`` returns. After ``limit_s`` its thread is abandoned."""
    value, error = run_within("verify", work, limit_s) or (
        None,
        ServerFault("the time given is over"),
    )
    if value is not None:
        return value
    if not isinstance(error, ServerFault):
        raise error or AssertionError("neither value nor error")
    return _report(_fault(error))


def _show(report: dict[str, Any]) -> None:
    print(f"{'works' if report['works'] else 'does not work'}: {printable(report['why'])}")
    if "first" in report:
        first, second = report["first"], report["second"]
        same = "identical" if report["identical"] else "different"
        print(
            f"time to first token: {first['ttft_s'] * 1e3:.0f} ms, then "
            f"{second['ttft_s'] * 1e3:.0f} ms; {same} text"
        )
        stored = (
            ", ".join(f"{chunks:.0f} in {tier}" for tier, chunks in report["stored_chunks"].items())
            or "none"
        )
        print(
            f"{second['prompt_tokens']} prompt tokens, chunks of {report['chunk_tokens']}; "
            f"stored: {stored}"
        )
    for note in report.get("notes", ()):
        print(f"note: {note}")
    if report["fix"]:
        print(f"→ {report['fix']}")
