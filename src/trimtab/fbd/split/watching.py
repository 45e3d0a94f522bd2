"""A forward as it is run once to make the graph: what it does that no node of the graph shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from trimtab.fbd.split.attributes import hides
from trimtab.fbd.split.places import Places

_READERS: Final = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
_IN_PLACE: Final = "CopySlices"
"""A node that does not say which part of its tensor was written into."""


class Watch:
    """What was seen."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._read = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Look at what is run within. ValueError for a hook on a tensor that uses other tensors than its gradient: they
        would be those of this run, whatever microbatch goes backwards."""
        methods = {name: self._noting(getattr(torch.Tensor, name)) for name in _READERS}
        methods["register_hook"] = self._looking(torch.Tensor.register_hook)
        own = {name: torch.Tensor.__dict__[name] for name in methods if name in torch.Tensor.__dict__}
        for name, method in methods.items():
            setattr(torch.Tensor, name, method)
        try:
            yield
        finally:
            for name in methods:
                if name in own:
                    setattr(torch.Tensor, name, own[name])
                else:
                    delattr(torch.Tensor, name)

    def check(self, nodes: tuple[str, ...]) -> None:
        """ValueError where a number that was read out of a tensor may say which part of another is written into: a
        graph of those ``nodes`` would be the same for any."""
        if self._read and any(name.endswith(_IN_PLACE) for name in nodes):
            raise ValueError(
                "the forward reads numbers out of tensors and writes into a part of a tensor in place; which part "
                "cannot be compared between the sides: use torch.cat, torch.where or index_put, or mode recompute"
            )

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self._read = True
            return method(tensor, *args, **options)

        return read

    def _looking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def register(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            if hides(hook, self._places):
                raise ValueError(
                    f"a hook on a tensor of shape {tuple(tensor.shape)} uses another tensor than its gradient, which "
                    "cannot be sent: write it as a torch.autograd.Function, or use mode recompute"
                )
            return method(tensor, hook)

        return register
