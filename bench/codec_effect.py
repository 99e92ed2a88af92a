"""Measures codecs on the KV of a real model: size, speed, and the effect on the model's predictions.

A text's first ``PREFIX`` tokens are computed in float32 and their KV is rounded to bfloat16. Each codec
encodes and decodes it. The model then scores the rest of the text twice: after the decoded KV, and after
the bfloat16 KV itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from backports import zstd

from kvstow.codec.base import Codec
from kvstow.codec.shape import Array, KVShape

BLOCK: Final = 128
PREFIX: Final = 8 * BLOCK
MOST_SCORED: Final = 512
ROUNDS: Final = 5


class Speed(NamedTuple):
    """Speed of one core in GB/s of bfloat16 bytes, and relative to zstd level 1 on the same bytes."""

    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    encode_over_zstd1: float
    decode_over_zstd1: float
    zstd1_ratio: float


class Effect(NamedTuple):
    """Perplexity after the decoded KV and before coding, and the mean KL of the next token, in nats."""

    perplexity: float
    perplexity_before: float
    mean_kl: float


class Subject:
    """A causal language model in a Hugging Face directory, and the KV of one text's prefix."""

    def __init__(self, directory: str, text: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()
        ids = AutoTokenizer.from_pretrained(directory)(text).input_ids[: PREFIX + MOST_SCORED]
        if len(ids) < PREFIX + BLOCK:
            raise ValueError(f"a text of {len(ids)} tokens, at least {PREFIX + BLOCK} are needed")
        self._rest = torch.tensor([ids[PREFIX:]])
        with torch.inference_mode():
            cache: Any = self._model(
                torch.tensor([ids[:PREFIX]]), use_cache=True, logits_to_keep=1
            ).past_key_values
        kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers])
        self._kv: Array = (
            kv.to(torch.bfloat16).view(torch.uint16).numpy()
        )  # [layers, 2, heads, tokens, size]
        layers, _, heads, _, size = self._kv.shape
        self.shape: Final = KVShape("bfloat16", layers, 1, 2, heads, BLOCK, size, "hknc")
        self._before = self._score(self._kv)

    def payloads(self) -> list[bytes]:
        """The prefix in chunks of one block, as vLLM's CPU backend lays them out."""
        starts = range(0, PREFIX, BLOCK)
        return [
            self._kv[:, :, :, at : at + BLOCK].transpose(0, 2, 1, 3, 4).tobytes() for at in starts
        ]

    def effect(self, codec: Codec) -> Effect:
        """The effect of coding the prefix on how the model scores the rest of the text."""
        chunks = []
        for payload in self.payloads():
            back = bytearray(self.shape.nbytes)
            codec.decode(_encoded(codec, payload, self.shape), self.shape, memoryview(back))
            pages = np.frombuffer(back, np.uint16).reshape(self.shape.layers, *self.shape.page)
            chunks.append(pages.transpose(0, 2, 1, 3, 4))
        before = self._before
        after = self._score(np.concatenate(chunks, axis=3))
        divergence = (before.exp() * (before - after)).sum(-1).mean()
        return Effect(self._perplexity(after), self._perplexity(before), float(divergence))

    def _score(self, kv: Array) -> torch.Tensor:
        """Returns log probabilities after each token of the rest of the text."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        values = torch.from_numpy(kv.copy()).view(torch.bfloat16).float()
        for index, (keys, layer_values) in enumerate(values):
            cache.update(keys[None], layer_values[None], index)
        with torch.inference_mode():
            logits = self._model(self._rest, past_key_values=cache, use_cache=True).logits[0]
        return torch.log_softmax(logits.double(), -1)

    def _perplexity(self, log_p: torch.Tensor) -> float:
        return float((-log_p[:-1].gather(1, self._rest[0, 1:, None]).mean()).exp())


def speed(codec: Codec, payloads: Sequence[bytes], shape: KVShape, rounds: int = ROUNDS) -> Speed:
    """Measures CPU seconds of this thread, which other processes disturb less than wall time.

    The codec and zstd alternate. Each runs once untimed before its timed run, so that neither pays for
    memory that the other has freed.
    """
    times: dict[str, list[float]] = {"encode": [], "decode": [], "pack": [], "unpack": []}
    size = packed_size = 0
    for at in range(max(rounds, len(payloads))):
        payload = payloads[at % len(payloads)]
        encoded = _encoded(codec, payload, shape)
        packed = zstd.compress(payload, 1)
        size += len(encoded)
        packed_size += len(packed)
        out = memoryview(bytearray(codec.max_encoded_bytes(shape)))
        back = memoryview(bytearray(shape.nbytes))
        times["encode"].append(
            _seconds(lambda p=payload, o=out: codec.encode(memoryview(p), shape, o))
        )
        times["pack"].append(_seconds(lambda p=payload: zstd.compress(p, 1)))
        times["decode"].append(_seconds(lambda e=encoded, b=back: codec.decode(e, shape, b)))
        times["unpack"].append(_seconds(lambda p=packed: zstd.decompress(p)))
    encode = median(times["encode"])
    decode = median(times["decode"])
    pack = median(times["pack"])
    unpack = median(times["unpack"])
    raw = shape.nbytes * len(times["encode"])
    giga = shape.nbytes / 1e9
    return Speed(
        raw / size, giga / encode, giga / decode, pack / encode, unpack / decode, raw / packed_size
    )


def measure(
    directory: str, texts: Sequence[str], codecs: Sequence[Codec]
) -> Iterator[dict[str, Any]]:
    """Yields a row for each text and codec: its speed and, of a lossy codec, its effect."""
    for number, text in enumerate(texts):
        subject = Subject(directory, text)
        payloads = subject.payloads()
        for codec in codecs:
            found = speed(codec, payloads, subject.shape)._asdict()
            if codec.lossy:
                found |= subject.effect(codec)._asdict()
            yield {
                "text": number,
                "codec": codec.name,
                "parameters": codec.kind.parameters.hex(),
                **found,
            }


def _encoded(codec: Codec, payload: bytes, shape: KVShape) -> memoryview:
    out = memoryview(bytearray(codec.max_encoded_bytes(shape)))
    return out[: codec.encode(memoryview(payload), shape, out)]


def _seconds(work: Any) -> float:
    work()
    began = time.thread_time()
    work()
    return time.thread_time() - began
