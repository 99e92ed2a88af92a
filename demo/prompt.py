"""A long prompt of known length: a ship's log, and a question about it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

BLOCK_TOKENS: Final = 128  # vLLM's block size on CPUs
PROMPT_TOKENS: Final = 19 * BLOCK_TOKENS + 37  # whole blocks, and a rest that is computed each time

_PORTS: Final = ("Busan", "Lisbon", "Rotterdam", "Valparaiso", "Mombasa", "Hobart", "Bergen")
_CARGO: Final = (
    "copper wire",
    "green tea",
    "window glass",
    "seed potatoes",
    "ship's biscuit",
    "paper",
    "salt",
)
_WEATHER: Final = (
    "fog until noon",
    "a steady wind from the west",
    "heavy rain",
    "a clear sky",
    "long swells",
)


def entry(day: int) -> str:
    """One day of the log; every day differs, so no block repeats another."""
    port, cargo, weather = _PORTS[day % 7], _CARGO[(day * 3 + 1) % 7], _WEATHER[(day * 2) % 5]
    return (
        f"Day {day}. We had {weather} and made {90 + day * 7 % 60} miles. In the hold are {12 + day * 5} crates of "
        f"{cargo} for {port}; the mate stowed {day * 11 % 40 + 3} of them forward and counted the rest twice.\n"
    )


def ids(model: Path, text: str) -> list[int]:
    """Token ids of ``text``, special tokens recognised, none added."""
    from tokenizers import Tokenizer

    found: list[int] = (
        Tokenizer.from_file(str(model / "tokenizer.json"))
        .encode(text, add_special_tokens=False)
        .ids
    )
    return found


def long_prompt(model: Path, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Exactly ``tokens`` token ids: as much of the log as fits, then the question."""
    head = ids(model, "<|im_start|>user\nThe log of the barque Constance.\n")
    tail = ids(
        model,
        "\nWhat kind of text is this, and what does the ship carry?<|im_end|>\n<|im_start|>assistant\n",
    )
    log = ids(model, "".join(entry(day) for day in range(1, 2 + tokens // 30)))
    body = log[: tokens - len(head) - len(tail)]
    return head + body + tail
