"""How long vLLM's steps take, as its scheduler sees them. Loading is measured against it.

A step begins when its metadata is built and ends when the workers' answer to it comes. With
asynchronous scheduling and pipelines the next one is built before that: it begins, for the workers,
when the one before has ended. Workers give a step's number back, because vLLM passes on no answer
of a step that had nothing to do.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstow.cache import Cache
from kvstow.runtime import Clock

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MAX_OPEN_STEPS: Final = 16  # vLLM has as many under way as it has pipeline stages, or two


class _Step(NamedTuple):
    number: int
    began_s: float
    prefill_tokens: int


class StepTimes:
    """Times vLLM's steps and reports each to the cache, on the owner's thread only."""

    def __init__(self, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._open: deque[_Step] = deque(maxlen=MAX_OPEN_STEPS)
        self._number = 0
        self._ended_s = float("-inf")
        self._backlog = 0

    def admitted(self, tokens: int) -> None:
        """Adds ``tokens`` of a request's prompt to those that vLLM is going to compute."""
        if self._cache.learns:
            self._set_backlog(self._backlog + tokens)

    def _set_backlog(self, tokens: int) -> None:
        if tokens != self._backlog:
            self._backlog = tokens
            self._cache.set_backlog(tokens)

    def began(self, output: SchedulerOutput) -> int:
        """Starts timing a step.

        Returns the number that the workers give back; 0 asks for no answer.
        """
        if not output.total_num_scheduled_tokens or not self._cache.learns:
            return 0
        prefill = prefill_tokens(output)
        # A request that is gone or preempted is not subtracted: with nothing to compute there is no
        # backlog either.
        self._set_backlog(max(0, self._backlog - prefill) if prefill else 0)
        self._number += 1
        self._open.append(_Step(self._number, self._clock.monotonic(), prefill))
        return self._number

    def ended(self, number: int) -> None:
        """Reports step ``number``, which the workers have done, to the cache."""
        while self._open and self._open[0].number <= number:
            step = self._open.popleft()
            if step.number == number:
                now = self._clock.monotonic()
                self._cache.observe_step(
                    step.prefill_tokens, now - max(step.began_s, self._ended_s)
                )
                self._ended_s = now


def prefill_tokens(output: SchedulerOutput) -> int:
    """Returns how many of a step's tokens are prompt tokens.

    Of each request scheduled before, one token and the drafts are not.
    """
    drafts = sum(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
    return output.total_num_scheduled_tokens - drafts - len(output.scheduled_cached_reqs.req_ids)
