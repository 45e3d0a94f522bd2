"""Statistics on CUDA: when the Triton kernel is used, and its launches."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from typing import Any, Final

import torch
from torch import Tensor

from trimtab.scope.device.eager import Measured
from trimtab.scope.device.launch import INT32, Launch, offered
from trimtab.scope.device.layout import MOST_DIMENSIONS, Strided, collapse
from trimtab.scope.device.workspace import COLUMNS, COPIES, MOST_PROGRAMS, Workspace, workspace_of

FORMATS: Final = {
    torch.float32: 0,
    torch.bfloat16: 3,
    torch.float16: 0,
    torch.float8_e4m3fn: 1,
    torch.float8_e5m2: 2,
}
"""How the kernel reads a type: as it is (0), or as integers that it decodes itself, which works on cards without float8
and is exact for subnormal numbers in Triton's interpreter, too."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_BFLOAT16: Final = 3
BLOCK: Final = 1024
"""Elements of a tile: eight for each thread, 16 bytes of bfloat16."""
TILES: Final = 16
"""Of a run; a multiple of the four that are loaded together. Tensors whose size is a power of two leave no rest."""
COUNTED_TILES: Final = 12
"""The same with a histogram: they are counted in four bits each before the counts are moved, so less than 16."""
FOLD: Final = 4
"""Elements beside each other that share accumulators."""
PACKED_FOLD: Final = 2
"""Pairs of bfloat16 beside each other that do."""
WARPS: Final = 4
GROUP: Final = 8
"""Elements that are loaded together from a tensor with gaps, where sizes and strides allow it."""
_SINGLE_BLOCK: Final = 256
"""Elements of a tile where each is loaded by itself: for more of them a compiler takes half a minute."""
_ALIGNMENT: Final = 16
"""Bytes. A tensor that begins elsewhere would need a kernel of its own, compiled in the midst of training."""
_DEFAULT_STREAM: Final = 0
"""Its handle."""
_DENSE: Final = (0, (1,) * MOST_DIMENSIONS, (0,) * MOST_DIMENSIONS)


def run_of(histogram: bool, group: int) -> tuple[int, int]:
    """Elements of a tile, and tiles that a program measures at least, of a layout (see :func:`grouped`)."""
    if group == 1:
        return _SINGLE_BLOCK, COUNTED_TILES if histogram else TILES * BLOCK // _SINGLE_BLOCK
    return BLOCK, COUNTED_TILES if histogram else TILES


def programs_for(elements: int, histogram: bool = False, group: int = 0) -> tuple[int, int]:
    """How many programs measure so many elements, and how often each repeats its tiles."""
    once = math.prod(run_of(histogram, group))
    repeats = max(1, -(-elements // (once * MOST_PROGRAMS)))
    return max(1, -(-elements // (once * repeats))), repeats


def grouped(layout: Strided) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """How the kernel reads a layout: how many elements go together, and sizes and strides in such groups.

    0 elements: all of them, there are no gaps.
    """
    if layout.strides == (1,):
        return _DENSE
    missing = MOST_DIMENSIONS - len(layout.sizes)
    sizes = (*(1,) * missing, *layout.sizes)
    strides = (*(0,) * missing, *layout.strides)
    if strides[-1] == 1 and not any(number % GROUP for number in (sizes[-1], *strides[:-1])):
        return GROUP, (*sizes[:-1], sizes[-1] // GROUP), (*(stride // GROUP for stride in strides[:-1]), 1)
    return 1, sizes, strides


class Readiness:
    """Whether kernels have been compiled; until then, training must not wait for it."""

    def __init__(self) -> None:
        self.compiled = False
        self.launches: dict[int, Launch] = {}
        """By the elements that go together (see :func:`grouped`); none where only Triton's own way is open."""


@functools.cache
def readiness(*_key: object) -> Readiness:
    """Of the kernels for a device, a type, and with or without a histogram; there is one of these in a process."""
    return Readiness()


def usable(x: Tensor, histogram: bool) -> bool:
    """Is there a kernel for this tensor, compiled?"""
    return (
        x.dtype in FORMATS
        and x.numel() > 0
        and type(x) in (Tensor, torch.nn.Parameter)
        and readiness(x.device, x.dtype, histogram).compiled
        and x.data_ptr() % _ALIGNMENT == 0
        and (x.is_contiguous() or len(collapse(x).sizes) <= MOST_DIMENSIONS)
    )


def measure(x: Tensor, histogram: bool, workspace: Workspace | None = None) -> Measured:
    """Launch the kernel; waits for nothing. ``workspace``: None for that of the current stream."""
    index, device = x.get_device(), x.device
    stream = torch._C._cuda_getCurrentRawStream(index) if x.is_cuda else 0
    space = workspace_of(device, stream) if workspace is None else workspace
    group, sizes, strides = _DENSE if x.is_contiguous() else grouped(collapse(x))
    n = x.numel()
    programs, repeats = programs_for(n, histogram, group)
    row = space.row()
    counts = space.counts() if histogram else None
    launch = readiness(device, x.dtype, histogram).launches.get(group)
    numbers = (n, repeats, *sizes[1:], *strides)
    exponents = row.vector if counts is None else counts.exponents
    if launch is None or max(numbers) >= INT32:
        with torch.cuda.device(device) if x.is_cuda else torch.no_grad():
            _through_triton(x, histogram, group, programs, (*space.shared, row.vector, exponents, *numbers))
        return Measured(row.vector, row.shift, None if counts is None else exponents)
    pointers = (x.data_ptr(), *space.addresses, row.address, row.address if counts is None else counts.address)
    if torch._C._cuda_getDevice() == index:
        launch(programs, stream, *pointers, *numbers)
    else:
        with torch.cuda.device(index):
            launch(programs, stream, *pointers, *numbers)
    return Measured(row.vector, row.shift, None if counts is None else exponents)


def raw_type(dtype: torch.dtype) -> torch.dtype:
    """As which the kernel gets its elements."""
    return _INTEGERS[dtype.itemsize] if FORMATS[dtype] else dtype


def constants(dtype: torch.dtype, histogram: bool, group: int, on_card: bool) -> dict[str, int | bool]:
    """What a kernel is compiled for, in the order of its arguments. (Triton's interpreter knows no PTX.)"""
    packed = FORMATS[dtype] == _BFLOAT16 and not (group or histogram) and on_card
    block, tiles = run_of(histogram, group)
    return {
        "FORMAT": FORMATS[dtype],
        "GROUP": group,
        "HISTOGRAM": histogram,
        "PACKED": packed,
        "BLOCK": block,
        "TILES": tiles,
        "FOLD": PACKED_FOLD if packed else FOLD if block == BLOCK else 1,
        "COLUMNS": COLUMNS,
        "COPIES": COPIES,
    }


def _through_triton(x: Tensor, histogram: bool, group: int, programs: int, arguments: tuple[Any, ...]) -> Any:
    """Launch as Triton does it, which compiles if need be; the handle of what was launched."""
    kernels: Any = importlib.import_module("trimtab.scope.device.kernels")
    raw = x.view(raw_type(x.dtype))
    about = constants(x.dtype, histogram, group, x.is_cuda)
    return kernels.tensor_statistics[(programs,)](raw, *arguments, **about, num_warps=WARPS)


def warm_up(device: torch.device, dtype: torch.dtype, histogram: bool) -> None:
    """Have the kernels compiled and loaded, by measuring small tensors on a stream of its own."""
    if device.type != "cuda" or dtype not in FORMATS or importlib.util.find_spec("triton") is None:
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        x = torch.zeros(64, 64, device=device).to(dtype)
        ready = readiness(x.device, x.dtype, histogram)
        if ready.compiled:
            return
        space = Workspace(x.device)
        direct = offered()
        # One without gaps, one with groups of elements between its gaps, one with none: a kernel for each.
        for sample in (x, x[:, :32], x[:, :31]):
            group, sizes, strides = _DENSE if sample.is_contiguous() else grouped(collapse(sample))
            row = space.row()
            exponents = space.counts().exponents if histogram else row.vector
            programs, repeats = programs_for(sample.numel(), histogram, group)
            numbers = (sample.numel(), repeats, *sizes[1:], *strides)
            handle = _through_triton(
                sample, histogram, group, programs, (*space.shared, row.vector, exponents, *numbers)
            )
            if direct:
                ready.launches[group] = Launch(handle, tuple(constants(dtype, histogram, group, True).values()))
                measure(sample, histogram, space)
        torch.cuda.current_stream().synchronize()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)):
        workspace_of(x.device, _DEFAULT_STREAM)  # of most training threads
    ready.compiled = True
