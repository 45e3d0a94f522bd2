"""One pass over a tensor: its vector and its exponent histogram, by the best means there is for its device and type.

On CUDA that is a Triton kernel (:mod:`trimtab.scope.device.cuda`), on a CPU one in C++ that was compiled beforehand
(:mod:`trimtab.scope.device.native`), otherwise operators of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.scope.device import cuda, native
from trimtab.scope.device.eager import Measured, measure_eagerly


class Statistician:
    """Measures one tensor after the other and keeps what it needs for that from one to the next."""

    def __init__(self) -> None:
        self._kernel: native.Kernel | None = None

    def measure(self, x: Tensor, histogram: bool = False) -> Measured:
        """Vector, shift and (if wanted) histogram of any real tensor, strided or not. Does not wait for the device.

        Results are memory of their own, which later measurements leave alone.
        """
        measured = None
        if x.device.type == "cpu":
            self._kernel = self._kernel or native.load()
            measured = None if self._kernel is None else self._kernel.measure(x, histogram)
        elif cuda.usable(x, histogram):
            measured = cuda.measure(x, histogram)
        return measured or measure_eagerly(x, histogram)


def warm_up(device: torch.device, dtype: torch.dtype, histogram: bool) -> None:
    """Have compiled what :class:`Statistician` will use there. Takes seconds, on a thread that does not train."""
    if device.type == "cpu":
        if native.load() is None:
            native.build()
    else:
        cuda.warm_up(device, dtype, histogram)
