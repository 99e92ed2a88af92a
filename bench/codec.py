"""Codecs on KV that the demo's model computes for three fixed texts (bench/texts).

One core, with zstd level 1 beside them.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Final

from demo.model import smollm2
from kvstow.codec import choose, effect

TEXTS: Final = ("prose", "agent_prompt", "source_code")


def run() -> dict[str, Any]:
    """Medians over the texts; mean KL is the mean, and each text's perplexity is beside it."""
    texts = [(Path(__file__).parent / "texts" / f"{name}.txt").read_text() for name in TEXTS]
    names = choose.NAMES[1:]
    rows = list(effect.measure(str(smollm2()), texts, [choose.codec(name) for name in names]))
    result: dict[str, Any] = {}
    for index, name in enumerate(names):
        mine = rows[index :: len(names)]
        found = {key: median(row[key] for row in mine) for key in effect.Speed._fields}
        if "mean_kl" in mine[0]:
            found["mean_kl"] = sum(row["mean_kl"] for row in mine) / len(mine)
            for text, row in zip(TEXTS, mine, strict=True):
                found[f"perplexity_{text}_before"] = row["perplexity_before"]
                found[f"perplexity_{text}"] = row["perplexity"]
        result[name.replace(":", "_")] = found
    return {"bench": {"codec": result}}


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=2))
