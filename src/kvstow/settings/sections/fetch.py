"""Settings of fetches from lower tiers: when to load, and when to compute instead."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class FetchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fetches of chunks that only a lower tier holds, whichever."""

    deadline_ms: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=0, le=60_000)],
        Meta(
            description="The longest that a request waits, in all, for chunks that only a lower tier holds. Then it "
            "goes on with what has arrived and computes the rest. `auto`: at most as long as computing them would "
            "take, and no longer than 200 ms without a sign of life beyond what was expected."
        ),
    ] = "auto"
    min_tokens: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=0, le=1 << 30)],
        Meta(
            description="The least number of prompt tokens to load from a lower tier rather than compute. `auto`: from "
            "as many on as loading is faster, by what both have taken so far. 0: whatever is found is loaded."
        ),
    ] = "auto"
