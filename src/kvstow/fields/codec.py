"""The codec of a tier: one field, the same in every tier's section."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

RAW: Final = "raw"

Codec: TypeAlias = Annotated[
    Literal[
        "raw",
        "lossless",
        "fp8",
        "int8",
        "quantized",
        "quantized:high",
        "quantized:middle",
        "quantized:low",
    ],
    Meta(
        description="How chunks are made smaller on their way to this tier. `lossless` gives back every bit; `fp8`, "
        "`int8` and `quantized` (of high, middle or low quality, middle if not said) change outputs a little. All but "
        "`raw` need `pip install 'kvstow[codec]'`."
    ),
]
