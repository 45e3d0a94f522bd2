"""A forward as it is run once to make the graph: what it does that no node of the graph shows."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from trimtab.fbd.split.attributes import hides
from trimtab.fbd.split.places import Places

_READERS: Final = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
_IN_PLACE: Final = "CopySlices"
"""A node that does not say which part of its tensor was written into."""
_WHOLE: Final = frozenset({("megatron.core.transformer.utils", "attention_mask_func")})
"""Functions known to fill masked places of all of a tensor, whatever the data: through a view of another shape."""
_ONE: Final = threading.Lock()
"""Held while something is watched: methods of all tensors are replaced."""


class Watch:
    """What was seen."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._read = False
        self._whole: list[Any] = []
        """Nodes of writes into all of a tensor."""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Look at what is run within. ValueError for a hook on a tensor that uses other tensors than its gradient: they
        would be those of this run, whatever microbatch goes backwards. One thread watches at a time, and only what it
        does itself."""
        with _ONE:
            self._thread = threading.get_ident()
            with self._replaced():
                yield

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        methods = {name: self._noting(getattr(torch.Tensor, name)) for name in _READERS}
        methods["masked_fill_"] = self._following(torch.Tensor.masked_fill_)
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

    def check(self, nodes: Sequence[Any]) -> None:
        """ValueError where a number that was read out of a tensor may say which part of another is written into: a
        graph of those ``nodes`` would be the same for any."""
        parts = [one for one in nodes if one.name().endswith(_IN_PLACE) and one not in self._whole]
        if self._read and parts:
            raise ValueError(
                "the forward reads numbers out of tensors and writes into a part of a tensor in place; which part "
                "cannot be compared between the sides: use torch.cat, torch.where or index_put, or mode recompute"
            )

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self._read |= threading.get_ident() == self._thread
            return method(tensor, *args, **options)

        return read

    def _following(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def write(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            written = method(tensor, *args, **options)
            caller, base = sys._getframe(1), tensor._base  # pyright: ignore[reportPrivateUsage]
            known = (caller.f_globals.get("__name__"), caller.f_code.co_name) in _WHOLE
            if known and base is not None and base.numel() == tensor.numel():
                self._whole.append(base.grad_fn)
            return written

        return write

    def _looking(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def register(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            if threading.get_ident() == self._thread and hides(hook, self._places):
                raise ValueError(
                    f"a hook on a tensor of shape {tuple(tensor.shape)} uses another tensor than its gradient, which "
                    "cannot be sent: write it as a torch.autograd.Function, or use mode recompute"
                )
            return method(tensor, hook)

        return register
