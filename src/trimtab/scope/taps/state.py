"""Points on what stays: parameters, their gradients, the optimizer's state. Nothing is hooked or copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from trimtab.scope.names import Tap


class ParameterPoint:
    """A parameter; of a distributed one, this rank's part."""

    def __init__(self, tap: Tap, parameter: torch.Tensor) -> None:
        self.tap = tap
        self._parameter = weakref.ref(parameter)

    def tensor(self) -> torch.Tensor | None:
        """Its storage; None when the model is gone."""
        parameter = self._parameter()
        return None if parameter is None else local_part(parameter)

    @property
    def whole(self) -> tuple[int, ...] | None:
        """Shape of all of it, of a distributed one: its parts need not be equal."""
        parameter = self._parameter()
        return tuple(parameter.shape) if isinstance(parameter, DTensor) else None


class ParameterGradientPoint:
    """The gradient that a parameter has gathered so far in the step: ``main_grad`` where there is one (Megatron-Core's
    buffer), else ``grad``."""

    def __init__(self, tap: Tap, parameter: torch.Tensor) -> None:
        """``tap.part``: only these elements of it, flattened, are reduced."""
        self.tap = tap
        self._parameter = weakref.ref(parameter)

    def tensor(self) -> torch.Tensor | None:
        """Its storage; None before the first backward."""
        parameter = self._parameter()
        gradient = None if parameter is None else getattr(parameter, "main_grad", None)
        if gradient is None:
            gradient = None if parameter is None else parameter.grad
        if not isinstance(gradient, torch.Tensor):
            return None
        whole = local_part(gradient)
        return whole if self.tap.part is None else whole.view(-1)[slice(*self.tap.part)]


class LookedUpPoint:
    """A tensor that is looked up each time, as optimizers may replace theirs."""

    def __init__(self, tap: Tap, look: Callable[[], object]) -> None:
        self.tap = tap
        self._look = look

    def tensor(self) -> torch.Tensor | None:
        """Its storage; None where the optimizer has none."""
        found = self._look()
        return local_part(found) if isinstance(found, torch.Tensor) else None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor on this rank, apart from autograd: writing to it raises no version."""
    data = tensor.data
    return data.to_local().data if isinstance(data, DTensor) else data
