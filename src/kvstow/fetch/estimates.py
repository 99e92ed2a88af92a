"""What a load or a recompute costs: estimates learned from what took how long, and how many chunks to wait for.

Pure arithmetic: no clock, no I/O; amounts and seconds come in, seconds and counts go out. Seconds against an amount
are a straight line (``Line``): for a tier over the bytes of a read and all that was under way when it was asked for,
so that its queue is in it; for computing over a step's prompt tokens, less what a step of decoding takes.
docs/decisions/0008-load-or-recompute.md has the model and its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

KEPT: Final = 0.9  # of what is known, at each observation: the last 10 or so count
ANCHOR: Final = 0.5  # weight of the point (0, 0): observations of one size alone would leave the line's slope open
FASTER: Final = 0.5  # an observation below this share of what was expected: the scale changes at once, by its root
SLOWER: Final = 4.0  # one above this multiple counts as this multiple ...
SLOWER_STEP: Final = (
    2.0  # ... and raises the scale by this: an outlier moves little, a few in a row move all
)

WIN: Final = 0.8  # a load must take at most this share of the time to compute what it brings: estimates are rough
SLACK_S: Final = (
    0.2  # longest wait for a sign of life beyond twice the expected; all of it without estimates
)
SLACK_SHARE: Final = 0.25  # of the time to compute: what a wait for nothing may cost at most, beyond twice the expected
ASSUMED_PREFILL_S: Final = (
    1 / 4000
)  # a prompt token on a fast engine, while nothing has been computed
MIN_PREFILL_TOKENS: Final = 64  # observed before the rate of computing is believed
PREFILL_WEIGHT_TOKENS: Final = (
    512  # a step of as many prompt tokens weighs 1, others by the square of theirs: what the
)
# tails of hits say of a token's time is little, and mostly how long steps differ anyway
MAX_WEIGHT: Final = 4.0


class Line:
    """Seconds as ``fixed_s + each_s * amount``, neither negative: least squares in which older observations fade.

    What is far off changes the scale of the whole line, so that one small observation of a tier that was slow and
    is fast again says as much as a large one.
    """

    __slots__ = ("_w", "_x", "_xx", "_xy", "_y", "each_s", "fixed_s")

    def __init__(self) -> None:
        self.fixed_s = self.each_s = 0.0
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._w > 0

    def seconds(self, amount: float) -> float:
        """Expected for ``amount``; 0 while nothing is known."""
        return self.fixed_s + self.each_s * amount

    def observe(self, amount: float, seconds: float, weight: float = 1.0) -> None:
        """``amount`` (above 0) took ``seconds``."""
        expected = self.seconds(amount)
        if expected > 0 and seconds < FASTER * expected:
            self._rescale(max(seconds / expected, 1e-6) ** (0.5 * min(1.0, weight)))
        elif expected > 0 and seconds > SLOWER * expected:
            seconds = SLOWER * expected
            self._rescale(
                SLOWER_STEP ** min(1.0, weight, amount * self._w / self._x)
            )  # a small one: more is fixed
        kept = KEPT**weight
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
        weight = self._w + ANCHOR
        mean_x, mean_y = self._x / weight, self._y / weight
        spread = self._xx / weight - mean_x * mean_x
        each = max(0.0, (self._xy / weight - mean_x * mean_y) / spread) if spread > 0 else 0.0
        fixed = mean_y - each * mean_x
        if fixed < 0:
            each, fixed = self._xy / self._xx, 0.0
        self.each_s, self.fixed_s = each, fixed


class Mean:
    """Seconds of something that has no size: an average in which older observations fade, outliers count little."""

    __slots__ = ("known", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.known = False

    def observe(self, seconds: float) -> None:
        if not self.known:
            self.known, self.seconds = True, seconds
            return
        self.seconds = self.seconds * KEPT + min(seconds, max(SLOWER * self.seconds, 1e-6)) * (
            1 - KEPT
        )


class Costs:
    """What one engine has learned. ``chunk_tokens``: of a chunk; ``min_tokens`` replaces what is learned about when
    loading pays: it does from so many tokens on, 0 for always; None: learned."""

    def __init__(self, tiers: int, chunk_tokens: int, *, min_tokens: int | None = None) -> None:
        self.min_tokens = min_tokens
        self.chunk_tokens = chunk_tokens
        self.reads = [Line() for _ in range(tiers)]
        self.probes = [Mean() for _ in range(tiers)]
        self._prefill = Line()
        self._prefill_tokens = 0
        self._decode = Mean()
        self.backlog_tokens = (
            0  # prompt tokens that this engine must compute before those of who asks now
        )

    @property
    def learned(self) -> bool:
        """Whether decisions go by what is learned."""
        return self.min_tokens is None

    # --- learning -----------------------------------------------------------------------------------------------------

    def stepped(self, prefill_tokens: int, seconds: float) -> None:
        """A step of the engine that computed so many prompt tokens, and decoded perhaps."""
        if seconds <= 0:
            return
        if prefill_tokens <= 0:
            self._decode.observe(seconds)
            return
        self._prefill_tokens += prefill_tokens
        if (
            seconds > self._decode.seconds
        ):  # else it tells nothing: other decodes than this step's were slower
            weight = min(MAX_WEIGHT, (prefill_tokens / PREFILL_WEIGHT_TOKENS) ** 2)
            self._prefill.observe(prefill_tokens, seconds - self._decode.seconds, weight)

    @property
    def prefill_s(self) -> float | None:
        """Seconds per prompt token. None: not known yet."""
        return self._prefill.each_s if self._prefill_tokens >= MIN_PREFILL_TOKENS else None

    # --- expecting ----------------------------------------------------------------------------------------------------

    def compute_s(self, chunks: int) -> float | None:
        """Until so many chunks were computed, if not loaded. None: not known yet."""
        each = self.prefill_s
        return None if each is None else each * (self.chunk_tokens * chunks + self.backlog_tokens)

    def load_s(self, tier: int, size: int) -> float | None:
        """To read ``size`` bytes, all that is under way before included. None: not known yet."""
        line = self.reads[tier]
        return line.seconds(size) if line.known else None

    # --- deciding -----------------------------------------------------------------------------------------------------

    def worth(self, tier: int, size: int, gained: int) -> bool:
        """Whether to ask ``tier`` at all for ``size`` bytes that would bring ``gained`` chunks, if it has them."""
        if self.min_tokens is not None:
            return gained * self.chunk_tokens >= self.min_tokens
        load, compute = self.load_s(tier, size), self.compute_s(gained)
        return load is None or compute is None or load + self.probes[tier].seconds <= WIN * compute

    def plan(self, ready_s: Sequence[float | None], *, had: int = 0, going_on: bool = False) -> int:
        """How many chunks to wait for, of a run whose chunk ``i`` is expected in ``ready_s[i]`` seconds (None: nobody
        knows, 0: it is here): the number that saves most, 0 when none does. ``had``: chunks that have come already.

        What is loaded while the engine computes its backlog costs nothing. Without an estimate of computing all are
        worth a first wait, and ``going_on`` with it only as far as a fast engine would not have computed them.
        """
        if self.min_tokens is not None:
            enough = going_on or (had + len(ready_s)) * self.chunk_tokens >= self.min_tokens
            return len(ready_s) if enough else 0
        prefill_s = self.prefill_s
        if prefill_s is None:
            if not going_on:
                return len(ready_s)
            prefill_s = ASSUMED_PREFILL_S
        each, free_s = WIN * prefill_s * self.chunk_tokens, prefill_s * self.backlog_tokens
        best, saved, wait = 0, 0.0, 0.0
        for count, ready in enumerate(ready_s, 1):
            wait = max(wait, (ready or 0.0) - free_s)
            if each * count - wait > saved:
                best, saved = count, each * count - wait
        return best

    def pays_from(self, tier: int, size: int, queued: int) -> int | None:
        """The least number of chunks of ``size`` bytes, behind ``queued`` others, that pays. None: no number does."""
        each, line = self.prefill_s, self.reads[tier]
        if each is None:
            return 1
        over_s = line.seconds(queued) - each * self.backlog_tokens
        gain = WIN * each * self.chunk_tokens - line.each_s * size
        return 1 if over_s <= 0 else ceil(over_s / gain) if gain > 0 else None

    def patience_s(self, first_s: float | None, compute_s: float | None) -> float:
        """How long to wait before looking again, when the next chunk is expected in ``first_s`` and all that was
        waited for would have taken ``compute_s`` to compute."""
        if compute_s is None:
            return SLACK_S
        if first_s is None:
            return min(SLACK_S, compute_s)
        return min(compute_s, max(2 * first_s, min(SLACK_SHARE * compute_s, SLACK_S)))
