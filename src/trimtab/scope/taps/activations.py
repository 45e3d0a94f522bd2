"""Points on activations and on their gradients, at any source."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.taps.points import Disconnect, Receive
from trimtab.scope.taps.sources import Source
from trimtab.scope.taps.where import Aside, Where, moment_of


class ActivationPoint:
    """A tensor of the forward pass. What is recomputed comes once more, as ``recompute``."""

    def __init__(self, tap: Tap, source: Source, where: Where, heads: int = 0) -> None:
        """``heads``: the last dimension holds this many, and is shown as (heads, rest)."""
        self.tap = tap
        self._source = source
        self._where = where
        self._heads = heads

    def connect(self, receive: Receive) -> Disconnect:
        """From now on ``receive`` gets it."""
        where, heads = self._where, self._heads

        def passes(tensor: torch.Tensor) -> torch.Tensor | None:
            moment = moment_of(where)
            return None if moment is None else show(receive, tensor, moment, heads)

        return self._source.listen(passes)


class GradientPoint:
    """The gradient of a tensor of the forward pass: whole, once a microbatch, however the forward is recomputed."""

    def __init__(self, tap: Tap, source: Source, where: Where, aside: Aside, heads: int = 0) -> None:
        """``heads``: the last dimension holds this many, and is shown as (heads, rest)."""
        self.tap = tap
        self._source = source
        self._where = where
        self._aside = aside
        self._heads = heads

    def connect(self, receive: Receive) -> Disconnect:
        """From now on ``receive`` gets it, in the backward pass."""
        heads = self._heads

        def shown(gradient: torch.Tensor, moment: Moment) -> torch.Tensor | None:
            return show(receive, gradient, moment, heads)

        watch = _Watch(self.tap.name, shown, self._where, self._aside)
        leave = self._source.listen(watch.passes)

        def disconnect() -> None:
            watch.connected = False  # hooks may be on tensors already
            leave()

        return disconnect


class _Watch:
    """One connection: puts a hook on the tensor as it passes by in the forward.

    A reentrant checkpoint calls the forward first outside of any graph, so the tensor of the second pass is taken; but
    of what the checkpoint was given, the second pass sees a leaf, to which only the gradient from inside comes: then
    that of the first pass is taken after all. (Not at once: Megatron-Core makes graphs in the first pass that nobody
    goes through, and a tensor that is hooked there keeps its hooks there.) With a checkpoint that is not reentrant the
    first pass's is taken, and hooks of the second are never called.
    """

    def __init__(self, name: str, receive: Receive, where: Where, aside: Aside) -> None:
        self.connected = True
        self._name = name
        self._receive = receive
        self._where = where
        self._aside = aside
        self._step = -1
        self._first: dict[int, tuple[weakref.ref[torch.Tensor], bool]] = {}
        """By microbatch of the step: the tensor of the first pass, and whether it has a hook."""

    def passes(self, tensor: torch.Tensor) -> None:
        moment = moment_of(self._where)
        if moment is None or self._where.aside or not tensor.requires_grad or _backward_is_compiled():
            return
        if moment.step != self._step:
            self._step = moment.step
            self._first.clear()
        hook = self._hook(Moment(moment.step, moment.microbatch))
        if not moment.recompute:
            in_graph = torch.is_grad_enabled()
            self._first[moment.microbatch] = weakref.ref(tensor), in_graph
            if in_graph:
                tensor.register_hook(hook)
            return
        reference, hooked = self._first.pop(moment.microbatch, (None, False))
        first = None if reference is None else reference()
        if first is not tensor and tensor.is_leaf and first is not None:
            tensor = first
        if not (hooked and first is tensor):
            tensor.register_hook(hook)

    def _hook(self, moment: Moment) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def known(gradient: torch.Tensor) -> torch.Tensor | None:
            if not self.connected or not self._aside.working:
                return None
            try:
                return self._receive(gradient, moment)
            except Exception as error:
                self._aside.failed(self._name, error)
                return None

        return known


def show(receive: Receive, tensor: torch.Tensor, moment: Moment, heads: int = 0) -> torch.Tensor | None:
    """Show this rank's part of a tensor, by heads; an answer is given the form of the tensor that it replaces."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    new = receive(part.unflatten(-1, (heads, -1)) if heads else part, moment)
    if new is None:
        return None
    if heads:
        new = new.flatten(-2)
    if isinstance(tensor, DTensor):
        form = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(new, tensor.device_mesh, tensor.placements, run_check=False, **form)
    return new


def _backward_is_compiled() -> bool:
    """Whether compiled autograd is on: it would compile hooks on tensors, anew for each pass."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(getattr(module, "compiled_autograd_enabled", False))
