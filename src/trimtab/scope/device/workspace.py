"""Memory of the Triton kernels: what they share from launch to launch, and rows for their results.

Results lie side by side, row after row, so that one copy brings those of many taps into the host's memory, and nothing
is allocated for a single tap.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

from trimtab.scope.vector import BINS, FIELDS

COLUMNS: Final = 16
"""Of a row of partial results."""
MOST_PROGRAMS: Final = 2048
"""Rows of partial results: enough to fill a card, few enough to be summed at once."""
COPIES: Final = 32
"""Of the histogram, so that programs do not queue up to count in one."""
RESULTS: Final = 64
"""Rows that are allocated together."""
SHIFT_AT: Final = 12
"""Where in a row of results the shift is: the vector and the shift begin at 16 bytes each, as they travel."""
ROW: Final = 14
"""float64 of a row of results."""
_WORKSPACES: Final = 64
"""Devices times streams on which tensors are measured."""


class Row(NamedTuple):
    """Where a measurement's results go."""

    address: int
    vector: Tensor
    """float64 (11,)"""
    shift: Tensor
    """float64 (1,)"""


class Counts(NamedTuple):
    """Where a histogram goes."""

    address: int
    exponents: Tensor
    """int64 (256,)"""


class Workspace:
    """What launches share, one after the other on one stream. Not for two streams at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partials = torch.empty(MOST_PROGRAMS, COLUMNS, dtype=torch.float32, device=device)
        self.histogram = torch.zeros(COPIES, BINS, dtype=torch.int32, device=device)
        """The program that sums it leaves it zero."""
        self.done = torch.zeros(1, dtype=torch.int32, device=device)
        """Programs of a launch that have written their row; the last leaves it zero."""
        self.shared = (self.partials, self.histogram, self.done)
        """As they are given to a kernel."""
        self.addresses = (self.partials.data_ptr(), self.histogram.data_ptr(), self.done.data_ptr())
        self._rows: Iterator[Row] = iter(())
        self._counts: Iterator[Counts] = iter(())

    def row(self) -> Row:
        """Fresh memory for a vector and its shift."""
        found = next(self._rows, None)  # one step for the interpreter: threads get different ones
        if found is None:
            slab = torch.empty(RESULTS, ROW, dtype=torch.float64, device=self.device)
            first, size = slab.data_ptr(), ROW * slab.element_size()
            addresses = range(first, first + RESULTS * size, size)
            vectors, shifts = slab[:, : len(FIELDS)].unbind(), slab[:, SHIFT_AT : SHIFT_AT + 1].unbind()
            rows = map(Row, addresses, vectors, shifts)
            found, self._rows = next(rows), rows
        return found

    def counts(self) -> Counts:
        """Fresh memory for a histogram."""
        found = next(self._counts, None)
        if found is None:
            slab = torch.empty(RESULTS, BINS, dtype=torch.int64, device=self.device)
            first, size = slab.data_ptr(), BINS * slab.element_size()
            counts = map(Counts, range(first, first + RESULTS * size, size), slab.unbind())
            found, self._counts = next(counts), counts
        return found


@functools.lru_cache(maxsize=_WORKSPACES)
def workspace_of(device: torch.device, stream: int) -> Workspace:
    """That of a device's stream, by the stream's handle; there is one of each in a process."""
    del stream
    return Workspace(device)
