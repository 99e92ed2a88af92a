"""The shape of a shard's payload: numbers of one type, in pages whose axes have names."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES: Final[dict[str, int]] = {  # name to its code in an encoded span; never reuse one
    "float32": 1,
    "bfloat16": 2,
    "float16": 3,
    "float8": 4,  # e4m3 or e5m2, and other KV of one byte an element, such as int8
}
_WORDS: Final = {
    "float32": np.uint32,
    "bfloat16": np.uint16,
    "float16": np.uint16,
    "float8": np.uint8,
}
_UNKNOWN_LAYER_BYTES: Final = 256 << 10
_ROW: Final = 512  # numbers


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one shard's payload: layers in order, each with its blocks in order, each a
    page.

    Axes of a page, outermost first in memory: ``k`` planes (K and V; 1 for MLA's latent), ``h``
    heads, ``n`` tokens of a block, ``c`` numbers of one head and token. A *channel* is one (layer,
    plane, head, c).
    """

    dtype: str
    layers: int
    blocks: int
    planes: int
    heads: int
    tokens: int  # of a block
    size: int
    order: str = "khnc"
    known: bool = True  # False: the axes are made up, and only exact codecs may be used

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or sorted(self.order) != list("chkn"):
            raise ValueError(f"dtype {self.dtype!r}, order {self.order!r}")
        if min(self.layers, self.blocks, self.planes, self.heads, self.tokens, self.size) < 1:
            raise ValueError(f"{self}: an axis is empty")

    @classmethod
    def unknown(cls, dtype: str, length: int) -> KVShape:
        """The shape of ``length`` bytes of which only the type is known.

        Raises ``ValueError`` unless they are whole numbers.
        """
        item = np.dtype(_WORDS[dtype]).itemsize
        if length % item or length < item:
            raise ValueError(f"{length} bytes of {dtype}")
        layers = 1
        while length // item % (layers * 2) == 0 and length // layers > _UNKNOWN_LAYER_BYTES:
            layers *= 2
        return cls(dtype, layers, 1, 1, 1, length // item // layers, 1, known=False)

    @property
    def word(self) -> npt.DTypeLike:
        """The unsigned integer type of a number's bits."""
        return _WORDS[self.dtype]

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return np.dtype(self.word).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self.layers * self.layer_numbers * self.item

    @property
    def layer_numbers(self) -> int:
        """Numbers of a layer."""
        return self.blocks * prod(self.page)

    @property
    def channels(self) -> int:
        """Channels of a layer."""
        return self.planes * self.heads * self.size

    @property
    def page(self) -> tuple[int, ...]:
        """Lengths of a page's axes, outermost first."""
        return tuple(
            {"k": self.planes, "h": self.heads, "n": self.tokens, "c": self.size}[axis]
            for axis in self.order
        )

    def axes(self, letters: str) -> tuple[int, ...]:
        """The indices of ``letters`` among a layer's axes, which are ``b`` (blocks) and then
        ``order``.
        """
        return tuple(f"b{self.order}".index(letter) for letter in letters)

    def over(self, letters: str) -> tuple[int, ...]:
        """The axes of an array that broadcasts over a layer: those not in ``letters`` have length
        1.
        """
        return tuple(
            size if letter in letters else 1
            for letter, size in zip(f"b{self.order}", (self.blocks, *self.page), strict=True)
        )

    def layer(self, array: Array) -> Array:
        """A view of one layer's flat numbers with its axes."""
        return array.reshape(self.blocks, *self.page)

    # numpy makes a step for each row that it broadcasts over, and a row of one head and token is
    # short. So layers are cut into rows of several tokens, and values of a channel are repeated.

    def rows(self, layers: int) -> tuple[int, ...]:
        """The axes of some layers cut into rows: layers, blocks, axes before ``n``, rows, numbers
        of a row.
        """
        before, inside, row_tokens = self._row()
        return (layers, self.blocks, *before, self.tokens // row_tokens, row_tokens * inside)

    def tiled(self, array: Array, letters: str = "khc") -> Array:
        """Repeats some layers' values, [layers, *over(letters)], so that they broadcast over
        ``rows``.
        """
        before, inside, row_tokens = self._row()
        if not set(letters) & set(self.order[len(before) + 1 :]):
            return array.reshape(len(array), 1, *array.shape[2 : 2 + len(before)], 1, 1)
        whole = (
            array if letters == "khc" else np.broadcast_to(array, (len(array), *self.over("khc")))
        )
        tiled = np.repeat(whole.reshape(len(array), 1, *before, 1, 1, inside), row_tokens, axis=-2)
        return tiled.reshape(*tiled.shape[:-2], -1)

    def sum_tokens(self, rows: Array) -> Array:
        """Sums ``rows`` over the tokens of each channel. Returns [layers, *over("khc")]."""
        _, inside, row_tokens = self._row()
        by_row = np.add.reduce(rows, axis=(1, -2))
        total: Array = np.add.reduce(
            by_row.reshape(*by_row.shape[:-1], row_tokens, inside), axis=-2
        )
        return total.reshape(len(rows), *self.over("khc"))

    def _row(self) -> tuple[tuple[int, ...], int, int]:
        """Returns the axes before ``n``, the contiguous numbers of a token, and the tokens of a
        row.
        """
        page = self.page
        at = self.order.index("n")
        inside = prod(page[at + 1 :])
        return page[:at], inside, gcd(self.tokens, 1 << max(0, (_ROW // inside).bit_length() - 1))


def shape_of(
    layout: str,
    dtype: str,
    *,
    layers: int,
    blocks: int,
    block_tokens: int,
    heads: int,
    size: int,
    page_bytes: int,
    planes_outside: bool = False,
) -> KVShape:
    """The shape of a page layout's name (``kvstow.device.pages``), such as ``packed_heads.hnc``.

    ``page_bytes``: of one layer's block. ``planes_outside``: in a ``packed_heads`` page the K rows
    of all tokens come before the V rows, as vLLM's CPU backend has them; else each token's K row is
    followed by its V row. Pages that cannot be explained are bytes of which only the type is known.
    """
    form, _, order = layout.partition(".")
    planes = 1 if form == "mla" else 2
    if form == "packed_heads" and "n" in order:
        order = (
            order.replace("n", "kn" if planes_outside else "nk", 1) if "k" not in order else order
        )
    elif form == "kv_pair":
        order = "k" + order
    order = "".join(axis for axis in "khnc" if axis not in order) + order
    length = layers * blocks * page_bytes
    if sorted(order) == list("chkn"):
        shape = KVShape(dtype, layers, blocks, planes, heads, block_tokens, size, order)
        if shape.nbytes == length:
            return shape
    return KVShape.unknown(dtype, length)
