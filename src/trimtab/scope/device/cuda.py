"""Statistics on CUDA: when the Triton kernel is used, its workspace, and its launches."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Final

import torch
from torch import Tensor

from trimtab.scope.device.eager import Measured
from trimtab.scope.device.layout import MOST_DIMENSIONS, Strided, collapse
from trimtab.scope.vector import BINS, FIELDS

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
COLUMNS: Final = 16
"""Of a row of partial results."""
MOST_PROGRAMS: Final = 2048
"""Rows of partial results: enough to fill a card, few enough to be summed at once."""
COPIES: Final = 32
"""Of the histogram, so that programs do not queue up to count in one."""
BLOCK: Final = 1024
"""Elements of a tile: eight for each thread, 16 bytes of bfloat16."""
TILES: Final = 12
"""That are counted in four bits each before the counts are moved; a multiple of the four that are loaded together, and
less than 16."""
GROUP: Final = 8
"""Elements that are loaded together from a tensor with gaps, where sizes and strides allow it."""
ROWS: Final = 1024
"""Of partial results that are summed at a time."""
_ALIGNMENT: Final = 16
"""Bytes. A tensor that begins elsewhere would need a kernel of its own, compiled in the midst of training."""


class Workspace:
    """Memory that launches share, one after the other on one stream. Not for two streams at the same time."""

    def __init__(self, x: Tensor) -> None:
        self.programs = programs_for(x.numel())[0]
        self.device = x.device
        self.partials = torch.empty(self.programs, COLUMNS, dtype=torch.float32, device=x.device)
        self.histogram = torch.zeros(COPIES, BINS, dtype=torch.int32, device=x.device)
        """The kernel that sums it leaves it zero."""

    def fits(self, x: Tensor) -> bool:
        """Can a tensor be measured with it?"""
        return x.device == self.device and programs_for(x.numel())[0] <= self.programs


def programs_for(elements: int) -> tuple[int, int]:
    """How many programs measure so many elements, and how often each repeats its tiles."""
    once = BLOCK * TILES
    repeats = max(1, -(-elements // (once * MOST_PROGRAMS)))
    return max(1, -(-elements // (once * repeats))), repeats


def grouped(layout: Strided) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """How the kernel reads a layout: how many elements go together, and sizes and strides in such groups.

    0 elements: all of them, there are no gaps.
    """
    if layout.strides == (1,):
        return 0, (1,) * MOST_DIMENSIONS, (0,) * MOST_DIMENSIONS
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


def measure(x: Tensor, histogram: bool, workspace: Workspace) -> Measured:
    """Launch the two kernels; waits for nothing."""
    kernels: Any = importlib.import_module("trimtab.scope.device.kernels")
    form = FORMATS[x.dtype]
    layout = Strided((x.numel(),), (1,)) if x.is_contiguous() else collapse(x)
    group, sizes, strides = grouped(layout)
    programs, repeats = programs_for(x.numel())
    vector = torch.empty(len(FIELDS), dtype=torch.float64, device=x.device)
    shift = torch.empty(1, dtype=torch.float64, device=x.device)
    exponents = torch.empty(BINS, dtype=torch.int64, device=x.device) if histogram else None
    with torch.cuda.device(x.device) if x.is_cuda else torch.no_grad():
        kernels.partial_statistics[(programs,)](
            x.view(_INTEGERS[x.element_size()]) if form else x,
            *(workspace.partials, workspace.histogram, x.numel(), repeats, *sizes[1:], *strides),
            FORMAT=form,
            GROUP=group,
            HISTOGRAM=histogram,
            BLOCK=BLOCK,
            TILES=TILES,
            COLUMNS=COLUMNS,
            COPIES=COPIES,
            num_warps=4,
        )
        kernels.combine_statistics[(1,)](
            *(workspace.partials, workspace.histogram, programs, x.numel(), vector, shift),
            shift if exponents is None else exponents,
            HISTOGRAM=histogram,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            COPIES=COPIES,
            num_warps=8,
        )
    return Measured(vector, shift, exponents)


def warm_up(device: torch.device, dtype: torch.dtype, histogram: bool) -> None:
    """Have the kernels compiled and loaded, by measuring small tensors on a stream of its own."""
    if device.type != "cuda" or dtype not in FORMATS or importlib.util.find_spec("triton") is None:
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        x = torch.zeros(64, 64, device=device).to(dtype)
        # One without gaps, one with groups of elements between its gaps, one with none: a kernel for each.
        for sample in (x, x[:, :32], x[:, :31]):
            measure(sample, histogram, Workspace(sample))
        torch.cuda.current_stream().synchronize()
    readiness(x.device, dtype, histogram).compiled = True
