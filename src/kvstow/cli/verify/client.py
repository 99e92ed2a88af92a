"""An OpenAI-compatible server over HTTP: its models, its metrics, one streamed completion. Every answer is bounded."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from kvstow.errors import KVStowError
from kvstow.runtime import Clock
from kvstow.settings.values import MASK, masked

MAX_BODY_BYTES: Final = 16 << 20
MAX_MESSAGE: Final = 300  # characters of the server's words in a message
READ_BYTES: Final = 64 << 10
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class ServerFault(KVStowError):
    """The server can't be asked. ``status`` is HTTP's; 0: there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Model(Struct, frozen=True):
    """One of ``/v1/models``. ``max_tokens``: a prompt's and its answer's, where the server tells."""

    name: str = field(name="id")
    max_tokens: int | None = field(name="max_model_len", default=None)


class _Models(Struct):
    data: list[Model]


class _Choice(Struct):
    text: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class Answer(NamedTuple):
    """``cached_tokens``: of the prompt, where the server tells."""

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key must not go elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """``until_s``: on the monotonic clock, when nothing more is waited for."""

    def __init__(self, url: str, api_key: str | None, clock: Clock, until_s: float) -> None:
        """Raises ``ServerFault`` for what is no HTTP URL."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ServerFault(
                f"{masked(url)} is no URL such as http://127.0.0.1:8000, without user and password"
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._key = api_key or ""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._clock = clock
        self._until_s = until_s
        direct = [urllib.request.ProxyHandler({})] if parts.hostname in LOOPBACK else []
        self._opener = urllib.request.build_opener(_NoRedirect, *direct)

    def models(self) -> list[Model]:
        try:
            return msgspec.json.decode(b"".join(self._pieces("/v1/models")), type=_Models).data
        except (ValueError, RecursionError) as error:
            raise ServerFault(
                f"{self.url}/v1/models is not what an OpenAI-compatible server answers"
            ) from error

    def metrics(self) -> str:
        return b"".join(self._pieces("/metrics")).decode(errors="replace")

    def complete(self, model: str, prompt: str, max_tokens: int) -> Answer:
        """Greedy. The time to the first token runs from the request to the first event with text."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, text = self._clock.monotonic(), 0.0, ""
        usage = _Usage()
        for event in self._events(body):
            if event.error:
                raise ServerFault(f"the server failed: {self._words(event.error)}", 500)
            for choice in event.choices or ():
                text += choice.text or ""
                first = first or self._clock.monotonic()
            usage = event.usage or usage
        if not first:
            raise ServerFault("the server's answer has no text")
        if usage.prompt_tokens < 1:
            raise ServerFault("the server's answer does not say how many tokens the prompt has")
        details = usage.prompt_tokens_details or _Details()
        return Answer(text, first - began, usage.prompt_tokens, details.cached_tokens)

    def _events(self, body: Mapping[str, Any]) -> Iterator[_Event]:
        left = b""
        for piece in self._pieces("/v1/completions", json.dumps(body).encode()):
            *lines, left = (left + piece).split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                try:
                    yield msgspec.json.decode(data, type=_Event)
                except (ValueError, RecursionError) as error:
                    raise ServerFault("the server's answer is no event stream") from error

    def _pieces(self, path: str, body: bytes | None = None) -> Iterator[bytes]:
        """The answer as it comes. Raises ``ServerFault``."""
        headers = {**self._headers, **({"Content-Type": "application/json"} if body else {})}
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        size = 0
        try:
            with self._opener.open(request, timeout=self._left_s()) as response:
                while piece := response.read1(READ_BYTES):
                    size += len(piece)
                    if size > MAX_BODY_BYTES:
                        raise ServerFault(f"{path}: an answer of more than {MAX_BODY_BYTES} bytes")
                    yield piece
                    self._left_s()
        except urllib.error.HTTPError as error:
            with error:
                raise ServerFault(
                    f"{path}: HTTP {error.code}: {self._message(error)}", error.code
                ) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerFault(
                f"{self.url} can't be asked: {reason or type(error).__name__}"
            ) from error

    def _left_s(self) -> float:
        left = self._until_s - self._clock.monotonic()
        if left <= 0:
            raise ServerFault("the time given is over")
        return left

    def _message(self, error: urllib.error.HTTPError) -> str:
        if 300 <= error.code < 400:
            return self._words(f"it is at {masked(str(error.headers.get('Location')))}")
        try:
            body = json.loads(error.read(READ_BYTES))
        except (OSError, ValueError, RecursionError):
            body = str(error.reason)
        return self._words(body.get("error", body) if isinstance(body, dict) else body)

    def _words(self, error: object) -> str:
        """What the server says, which may be our key."""
        text = str(error.get("message", error) if isinstance(error, dict) else error)
        return (text.replace(self._key, MASK) if self._key else text)[:MAX_MESSAGE]
