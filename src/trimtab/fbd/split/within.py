"""A part of a forward is sent, and what is around it is run again on the backward's side.

What is sent are *cores*: modules that hold most of a stage, such as a model's transformer layers. Embedding and loss
are then computed on both sides, which is cheap, and saves sending what the loss keeps of every word of the vocabulary;
and there they may be divided over ranks that the forward has not. Nothing around cores may draw random numbers: the
sides would draw different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trimtab.fbd.split import graph
from trimtab.fbd.split.calls import Call, Form, called_in_turn
from trimtab.fbd.split.export import Export, Shipment
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.skeleton import Forward, Looked, Recorded, Recording, Skeleton

Tensors = tuple[torch.Tensor, ...]
Leaves = Callable[[Tensors], Tensors]
"""What a core is to go in with, of what it was called with."""


def ship_within(
    cores: Sequence[nn.Module], forward: Forward, places: Places, leaves: Leaves | None = None
) -> tuple[Tensors, Shipment]:
    """Run a stage on the forward's side, and take down what its cores do.

    Args:
        cores: in the order in which ``forward`` calls them, each once.
        forward: the whole stage.
        places: what the other side has anyway.
        leaves: for a rehearsal: what each core goes in with, in the place of its inputs. These travel, and all outputs.

    Returns:
        The stage's outputs, without their graph; and what to send.

    Raises:
        ValueError: a core is not called once, or something can neither be sent nor compared.
    """
    export = Export(places)
    into: list[torch.Tensor] = []
    out: list[torch.Tensor] = []
    last: Tensors = ()

    def inside(number: int, call: Call) -> Any:
        nonlocal last
        given = (leaves or fresh)(call.inputs)
        with export, torch.enable_grad():
            form, outputs = call.run(given)
        into.extend(given)
        out.extend(outputs)
        last = fresh(outputs)
        torch.set_grad_enabled(number < len(cores) - 1)  # until the end of enable_grad below
        return form.filled(last)

    with torch.enable_grad(), called_in_turn(cores, inside):
        results = forward()
    if leaves is not None:
        shipment = export.shipment(_with_graph(out), into, out)
    else:
        shipment = export.shipment(_with_graph(out), (), () if _are(results, last) else last)
    export.forget()  # it is in a cycle, and would keep them until Python looks for those
    return tuple(one.detach() for one in results), shipment


def fresh(tensors: Tensors) -> Tensors:
    """The same as leaves of a new graph."""
    return tuple(one.detach().requires_grad_(graph.has_gradient(one.dtype)) for one in tensors)


def _with_graph(tensors: Sequence[torch.Tensor]) -> Tensors:
    return tuple(one for one in tensors if one.requires_grad)


def _are(results: Sequence[torch.Tensor], last: Tensors) -> bool:
    """Whether the stage passes on what its last core made, so that nobody here uses its values."""
    made = {one.data_ptr() for one in last}
    return all(one.data_ptr() in made for one in results)


class Within:
    """The backward's side of a stage at one shape: one backward at a time."""

    def __init__(self, cores: Sequence[nn.Module], places: Places) -> None:
        """``cores`` and ``places`` as the forward's side has them."""
        self._cores = tuple(cores)
        self._places = places
        self._forms: list[Form] = []
        self._inputs: list[int] = []
        """Of each core, how many."""
        self.outputs: Tensors = ()
        """Of the stage, as the last backward has computed them: the loss, on the last one."""

    def build(
        self,
        forward: Forward,
        leaves: Leaves | None = None,
        look: Callable[[Manifest, Looked], None] | None = None,
    ) -> None:
        """Make the graph of the cores, in one run of ``forward`` with tensors of the right shapes; what this side does
        not know of them, such as inputs of a stage, is to be not-a-number. Random generators but PyTorch's own are to
        be restored by the caller.

        Args:
            leaves: what cores go in with, in the place of their inputs.
            look: as for :meth:`Skeleton.of_parts`.

        Raises:
            ValueError: as for :class:`Skeleton`; a core is not called once; what is around uses what is not known.
        """
        self._forms, self._inputs = [], []

        def run(recording: Recording) -> Recorded:
            into: list[torch.Tensor] = []
            out: list[torch.Tensor] = []

            def inside(number: int, call: Call) -> Any:
                given = (leaves or _cleared)(call.inputs)
                with recording():
                    form, outputs = call.run(given)
                self._forms.append(form)
                self._inputs.append(len(given))
                into.extend(given)
                out.extend(outputs)
                torch.set_grad_enabled(number < len(self._cores) - 1)
                return form.filled(fresh(outputs))

            with torch.enable_grad(), saved_tensors_hooks(_known, lambda one: one), called_in_turn(self._cores, inside):
                forward()
            return Recorded(tuple(into), tuple(out))

        self._skeleton = Skeleton.of_parts(run, self._places, look)

    @property
    def skeleton(self) -> Skeleton:
        """The graph of the cores."""
        return self._skeleton

    def backward(
        self,
        forward: Forward,
        leaves: Sequence[torch.Tensor],
        manifest: Manifest,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        shared: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Run ``forward`` with what came in the place of its cores, then go backwards.

        Args:
            forward: the whole stage, with this microbatch's batch, and ``leaves`` as its inputs.
            leaves: those of the graph's making; they are given no gradient that stays.
            manifest: of the forward's side.
            tensors: what was shipped.
            gradients: of each output, None where nobody used it; None in the place of all: the one output is a loss.
            shared: this microbatch's inputs that both sides have; None: those of the graph's making.

        Returns:
            The gradient of each leaf.

        Raises:
            ValueError: the forward was another one than this graph.
        """
        views = self._skeleton.views(manifest, tensors, shared)
        values = tuple(views[one] for one in manifest.outputs)
        hollow = [_hollow(one) for one in self._skeleton.outputs]
        flat = [*hollow[: len(hollow) - len(values)], *values]

        def inside(number: int, call: Call) -> Any:
            ins, outs = self._range(number, self._inputs), self._range(number, [one.tensors for one in self._forms])
            if len(call.inputs) != len(ins):
                raise ValueError(f"core {number} had {len(ins)} inputs with gradients, and has {len(call.inputs)}")

            def back(given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
                whole: list[torch.Tensor | None] = [None] * len(flat)
                whole[outs.start : outs.stop] = given
                return self._skeleton.through(views, whole)[ins.start : ins.stop]

            anchor = torch.empty(0, requires_grad=True)  # where no input has a gradient, parameters have
            made = _Boundary.apply(back, flat[outs.start : outs.stop], anchor, *call.inputs)
            return self._forms[number].filled(made)

        for one in leaves:
            one.grad = None
        with torch.enable_grad(), called_in_turn(self._cores, inside):
            results = forward()
            graph.go_backward(results, gradients)
        self.outputs = tuple(one.detach() for one in results)
        found = tuple(one.grad for one in leaves)
        for one in leaves:
            one.grad = None
        return found

    @staticmethod
    def _range(number: int, counts: Sequence[int]) -> range:
        begin = sum(counts[:number])
        return range(begin, begin + counts[number])


def _cleared(tensors: Tensors) -> Tensors:
    """Leaves with values that can be computed with."""
    return fresh(tuple(one.detach().nan_to_num() for one in tensors))


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """It is saved around cores, on the backward's side."""
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise ValueError(
            f"what is around the cores uses the values of a tensor of shape {tuple(tensor.shape)}, which the "
            "backward's side has not: it has to belong to a core"
        )
    return tensor


def _hollow(like: torch.Tensor) -> torch.Tensor:
    """Has no values that anybody may use, and takes no memory."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


class _Boundary(torch.autograd.Function):
    """What came, in the place of a core; backwards through the core's graph."""

    @staticmethod
    def forward(ctx: Any, back: Any, values: Any, anchor: Any, *inputs: Any) -> Any:
        del anchor, inputs
        ctx.back = back
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, None, *ctx.back(gradients))
