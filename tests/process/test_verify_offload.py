"""``kvstow verify-offload`` against a small HTTP server that says what a vLLM in each plight would. It is no vLLM:
the real one is asked in tests/e2e."""

from __future__ import annotations

import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("openai")

from kvstow.cli import main
from kvstow.cli.verify import client
from kvstow.cli.verify.client import Server, ServerFault
from kvstow.cli.verify.command import (
    MAX_PROMPT_TOKENS,
    UNKNOWN_CHUNK_TOKENS,
    WORDS,
    make_prompt,
    verify,
)
from kvstow.cli.verify.snapshot import Snapshot
from kvstow.settings import sources
from kvstow.testing.manual import ManualClock
from tests.store.redis_rig import make_certificates

CHUNK = 32
TOKENS = 100
KEY = "s3cret-key"

Effects = dict[str, float]


class FakeServer:
    """Answers ``/v1/models``, ``/metrics`` and streamed completions. ``effects`` are what each completion adds."""

    def __init__(self) -> None:
        self.base: Effects = {
            'kvstow_chunk_tokens{engine="0"}': CHUNK,
            'kvstow_pool_capacity_bytes{engine="0"}': 1e6,
        }
        self.effects: list[Effects] = [{}, {}]
        self.texts = ["same", "same"]
        self.prompts: list[dict[str, Any]] = []
        self.tokens = TOKENS
        self.cached: int | None = None
        self.key = ""
        self.answer: dict[str, tuple[int, bytes]] = {}
        self.counts_prompts = True
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                fake.get(self)

            def do_POST(self) -> None:
                fake.post(self)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def speak_tls(self, cert_file: str, key_file: str) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert_file, key_file)
        self._http.socket = context.wrap_socket(
            self._http.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = self.url.replace("http:", "https:")

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        if self.refused(request):
            return
        if request.path == "/v1/models":
            body = json.dumps(
                {"data": [{"id": "m", "max_model_len": 4096}, {"id": "other"}]}
            ).encode()
        else:
            body = self.page().encode()
        self.send(request, 200, body)

    def refused(self, request: BaseHTTPRequestHandler) -> bool:
        if request.path in self.answer:
            self.send(request, *self.answer[request.path])
        elif (
            self.key
            and request.path != "/metrics"
            and request.headers["Authorization"] != f"Bearer {self.key}"
        ):
            self.send(request, 401, b'{"error": "Unauthorized"}')
        else:
            return False
        return True

    def page(self) -> str:
        served = len(self.prompts)
        samples = dict(self.base)
        if self.counts_prompts:
            samples['vllm:prompt_tokens_total{engine="0"}'] = 1000.0 + served * self.tokens
        for effects in self.effects[:served]:
            for name, value in effects.items():
                samples[name] = samples.get(name, 0) + value
        return "".join(f"{name} {value}\n" for name, value in samples.items())

    def post(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        if self.refused(request):
            return
        text = self.texts[len(self.prompts)]
        self.prompts.append(body)
        usage = {
            "prompt_tokens": self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        events = [{"choices": [{"text": part}]} for part in (text[:2], text[2:])] + [
            {"choices": [], "usage": usage}
        ]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.send(request, 200, lines.encode())

    @staticmethod
    def send(request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        if status == 302:
            request.send_header("Location", "http://127.0.0.1:9/elsewhere")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def ask(fake: FakeServer, *, model: str | None = None, **options: Any) -> dict[str, Any]:
    clock = ManualClock()
    sizes = (options.pop("prompt_tokens", None), options.pop("chunk_tokens", None))
    key = options.pop("key", None)
    with closing(Server(fake.url, key, clock, clock.monotonic() + 60)) as server:
        return verify(server, model, *sizes, clock, clock.advance)


STORES: Effects = {
    'kvstow_stored_chunks_total{engine="0",tier="memory"}': 3,
    'kvstow_requested_tokens_total{engine="0"}': 100,
}
ASKS: Effects = {
    'kvstow_requested_tokens_total{engine="0"}': 100,
    'kvstow_miss_chunks_total{engine="0"}': 3,
}
RESTORES: Effects = {
    'kvstow_requested_tokens_total{engine="0"}': 100,
    'kvstow_hit_tokens_total{engine="0",tier="memory"}': 96,
    'vllm:external_prefix_cache_hits_total{engine="0"}': 96,
    'vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"}': 96,
}
OWN: Effects = {
    'vllm:prefix_cache_hits_total{engine="0"}': 96,
    'kvstow_requested_tokens_total{engine="0"}': 4,
}


def test_restored(fake: FakeServer) -> None:
    fake.effects, fake.cached = [STORES, RESTORES], 96
    report = ask(fake)
    assert (report["verdict"], report["works"], report["identical"]) == ("restored", True, True)
    assert report["why"] == "the second request reused KV: 96 tokens from memory"
    assert report["restored_tokens"] == {"memory": 96}
    assert report["cached_tokens_by_source"] == {"host": 96}
    assert report["stored_chunks"] == {"memory": 3}
    assert (report["chunk_tokens"], report["second"]["cached_tokens"]) == (CHUNK, 96)
    assert report["notes"] == []
    one, two = fake.prompts
    assert one == two
    assert (one["temperature"], one["stream"], one["model"]) == (0, True, "m")
    assert len(one["prompt"].split()) == 3 * CHUNK + 2


def test_restored_from_disk(fake: FakeServer) -> None:
    loads = {
        'kvstow_loaded_chunks_total{engine="0",tier="disk"}': 3,
        'kvstow_hit_tokens_total{tier="disk"}': 96,
    }
    fake.effects = [STORES, loads]
    report = ask(fake)
    assert report["restored_tokens"] == {"disk": 96}
    assert report["notes"] == ["3 chunks were read from tier disk"]


def test_what_was_there_before_is_not_counted(fake: FakeServer) -> None:
    fake.base |= {name: 1e6 for effects in (STORES, RESTORES) for name in effects}
    fake.effects = [STORES, ASKS]
    assert ask(fake)["verdict"] == "missed"


def test_vllms_own_cache_answered(fake: FakeServer) -> None:
    fake.effects = [STORES, OWN]
    report = ask(fake)
    assert (report["verdict"], report["works"], report["own_hit_tokens"]) == ("own_cache", True, 96)
    assert "--no-enable-prefix-caching" in report["fix"]


def counts(name: str, **labels: str) -> Effects:
    shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {f"kvstow_{name}{{{shown}}}": 3}


@pytest.mark.parametrize(
    ("effects", "verdict", "said"),
    [
        ([ASKS, {**OWN}], "not_stored", "kv_role"),
        ([ASKS, ASKS], "not_stored", "Host pool mapped by"),
        ([{}, {}], "switched_off", "kvstow is switched off"),
        (
            [{**ASKS, **counts("refused_chunks_total", tier="memory", reason="pool_full")}, ASKS],
            "store_refused",
            "memory.size",
        ),
        (
            [{**ASKS, **counts("refused_chunks_total", tier="disk", reason="queue_slow")}, ASKS],
            "store_refused",
            "slower",
        ),
        (
            [{**ASKS, **counts("failed_chunks_total", tier="memory", reason="store_copy")}, ASKS],
            "transfer_failed",
            "log",
        ),
        ([STORES, {}], "not_asked", "kv_producer"),
        (
            [STORES, {**ASKS, **counts("failed_chunks_total", tier="disk", reason="unavailable")}],
            "transfer_failed",
            "log",
        ),
        ([STORES, {**ASKS, **counts("corrupt_chunks_total", tier="disk")}], "corrupt", "disk"),
        (
            [STORES, {**ASKS, **counts("fetch_decisions_total", tier="disk", decision="short")}],
            "computed_instead",
            "fetch.min_tokens 0",
        ),
        (
            [
                STORES,
                {**ASKS, **counts("fetch_decisions_total", tier="disk", decision="recompute")},
            ],
            "computed_instead",
            "--prompt-tokens",
        ),
        (
            [STORES, {**ASKS, **counts("fetch_deadline_exceeded_total", tier="disk")}],
            "fetch_deadline",
            "fetch.deadline_ms",
        ),
        (
            [{**STORES, **counts("evicted_chunks_total", tier="memory")}, ASKS],
            "evicted",
            "memory.size",
        ),
        ([STORES, ASKS], "missed", "kvstow namespaces"),
    ],
)
def test_why_not(fake: FakeServer, effects: list[Effects], verdict: str, said: str) -> None:
    fake.effects = effects
    report = ask(fake)
    assert (report["verdict"], report["works"]) == (verdict, False)
    assert said in report["fix"]


def test_a_tier_that_is_bypassed(fake: FakeServer) -> None:
    fake.base['kvstow_tier_state{engine="0",tier="disk"}'] = 2
    fake.effects = [STORES, ASKS]
    assert ask(fake)["verdict"] == "tier_bypassed"
    fake.prompts.clear()
    fake.effects = [STORES, RESTORES]
    report = ask(fake)
    assert report["verdict"] == "restored"
    assert report["notes"] == ["tier disk is bypassed: see vLLM's log"]


def test_several_engines(fake: FakeServer) -> None:
    fake.base['kvstow_chunk_tokens{engine="1"}'] = CHUNK
    fake.effects = [STORES, ASKS]
    report = ask(fake)
    assert report["verdict"] == "several_engines"
    assert "one of 2 engines" in report["why"]


def test_another_server_answered(fake: FakeServer) -> None:
    fake.counts_prompts = False
    assert ask(fake)["verdict"] == "other_server"


def test_too_short(fake: FakeServer) -> None:
    fake.effects, fake.tokens = [ASKS, ASKS], CHUNK - 1
    report = ask(fake)
    assert report["verdict"] == "prompt_too_short"
    assert report["why"] == "the prompt has 31 tokens, and a chunk 32"


def test_a_server_without_kvstow(fake: FakeServer) -> None:
    fake.base = {"vllm:prompt_tokens_total": 5}
    report = ask(fake)
    assert report["verdict"] == "no_kvstow"
    assert fake.prompts == [], "nothing was asked of it"
    assert "KVStowConnector" in report["fix"]


def test_different_texts_are_told_and_are_no_fault(fake: FakeServer) -> None:
    fake.effects, fake.texts = (
        [STORES, {**RESTORES, "vllm:request_success_total": 2}],
        ["same", "other"],
    )
    report = ask(fake)
    assert (report["works"], report["identical"]) == (True, False)
    assert "near tie" in report["notes"][0]
    assert "other requests" in report["notes"][1]


def test_the_chunk_as_the_user_says(fake: FakeServer) -> None:
    del fake.base['kvstow_chunk_tokens{engine="0"}']
    fake.effects = [STORES, RESTORES]
    assert ask(fake, chunk_tokens=48)["chunk_tokens"] == 48
    fake.prompts.clear()
    assert ask(fake)["chunk_tokens"] == 256
    fake.prompts.clear()
    ask(fake, prompt_tokens=70)
    assert len(fake.prompts[0]["prompt"].split()) == 71


@pytest.mark.parametrize(
    ("path", "status", "body", "verdict"),
    [
        ("/v1/models", 404, b"", "http_error"),
        ("/v1/models", 302, b"", "http_error"),
        ("/v1/models", 200, b"<html>", "unreachable"),
        ("/v1/models", 200, b'{"data": []}', "http_error"),
        ("/v1/models", 403, b'{"error": {"message": "no"}}', "auth"),
        ("/metrics", 404, b"", "http_error"),
        ("/metrics", 200, b"not { metrics", "unreachable"),
        ("/v1/completions", 400, b'{"error": {"message": "maximum context length"}}', "http_error"),
        ("/v1/completions", 500, b"oops", "http_error"),
        ("/v1/completions", 200, b'data: {"error": {"message": "engine died"}}\n\n', "http_error"),
        ("/v1/completions", 200, b"data: nonsense\n\n", "unreachable"),
        ("/v1/completions", 200, b"", "unreachable"),
        ("/v1/models", 200, b"[" * 10**6, "unreachable"),
        (
            "/v1/models",
            200,
            b'{"data": [{"id": "m", "max_model_len": ' + b"9" * 5000 + b"}]}",
            "unreachable",
        ),
        ("/v1/models", 200, b'{"data": [{"id": "m", "max_model_len": "x"}]}', "unreachable"),
        ("/v1/completions", 400, b"[" * 10**6, "http_error"),
        ("/v1/completions", 200, b"data: " + b"[" * 10**6 + b"\n", "unreachable"),
        ("/v1/completions", 200, b'data: {"choices": 5}\n', "unreachable"),
        ("/v1/completions", 200, b'data: {"choices": [{"text": 5}]}\n', "unreachable"),
        (
            "/v1/completions",
            200,
            b'data: {"choices": [{"text": "a"}], "usage": "x"}\n',
            "unreachable",
        ),
        ("/v1/completions", 200, b'data: {"choices": [{"text": "a"}]}\n', "unreachable"),
    ],
)
def test_http_faults(fake: FakeServer, path: str, status: int, body: bytes, verdict: str) -> None:
    fake.answer[path] = (status, body)
    report = ask(fake)
    assert (report["verdict"], report["works"]) == (verdict, False)
    assert report["fix"]


def test_the_key_is_sent_and_asked_for(fake: FakeServer) -> None:
    fake.key, fake.effects = KEY, [STORES, RESTORES]
    report = ask(fake)
    assert report["verdict"] == "auth"
    assert "--api-key-env" in report["fix"]
    assert ask(fake, key=KEY)["verdict"] == "restored"


@pytest.mark.parametrize("status", [302, 401, 500])
def test_a_key_that_the_server_repeats_is_not_shown(fake: FakeServer, status: int) -> None:
    for body in (f'{{"error": {{"message": "bad key {KEY}"}}}}', f'["{KEY}"]'):
        fake.answer["/v1/models"] = (status, body.encode())
        report = ask(fake, key=KEY)
        assert KEY not in json.dumps(report)
        assert report["fix"]


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-5", "0"])
def test_a_chunk_of_no_size_is_as_if_not_told(fake: FakeServer, value: str) -> None:
    fake.answer["/metrics"] = (
        200,
        f'kvstow_chunk_tokens{{engine="0"}} {value}\nkvstow_x 1\n'.encode(),
    )
    assert ask(fake)["chunk_tokens"] == UNKNOWN_CHUNK_TOKENS


def test_an_authority_that_is_not_the_systems(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = make_certificates(tmp_path)
    fake.speak_tls(tls.cert_file, tls.key_file)
    report = ask(fake)
    assert report["verdict"] == "unreachable"
    assert "SSL_CERT_FILE" in report["fix"]
    monkeypatch.setenv("SSL_CERT_FILE", str(tls.ca_file))
    fake.effects = [STORES, RESTORES]
    assert ask(fake)["verdict"] == "restored"


def test_a_model_that_is_not_there(fake: FakeServer) -> None:
    report = ask(fake, model="x")
    assert report["verdict"] == "http_error"
    assert "it has m, other" in report["why"]
    fake.effects = [STORES, RESTORES]
    assert ask(fake, model="other")["model"] == "other"


def test_an_answer_has_a_bound(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BODY_BYTES", 100)
    fake.base |= {f'x{{n="{n}"}}': n for n in range(100)}
    assert "more than 100 bytes" in ask(fake)["why"]


def test_time_has_a_bound(fake: FakeServer) -> None:
    clock = ManualClock()
    server = Server(fake.url, None, clock, clock.monotonic() + 1.0)
    clock.advance(2.0)
    with pytest.raises(ServerFault, match="time given is over"):
        server.metrics()


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://[::1", "http://u:hunter2@h", "u:hunter2@h"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ServerFault, match="no URL") as fault:
        Server(url, None, ManualClock(), 1.0)
    assert "hunter2" not in str(fault.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://localhost:8000/", "http://localhost:8000/v1"]
)
def test_urls_as_people_write_them(url: str) -> None:
    assert Server(url, None, ManualClock(), 1.0).url == "http://localhost:8000"


def test_prompts_are_new_and_fit() -> None:
    one, two = make_prompt(100, None), make_prompt(100, None)
    assert one[:16] != two[:16]
    assert len(make_prompt(100, 60).split()) == 31
    assert len(make_prompt(10**15, None).split()) == MAX_PROMPT_TOKENS + 1
    assert all(word in WORDS for word in one.split()[1:])


def test_counters_that_began_anew_count_from_zero() -> None:
    before, after = Snapshot.parse("a_total 10\nb 5\n"), Snapshot.parse("a_total 3\nb 6\nc 1\n")
    assert {name: after.since(before).total(name) for name in ("a_total", "b", "c")} == {
        "a_total": 3,
        "b": 1,
        "c": 1,
    }


# --- the command -----------------------------------------------------------------------------------------------------

Kvstow = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvstow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kvstow:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sources.os, "environ", {"THE_KEY": f"{KEY}\n", "NO_KEY": f"{KEY}\nx"})
        monkeypatch.setattr(sys, "argv", ["kvstow", "verify-offload", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def test_the_command_says_it_in_words_and_as_json(fake: FakeServer, kvstow: Kvstow) -> None:
    fake.effects, fake.key = [STORES, RESTORES], KEY
    code, out, err = kvstow("--url", fake.url, "--api-key-env", "THE_KEY")
    assert (code, err) == (0, "")
    assert out.startswith(
        "works: the second request reused KV: 96 tokens from memory\ntime to first token: "
    )
    assert "identical text" in out
    fake.prompts.clear()
    code, out, _ = kvstow("--url", fake.url, "--api-key-env", "THE_KEY", "--json")
    assert (code, json.loads(out)["verdict"]) == (0, "restored")
    assert KEY not in out


def test_exit_codes(fake: FakeServer, kvstow: Kvstow) -> None:
    code, out, _ = kvstow("--url", "127.0.0.1:9", "--json")
    assert (code, json.loads(out)["verdict"]) == (1, "unreachable")
    assert kvstow("--url", "ftp://x")[0] == 1
    assert kvstow("--api-key-env", "NOT_SET")[0] == 2
    code, out, err = kvstow("--url", fake.url, "--api-key-env", "NO_KEY")
    assert (code, out, KEY in err) == (2, "", False)
    assert kvstow("--prompt-tokens", "0")[0] == 2


@pytest.mark.parametrize("package", ["httpx", "openai"])
def test_without_vllms_packages_it_says_where_to_run_it(
    kvstow: Kvstow, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = kvstow("--url", "127.0.0.1:9")
    assert (code, out) == (1, "")
    assert f"needs the package {package}: run it in vLLM's environment" in err
