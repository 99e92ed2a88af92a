"""A client of one OpenAI-compatible server: its models, its metrics, a streamed completion.

It needs ``httpx`` and ``openai``, which vLLM's environment has and kvstow does not depend on.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, field

from kvstow.errors import KVStowError, UnsupportedError
from kvstow.fields.values import MASK, masked
from kvstow.runtime import Clock

MAX_BODY_BYTES: Final = 16 << 20
MAX_MESSAGE: Final = 300  # characters of the server's own message
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
NO_KEY: Final = "none"  # openai's client wants a key; a server without keys ignores it


class ServerFault(KVStowError):
    """The server can't be asked. ``status`` is HTTP's, or 0 if there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Model(Struct, frozen=True):
    """A model of ``/v1/models``.

    ``max_tokens`` is the limit of prompt and answer together, or None if the server doesn't say.
    """

    name: str = field(name="id")
    max_tokens: int | None = field(name="max_model_len", default=None)


class _Models(Struct):
    data: list[Model]


class Answer(NamedTuple):
    """A completion. ``cached_tokens`` of its prompt is None if the server doesn't say."""

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None


class Server:
    """Requests to one server, none of which outlasts ``deadline_s`` on the monotonic clock.

    A redirect is an error, so that the key goes nowhere else.
    """

    def __init__(self, url: str, api_key: str | None, clock: Clock, deadline_s: float) -> None:
        """Raises ``ServerFault`` for what is no HTTP URL, ``UnsupportedError`` if a package is
        missing.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ServerFault(
                f"{masked(url)} is no URL such as http://127.0.0.1:8000, without user and password"
            )
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._key = api_key
        self._clock = clock
        self._deadline_s = deadline_s
        try:
            import httpx
            import openai
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"verify-offload needs the package {error.name}: run it in vLLM's environment"
            ) from error
        self._openai = openai
        self._http_error = httpx.HTTPError
        proxies = parts.hostname not in LOOPBACK
        tls = ssl.create_default_context()  # the system's authorities, and SSL_CERT_FILE's
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, trust_env=proxies, verify=tls)
        self._client = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key or NO_KEY,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                follow_redirects=False, trust_env=proxies, verify=tls
            ),
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()
        self._client.close()

    def models(self) -> list[Model]:
        """Returns the server's models."""
        try:
            return msgspec.json.decode(self._get("/v1/models"), type=_Models).data
        except (ValueError, RecursionError) as error:
            raise ServerFault(
                f"{self.url}/v1/models is not what an OpenAI-compatible server answers"
            ) from error

    def metrics(self) -> str:
        """Returns ``/metrics``, in Prometheus' text format."""
        return self._get("/metrics").decode(errors="replace")

    def complete(self, model: str, prompt: str, max_tokens: int) -> Answer:
        """Completes a prompt greedily.

        The time to the first token runs from the request to the first event with text.
        """
        began = self._clock.monotonic()
        first = 0.0
        text = ""
        usage = None
        try:
            for event in self._events(model, prompt, max_tokens):
                for choice in event.choices or ():
                    text += choice.text or ""
                    first = first or self._clock.monotonic()
                usage = event.usage or usage
            prompt_tokens = usage.prompt_tokens if usage is not None else 0
            details = usage.prompt_tokens_details if usage is not None else None
            cached = details.cached_tokens if details is not None else None
            counted = prompt_tokens >= 1
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ServerFault("the server's answer is no event stream") from error
        if not first:
            raise ServerFault("the server's answer has no text")
        if not counted:
            raise ServerFault("the server's answer does not say how many tokens the prompt has")
        return Answer(text, first - began, prompt_tokens, cached)

    def _events(self, model: str, prompt: str, max_tokens: int) -> Iterator[Any]:
        """Events of a streamed completion. Raises ``ServerFault``."""
        errors = self._openai
        try:
            with self._client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=0,
                seed=0,
                stream=True,
                stream_options={"include_usage": True},
                timeout=self._left_s(),
            ) as stream:
                for event in stream:
                    yield event
                    self._left_s()
        except errors.APIStatusError as error:
            location = error.response.headers.get("location")
            raise self._refused(
                "/v1/completions", error.status_code, error.body, location
            ) from None
        except errors.APIConnectionError as error:
            raise self._unreachable(error.__cause__ or error) from error
        except errors.APIError as error:  # an event says that the server failed
            raise ServerFault(
                f"the server failed: {self._words(error.body or error)}", 500
            ) from None
        except self._http_error as error:
            raise self._unreachable(error) from error

    def _get(self, path: str) -> bytes:
        """The body of an answer, at most ``MAX_BODY_BYTES``. Raises ``ServerFault``."""
        body = bytearray()
        try:
            with self._http.stream("GET", self.url + path, timeout=self._left_s()) as response:
                for piece in response.iter_bytes():
                    body += piece
                    if len(body) > MAX_BODY_BYTES:
                        raise ServerFault(f"{path}: an answer of more than {MAX_BODY_BYTES} bytes")
                    self._left_s()
        except self._http_error as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            location = response.headers.get("location")
            raise self._refused(path, response.status_code, bytes(body), location)
        return bytes(body)

    def _left_s(self) -> float:
        """Seconds until the deadline. Raises ``ServerFault`` after it."""
        left_s = self._deadline_s - self._clock.monotonic()
        if left_s <= 0:
            raise ServerFault("the time given is over")
        return left_s

    def _unreachable(self, error: BaseException) -> ServerFault:
        return ServerFault(f"{self.url} can't be asked: {str(error) or type(error).__name__}")

    def _refused(self, path: str, status: int, body: object, location: str | None) -> ServerFault:
        """The fault for an answer of another status than 200."""
        if location is not None and 300 <= status < 400:
            words = self._words(f"it is at {masked(location)}")
        else:
            words = self._words(body)
        return ServerFault(f"{path}: HTTP {status}: {words}", status)

    def _words(self, body: object) -> str:
        """The server's own message, without our key."""
        if isinstance(body, bytes):
            try:
                body = msgspec.json.decode(body)
            except (ValueError, RecursionError):
                body = ""
        if isinstance(body, dict):
            body = body.get("error", body)
        if isinstance(body, dict):
            body = body.get("message", body)
        text = str(body or "no message")
        return (text.replace(self._key, MASK) if self._key else text)[:MAX_MESSAGE]
