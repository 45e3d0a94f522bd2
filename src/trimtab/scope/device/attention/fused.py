"""Maps of whole heads by the Triton kernels: when they can be used, compiling them aside, their launches."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import threading
from typing import Any, Final, NamedTuple

import torch

from trimtab.scope.device.attention.tiling import Tiling
from trimtab.scope.taps.points import AttentionInput

_LOG: Final = logging.getLogger("trimtab")
_DTYPES: Final = (torch.bfloat16, torch.float16)
"""What tensor cores multiply; a float32 would have to be cut in three."""
_LEAST: Final = 16
"""Of rows, keys and features that are multiplied together."""
_MOST: Final = 64
"""Rows and keys of a tile that a program has at once."""
_WIDEST: Final = 256
"""Head that is multiplied at once."""
_EIGHT: Final = 8
"""Elements that strides are counted in."""
_FAR: Final = 1 << 30
"""Further than any key is from a query."""


class Sums(NamedTuple):
    """What the passes give, of each head; all float32."""

    entropy: torch.Tensor
    """(heads, rows)"""
    first: torch.Tensor
    """(heads, rows) what the first key gets."""
    received: torch.Tensor
    """(heads, keys)"""
    sums: torch.Tensor
    """(heads, tile rows, tile columns)"""
    peaks: torch.Tensor


class Shape(NamedTuple):
    """What kernels are compiled for."""

    device: torch.device
    dtype: torch.dtype
    capped: bool
    rows: int
    """Of a tile that a program has at once."""
    keys: int
    features: int
    whole: bool
    """A head has as many."""


class Compiled:
    """How far kernels of a shape are: nobody has asked for them, they are being compiled, or they are there."""

    def __init__(self) -> None:
        self.begun = False
        self.ready = False


@functools.lru_cache(maxsize=64)
def compiled(shape: Shape) -> Compiled:
    """Of which shape; there is one of these in a process."""
    del shape
    return Compiled()


def fits(inputs: AttentionInput) -> bool:
    """Are the kernels made for this: one sequence an entry, all of it here, seen by places alone?"""
    q, k = inputs.q, inputs.k
    return (
        q.is_cuda
        and q.dtype in _DTYPES
        and k.dtype == q.dtype
        and inputs.mask is None
        and inputs.bias is None
        and inputs.packed is None
        and inputs.context is None
        and q.shape[-1] <= _WIDEST
        and q.numel() > 0
        and k.numel() > 0
        and all(map(_aligned, (q, k)))
    )


def shape_of(inputs: AttentionInput, tiling: Tiling) -> Shape:
    """What is compiled for a map of such tiles."""
    rows, keys = _power(tiling.height, _MOST), _power(tiling.width, _MOST)
    features = _power(inputs.q.shape[-1], _WIDEST)
    whole = inputs.q.shape[-1] == features
    return Shape(inputs.q.device, inputs.q.dtype, inputs.softcap is not None, rows, keys, features, whole)


def ready(inputs: AttentionInput, shape: Shape) -> bool:
    """Are its kernels there? If nobody has asked yet, they are compiled from now on, on a thread of their own."""
    found = compiled(shape)
    if not found.begun:
        found.begun = True
        capped = inputs.softcap
        threading.Thread(target=_compile, args=(shape, capped), name="trimtab-scope-attention", daemon=True).start()
    return found.ready


def measure(inputs: AttentionInput, batch: int, heads: torch.Tensor, tiling: Tiling, shape: Shape) -> Sums:
    """The two passes over the heads (int32, numbers on this rank) of one entry of the batch; waits for nothing."""
    kernels: Any = importlib.import_module("trimtab.scope.device.attention.kernels")
    q, k = inputs.q[batch], inputs.k[batch]
    count, rows, keys = heads.shape[0], q.shape[1], k.shape[1]
    # Memory of their own, which begins where kernels were compiled for: parts of one tensor may not.
    largest, inverse, entropy, first = (torch.zeros(count, rows, device=q.device) for _ in range(4))
    received = torch.zeros(count, keys, device=q.device)
    subs = -(-tiling.width // shape.keys)
    sums, peaks = (torch.zeros(count, tiling.rows, tiling.columns, subs, device=q.device) for _ in range(2))
    left, right = _sight(inputs)
    softcap = 1.0 if inputs.softcap is None else float(inputs.softcap)
    about = (float(inputs.scale), softcap, rows, keys, q.shape[-1], left, right)
    strides = (*(stride // _EIGHT for x in (q, k) for stride in x.stride()[:2]), q.shape[0] // k.shape[0])
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        kernels.row_sums[(-(-rows // _MOST), count)](
            *(q, k, heads, largest, inverse, entropy, *about, *strides), **constants_of_rows(shape)
        )
        kernels.tile_sums[(tiling.columns * subs, count)](
            *(q, k, heads, largest, inverse, sums, peaks, received, first, *about, *strides),
            *(tiling.width, tiling.height, tiling.rows, tiling.columns, subs),
            **constants_of_tiles(shape),
        )
    return Sums(entropy, first, received, sums.sum(-1), peaks.amax(-1))


def constants_of_rows(shape: Shape) -> dict[str, int | bool]:
    """What the kernel along the keys is compiled for."""
    return {**_constants(shape), "BM": _MOST, "BN": _MOST}


def constants_of_tiles(shape: Shape) -> dict[str, int | bool]:
    """What the kernel along the rows is compiled for."""
    return {**_constants(shape), "BM": shape.rows, "BN": shape.keys}


def _constants(shape: Shape) -> dict[str, int | bool]:
    return {"CAPPED": shape.capped, "WHOLE": shape.whole, "BD": shape.features, "num_warps": 4}


def _aligned(x: torch.Tensor) -> bool:
    """Does each head's row begin where several elements can be loaded at once?"""
    return x.stride(-1) == 1 and not any(stride % _EIGHT for stride in x.stride()[:-1]) and not x.data_ptr() % 16


def _sight(inputs: AttentionInput) -> tuple[int, int]:
    """How far before and behind its own place a query sees."""
    left, right = inputs.window or (-1, -1)
    left, right = (_FAR if side < 0 else side for side in (left, right))
    return left, min(right, 0) if inputs.causal else right


def _compile(shape: Shape, softcap: float | None) -> None:
    """By measuring a small map on a stream of its own."""
    if importlib.util.find_spec("triton") is None:
        return
    try:
        importlib.import_module("trimtab.scope.device.ahead").compile_maps_ahead(shape)
        with torch.cuda.device(shape.device), torch.cuda.stream(torch.cuda.Stream(shape.device)), torch.no_grad():
            q = torch.zeros(1, 1, shape.rows, shape.features, dtype=shape.dtype, device=shape.device)
            k = torch.zeros(1, 1, shape.keys, shape.features, dtype=shape.dtype, device=shape.device)
            sample = AttentionInput(q, k, 1.0, softcap=softcap)
            heads = torch.zeros(1, dtype=torch.int32, device=shape.device)
            tiling = Tiling(shape.rows, shape.keys, (1, 1), runs=1)
            measure(sample, 0, heads, tiling, shape)
            torch.cuda.current_stream().synchronize()
        compiled(shape).ready = True
    except Exception as error:
        _LOG.info("trimtab: the kernels of attention maps cannot be had (%s); operators measure", error)


def _power(length: int, most: int) -> int:
    """The next power of two, within what is multiplied at once."""
    return min(max(1 << (length - 1).bit_length(), _LEAST), most)
