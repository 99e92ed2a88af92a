"""``kvstow codec``: what a codec saves, costs and does to a model, before it is switched on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvstow.errors import UnsupportedError

app = typer.Typer(no_args_is_help=True, help="What codecs save, cost, and do to a model.")

ModelOption = Annotated[
    Path,
    typer.Option(
        exists=True, file_okay=False, help="A Hugging Face directory with a causal language model."
    ),
]
TextsArgument = Annotated[
    list[Path],
    typer.Argument(exists=True, dir_okay=False, help="Text files of at least 1,152 tokens each."),
]
CodecOption = Annotated[
    list[str] | None, typer.Option("--codec", help="lossless, quantized:low, …; may be repeated.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.callback()
def root() -> None:
    """What codecs save, cost, and do to a model."""


@app.command()
def bench(
    texts: TextsArgument, model: ModelOption, codec: CodecOption = None, as_json: JsonOption = False
) -> None:
    """Ratio, speed on one core beside zstd level 1, perplexity and mean KL of a real model on your own texts.

    Needs torch, transformers and the extra `codec`. On a CPU: a minute for each text.
    """
    try:
        from kvstow.codec import choose, effect
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"{error.name} is missing; kvstow[codec], torch and transformers are needed"
        ) from error
    codecs = [choose.codec(name) for name in codec or choose.NAMES[1:]]
    try:
        rows = list(effect.measure(str(model), [path.read_text() for path in texts], codecs))
    except (
        OSError,
        ValueError,
    ) as error:  # no model there, a text that is too short or isn't UTF-8
        raise UnsupportedError(f"--model {model}: {error}") from error
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'text':<20} {'codec':<18} ratio  encode  decode GB/s (times zstd-1)  perplexity  mean KL"
    )
    names = iter([name for _ in texts for name in codec or choose.NAMES[1:]])
    for row in rows:
        line = f"{texts[row['text']].name:<20} {next(names):<18} {row['ratio']:5.2f}  "
        line += f"{row['encode_gb_s']:.2f} ({row['encode_over_zstd1']:.2f})  "
        line += f"{row['decode_gb_s']:.2f} ({row['decode_over_zstd1']:.2f})"
        if "mean_kl" in row:
            line += (
                f"  {row['perplexity_before']:.3f} to {row['perplexity']:.3f}  {row['mean_kl']:.4f}"
            )
        print(line)
