"""Codecs on KV of a model: three fixed texts (``bench/texts``) and the demo's model, or your own.

``python -m bench.codec --model DIR TEXT...`` measures a Hugging Face causal language model on text files of
at least 1,152 tokens each. zstd level 1 on the same bytes is measured beside each codec. One core is used.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.codec_effect import Speed, measure
from demo.model import smollm2
from kvstow.codec import choose

TEXTS: Final = tuple(
    Path(__file__).parent / "texts" / f"{name}.txt"
    for name in ("prose", "agent_prompt", "source_code")
)


def run(
    model: Path | None = None,
    texts: Sequence[Path] = TEXTS,
    names: Sequence[str] = choose.NAMES[1:],
) -> dict[str, Any]:
    """Returns medians over the texts of each codec, the mean KL, and each text's perplexity.

    ``model`` is a directory, or None for the demo's model. ``names`` are codecs.
    """
    codecs = [choose.codec(name) for name in names]
    contents = [path.read_text() for path in texts]
    rows = list(measure(str(model or smollm2()), contents, codecs))
    result: dict[str, Any] = {}
    for index, name in enumerate(names):
        of_codec = rows[index :: len(names)]
        figures = {key: median(row[key] for row in of_codec) for key in Speed._fields}
        if "mean_kl" in of_codec[0]:
            figures["mean_kl"] = sum(row["mean_kl"] for row in of_codec) / len(of_codec)
            for path, row in zip(texts, of_codec, strict=True):
                figures[f"perplexity_{path.stem}_before"] = row["perplexity_before"]
                figures[f"perplexity_{path.stem}"] = row["perplexity"]
        result[name.replace(":", "_")] = figures
    return {"bench": {"codec": result}}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", type=Path, default=TEXTS, metavar="TEXT")
    parser.add_argument("--model", type=Path, help="a directory; default: the demo's model")
    parser.add_argument("--codec", action="append", help="lossless, quantized:low, ...; repeatable")
    arguments = parser.parse_args()
    names = arguments.codec or choose.NAMES[1:]
    print(json.dumps(run(arguments.model, arguments.texts, names), indent=2))


if __name__ == "__main__":
    main()
