"""Recognises a layer's KV layout by name and cuts it into planes.

A *plane* is a uint8 view ``[num_blocks, plane_bytes]`` whose rows are dense; a block's page is the
concatenation of its rows over the layer's planes. Axes are named by letters, after vLLM's own
layout names: ``b`` blocks, ``k`` K and V, ``h`` KV heads, ``n`` tokens of a block, ``c`` content of
one head and token, ``r`` kernel blocks inside a block (a kernel may use smaller blocks than the
engine's; then the tensor's first axis counts those).

A layout's name is its form and the order of the axes inside a page in memory, for example
``packed_heads.hnc`` (vLLM's LBHNC, BLHNC, LHBNC: their pages hold the same bytes) or
``kv_first.knhc``. It enters the namespace, so it says everything that decides which byte of a page
is what; axes of length 1 are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final, NamedTuple

import torch

from kvstow.device.base import KVSpec
from kvstow.errors import UnsupportedError
from kvstow.layout import LayerPages

# [blocks, heads, tokens, K and V], vLLM 0.30 and later, in any memory order
# a tuple (K, V), each [blocks, tokens, heads, size] or heads-major
FORMS: Final[dict[str, tuple[str, ...]]] = {
    "kv_first": ("kbnhc", "kbhnc"),  # [2, blocks, tokens, heads, size] and its heads-major variant
    "blocks_first": ("bknhc", "bkhnc"),  # [blocks, 2, ...]
    "packed_heads": ("bhnc",),
    "mla": ("bnc", "bhnc"),  # [blocks, tokens, latent], [blocks, 1, tokens, latent]
    "kv_pair": ("bnhc", "bhnc"),
}

KNOWN_DTYPES: Final = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8}
    | {
        getattr(torch, name)
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    }
)


class Plane(NamedTuple):
    """One plane, in bytes of its storage.

    Block ``b`` has ``width`` bytes from ``offset + b * stride``.
    """

    offset: int
    stride: int
    width: int


class _Axis(NamedTuple):
    letter: str
    size: int
    stride: int  # bytes


@dataclass(frozen=True, slots=True)
class Pages:
    """A recognised layer. ``planes[i]`` is a uint8 view, rows dense, of the engine's own memory."""

    layer: LayerPages
    spec: KVSpec
    planes: tuple[torch.Tensor, ...]


def recognise(name: str, cache: object, spec: KVSpec, device_type: str) -> Pages:
    """Cuts layer ``name``'s ``cache`` into planes.

    Nothing is copied. Raises ``UnsupportedError``, naming the layer, its shape and strides and the
    known forms, when the tensor is not exactly one of them: wrong kind of object, device or dtype;
    a shape that the spec does not explain, or explains in two ways with different bytes; blocks
    that overlap; rows that are not dense.
    """
    pair = isinstance(cache, (tuple, list))
    tensors = tuple(cache) if isinstance(cache, (tuple, list)) else (cache,)
    if pair and len(tensors) != 2:
        raise refuse(
            name, cache, spec, f"{len(tensors)} tensors, neither one nor a pair of K and V"
        )
    checked = [check_tensor(name, tensor, spec, device_type) for tensor in tensors]
    forms = (
        ["kv_pair"]
        if pair
        else ["mla"]
        if spec.mla
        else ["kv_first", "blocks_first", "packed_heads"]
    )
    found: dict[tuple[tuple[Plane, ...], ...], str] = {}
    problems: list[str] = []
    for form in forms:
        for axes in FORMS[form]:
            if not all(_fits(form, axes, tensor, spec) for tensor in checked):
                continue
            cut = [_cut(axes, tensor, spec) for tensor in checked]
            orders = {order for order, _ in cut}
            wrong = [planes for _, planes in cut if isinstance(planes, str)]
            if wrong or len(orders) != 1:
                problems.append(wrong[0] if wrong else "K and V differ in memory order")
                continue
            planes = tuple(planes for _, planes in cut if not isinstance(planes, str))
            found.setdefault(planes, f"{form}.{orders.pop()}")
    if len(found) != 1:
        reason = "; ".join(problems) or "the shape is none of the known forms"
        if found:
            reason = f"it could be {' or '.join(sorted(found.values()))}, and their blocks are different bytes"
        raise refuse(name, cache, spec, reason)
    ((planes_of, layout),) = found.items()
    return _pages(name, layout, spec, checked, planes_of, cache)


def _pages(
    name: str,
    layout: str,
    spec: KVSpec,
    tensors: list[torch.Tensor],
    planes_of: tuple[tuple[Plane, ...], ...],
    cache: object,
) -> Pages:
    page_bytes = sum(plane.width for planes in planes_of for plane in planes)
    if page_bytes != spec.page_bytes:
        planes = [plane for planes in planes_of for plane in planes]
        padded = len(planes) == 1 and page_bytes < spec.page_bytes <= planes[0].stride
        if not padded:  # the engine counts a page's padding, which holds no KV and is not kept
            raise refuse(
                name,
                cache,
                spec,
                f"a page has {page_bytes} bytes where the engine says {spec.page_bytes}",
            )
    views = tuple(
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage(),
            plane.offset,
            (spec.num_blocks, plane.width),
            (plane.stride, 1),
        )
        for tensor, planes in zip(tensors, planes_of, strict=True)
        for plane in planes
    )
    return Pages(LayerPages(name, page_bytes, layout), spec, views)


def check_tensor(
    name: str, cache: object, spec: KVSpec, device_type: str, known: str = ""
) -> torch.Tensor:
    """Returns the cache if it is a tensor of the device and of a known type.

    Raises ``UnsupportedError``, which lists the forms in ``known``; empty: ``FORMS``.
    """
    reason = None
    if not isinstance(cache, torch.Tensor):
        reason = f"a {type(cache).__name__} is no tensor"
    elif cache.layout != torch.strided or cache.is_quantized:
        reason = "not a plain strided tensor"
    elif cache.device.type != device_type:
        reason = f"it is on {cache.device.type!r}, this device serves {device_type!r}"
    elif cache.dtype not in KNOWN_DTYPES:
        reason = f"dtype {cache.dtype} is not known"
    elif cache.element_size() != spec.element_bytes:
        reason = f"its elements have {cache.element_size()} bytes, not {spec.element_bytes}"
    else:
        return cache.detach()
    raise refuse(name, cache, spec, reason, known)


def _split(axes: str, tensor: torch.Tensor, spec: KVSpec) -> int:
    """Counts kernel blocks in a block, from the length of the block axis. 0: it does not divide."""
    length = tensor.shape[axes.index("b")]
    if (
        spec.num_blocks < 1
        or length % spec.num_blocks
        or spec.block_tokens % max(1, length // spec.num_blocks)
    ):
        return 0
    return length // spec.num_blocks


def _fits(form: str, axes: str, tensor: torch.Tensor, spec: KVSpec) -> bool:
    """Whether every axis has exactly the length that the spec gives it."""
    if tensor.dim() != len(axes):
        return False
    split = _split(axes, tensor, spec)
    if not split:
        return False
    heads = 1 if spec.mla else spec.num_kv_heads
    contents = {spec.head_size * (2 if form == "packed_heads" else 1)}
    # K and V of different sizes, or with their scales: the page's bytes decide
    if form in ("packed_heads", "mla"):
        contents.add(spec.page_bytes // (spec.element_bytes * heads * spec.block_tokens))
    want = {
        "k": {2},
        "b": {spec.num_blocks * split},
        "h": {heads},
        "n": {spec.block_tokens // split},
        "c": contents,
    }
    return all(size in want[axis] for axis, size in zip(axes, tensor.shape, strict=True))


def _cut(axes: str, tensor: torch.Tensor, spec: KVSpec) -> tuple[str, tuple[Plane, ...] | str]:
    """Returns the order of the axes inside a page, outermost first, and the planes or what is
    wrong.
    """
    item = tensor.element_size()
    split = _split(axes, tensor, spec)
    all_axes: list[_Axis] = []
    for letter, size, stride in zip(axes, tensor.shape, tensor.stride(), strict=True):
        if letter == "b":
            all_axes += [
                _Axis("b", spec.num_blocks, stride * item * split),
                _Axis("r", split, stride * item),
            ]
        else:
            all_axes.append(_Axis(letter, size, stride * item))
    # Axes of length 1 have no stride that means anything.
    long = sorted((axis for axis in all_axes if axis.size > 1), key=lambda axis: axis.stride)
    extent = item
    for axis in long:
        if axis.stride < extent:
            return (
                "",
                f"blocks or rows overlap (axis {axis.letter} has a stride of {axis.stride} bytes)",
            )
        extent += (axis.size - 1) * axis.stride
    inner = [axis for axis in long if axis.letter != "b"]
    width = item
    dense = 0
    while dense < len(inner) and inner[dense].stride == width:
        width *= inner[dense].size
        dense += 1
    outer = inner[dense:][::-1]
    order = "".join(axis.letter for axis in reversed(inner))
    if any(axis.letter in "nc" for axis in outer) or ("c" in order and order[-1] != "c"):
        return order, f"the rows of a token are not contiguous inside a block (axes {order})"
    block = all_axes[axes.index("b")]
    start = int(tensor.storage_offset()) * item
    steps = [[i * axis.stride for i in range(axis.size)] for axis in outer]
    stride = block.stride if block.size > 1 else max(block.stride, width)
    planes = tuple(Plane(start + sum(offsets), stride, width) for offsets in product(*steps))
    assert width * len(planes) == item * prod(axis.size for axis in inner)
    return order.replace("rn", "n").replace("r", f"r{split}"), planes


def _describe(cache: object) -> str:
    if isinstance(cache, torch.Tensor):
        strides = (
            f"strides {tuple(cache.stride())}" if cache.layout == torch.strided else cache.layout
        )
        return f"tensor {tuple(cache.shape)} {strides} {cache.dtype} on {cache.device.type}"
    if isinstance(cache, (tuple, list)):
        return f"{type(cache).__name__} of [{', '.join(_describe(item) for item in cache)}]"
    return type(cache).__name__


def refuse(
    name: str, cache: object, spec: KVSpec, reason: str, known: str = ""
) -> UnsupportedError:
    """The error for a layer that is refused. ``known`` are the device's forms; empty: ``FORMS``."""
    known = known or ", ".join(f"{form} [{'] or ['.join(axes)}]" for form, axes in FORMS.items())
    return UnsupportedError(
        f"layer {name}: KV layout not recognised: {reason}. It is a {_describe(cache)}; the engine says {spec}. "
        f"Known forms: {known}."
    )
