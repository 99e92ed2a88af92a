"""Estimates of what reading a chunk costs, and of what computing it costs, learned at run time.

This module only does arithmetic: callers pass amounts and seconds in. The seconds of a read are a
linear function of its bytes plus all bytes queued before it, so a tier's queue is part of the
estimate. The seconds of computing are a linear function of a step's prompt tokens.
docs/decisions/0008-load-or-recompute.md describes the model and its limits.
"""

from __future__ import annotations

from typing import Final

#: Share of the old observations' weight that remains at each new one: about the last 10 count.
DECAY: Final = 0.9
#: Weight of an observation "amount 0 took 0 s". Without it, observations of one size would leave
#: the slope undefined.
ORIGIN_WEIGHT: Final = 0.5
#: An observation this many times faster than expected rescales the whole estimate, and so does one
#: slower by the square of it. The square is as far as a slow outlier counts.
SURPRISE: Final = 2.0
#: Prompt tokens of a step with weight 1. Smaller steps weigh by the square of their share: the tail
#: of a hit says more about how steps differ than about a token. The rate of computing is believed
#: after an eighth of as many tokens.
PREFILL_TOKENS: Final = 512


class LinearEstimate:
    """An estimate of seconds as ``fixed_s + unit_s * amount``; neither part is negative.

    It is fitted by least squares with decaying weights. A surprise changes both parts at once, so
    one small observation of a tier that was slow and is fast again says as much as a large one.
    """

    __slots__ = ("_w", "_x", "_xx", "_xy", "_y", "fixed_s", "unit_s")

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.unit_s = 0.0
        self._w = 0.0  # weighted sums: of 1, amounts, seconds, squares and products
        self._x = 0.0
        self._y = 0.0
        self._xx = 0.0
        self._xy = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._w > 0

    def seconds(self, amount: float) -> float:
        """The expected seconds for ``amount``; 0 before the first observation."""
        return self.fixed_s + self.unit_s * amount

    def observe(self, amount: float, seconds: float, weight: float = 1.0) -> None:
        """Learn that ``amount``, which is above 0, took ``seconds``."""
        expected = self.seconds(amount)
        slow = SURPRISE * SURPRISE
        if expected > 0 and seconds * SURPRISE < expected:
            self._rescale(max(seconds / expected, 1e-6) ** (0.5 * min(1.0, weight)))
        elif expected > 0 and seconds > slow * expected:
            seconds = slow * expected
            # The time of a small amount is mostly fixed, so it says little about the scale.
            self._rescale(SURPRISE ** min(1.0, weight, amount * self._w / self._x))
        kept = DECAY**weight
        self._w = self._w * kept + weight
        self._x = self._x * kept + weight * amount
        self._y = self._y * kept + weight * seconds
        self._xx = self._xx * kept + weight * amount * amount
        self._xy = self._xy * kept + weight * amount * seconds
        self._solve()

    def _rescale(self, factor: float) -> None:
        self._y *= factor
        self._xy *= factor

    def _solve(self) -> None:
        weight = self._w + ORIGIN_WEIGHT
        mean_x = self._x / weight
        mean_y = self._y / weight
        spread = self._xx / weight - mean_x * mean_x
        slope = 0.0
        if spread > 0:
            slope = max(0.0, (self._xy / weight - mean_x * mean_y) / spread)
        self.unit_s = slope
        self.fixed_s = mean_y - slope * mean_x
        if self.fixed_s < 0:
            self.unit_s = self._xy / self._xx
            self.fixed_s = 0.0


class MovingAverage:
    """A decaying average of seconds, None before the first observation. Outliers count little."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None

    def observe(self, seconds: float) -> None:
        if self.seconds is None:
            self.seconds = seconds
            return
        most = max(SURPRISE * SURPRISE * self.seconds, 1e-6)
        self.seconds = self.seconds * DECAY + min(seconds, most) * (1 - DECAY)


class Estimates:
    """The estimates of one engine: each lower tier's reads and probes, and the rate of computing."""

    def __init__(self, tiers: int) -> None:
        self.reads = [LinearEstimate() for _ in range(tiers)]  # seconds over bytes
        self.probes = [MovingAverage() for _ in range(tiers)]
        #: Prompt tokens that vLLM has admitted and not computed; they come before a new request's.
        self.backlog_tokens = 0
        self._prefill = LinearEstimate()  # seconds over tokens
        self._prefill_tokens = 0
        self._decode = MovingAverage()

    def observe_step(self, prefill_tokens: int, seconds: float) -> None:
        """Learn from a step that computed ``prefill_tokens`` prompt tokens and perhaps decoded."""
        if seconds <= 0:
            return
        if prefill_tokens <= 0:
            self._decode.observe(seconds)
            return
        self._prefill_tokens += prefill_tokens
        prefill_s = seconds - (self._decode.seconds or 0.0)
        if prefill_s > 0:  # otherwise this step's decoding was quicker than most, and tells nothing
            weight = min(1.0, (prefill_tokens / PREFILL_TOKENS) ** 2)
            self._prefill.observe(prefill_tokens, prefill_s, weight)

    @property
    def prefill_s(self) -> float | None:
        """Seconds to compute a prompt token. None: too little was observed."""
        return self._prefill.unit_s if self._prefill_tokens >= PREFILL_TOKENS // 8 else None
