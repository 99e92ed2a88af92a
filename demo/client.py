"""A streaming OpenAI client that times the first token."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import openai

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion. ``ttft_s`` runs from sending the request to the first chunk of text."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int


class Client:
    """Completions from one server, one at a time, greedy."""

    def __init__(self, url: str, model: str) -> None:
        self._openai = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            timeout=REQUEST_TIMEOUT_S,
            max_retries=0,
            http_client=openai.DefaultHttpxClient(
                trust_env=False
            ),  # a proxy can't reach this host's loopback
        )
        self._model = model

    def complete(
        self, prompt: str | list[int], *, max_tokens: int = 32, extra: dict[str, Any] | None = None
    ) -> Answer:
        """Stream a completion of ``prompt`` (text or token ids). ``extra`` is vLLM's own request fields."""
        started = time.perf_counter()
        stream = self._openai.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra or {},
        )
        text, first, prompt_tokens = "", 0.0, 0
        for event in stream:
            if event.choices:
                first = first or time.perf_counter()
                text += event.choices[0].text
            if event.usage:
                prompt_tokens = event.usage.prompt_tokens
        return Answer(
            text,
            (first or time.perf_counter()) - started,
            time.perf_counter() - started,
            prompt_tokens,
        )
