"""A backward rank: gradients and the optimizer; goes backwards through what forward ranks have sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from trimtab.fbd.execute.checks import check_rank, circumstances, unchanged
from trimtab.fbd.execute.fingerprint import fingerprint
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import ACTIVATION, CREDIT, Finish, Program, Tensors, label
from trimtab.fbd.execute.streams import Streams
from trimtab.fbd.execute.weights import receive_weights, send_weights
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.split.graph import has_gradient
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.recompute import backward_again
from trimtab.fbd.split.shipping import Arrived
from trimtab.fbd.split.skeleton import Skeleton
from trimtab.transport.interface import Transport

Shapes = tuple[tuple[Any, ...], ...]
Gradients = tuple[torch.Tensor | None, ...]
_SKELETONS: Final = 8
"""Graphs that are kept, of the shapes that came last."""


class BackwardRank:
    """One of them, on its own process."""

    def __init__(
        self, program: Program, rank: VirtualRank, module: nn.Module, finish: Finish, transport: Transport
    ) -> None:
        """``module``: the stage, as the optimizer knows it. Instance 0 gives its weights to the others.

        Raises:
            ValueError: this process cannot be ``rank``, or the stage cannot be trained so.
        """
        check_rank(program, rank, Role.BACKWARD, module, transport)
        self._program = program
        self._rank = rank
        self._module = module
        self._finish = finish
        self._transport = Streams(transport)
        self._mail = Mail(self._transport, program.patience)
        self._begun = False
        self._skeletons: dict[Shapes, Skeleton] = {}
        self._held = [*module.parameters(), *module.buffers()]

    def step(self, step: int, *, last: bool = False) -> None:
        """All backwards of a step, in order of the microbatches; then the optimizer; then the new weights go to the
        forward ranks, unless this was the ``last`` step.

        Raises:
            ValueError: what came is of another forward or another batch than this side has, or forward and backward of
                the stage cannot be apart.
            TransportError: something has not come in time; PeerLost: a process has died.
        """
        layout = self._program.layout
        cell = self._rank.instance // layout.backwards
        if not self._begun:
            self._begin(step)
        for microbatch in layout.microbatches(Role.BACKWARD, self._rank.instance, self._program.microbatches):
            self._backward(step, cell, microbatch)
        self._finish(self._module)
        if not last:
            send_weights(self._transport, self._program, self._rank, self._module, step + 1)

    def _begin(self, step: int) -> None:
        """All ranks of the stage begin with the same weights."""
        if self._rank.instance == 0:
            send_weights(self._transport, self._program, self._rank, self._module, step, first=True)
        else:
            receive_weights(self._mail, self._program, self._rank, self._module, step)
        self._begun = True

    def _backward(self, step: int, cell: int, microbatch: int) -> None:
        layout, process = self._program.layout, self._program.placement.process
        instance = layout.instance_of(Role.FORWARD, cell, microbatch)
        source = process(VirtualRank(Role.FORWARD, self._rank.stage, instance, 0))
        arrived = self._mail.shipment(source, step, microbatch)
        batch = self._program.batch(step, cell, microbatch)
        if arrived.about.get("batch") != fingerprint(batch):
            raise ValueError(
                f"step {step}, microbatch {microbatch}: the forward had another batch than the backward has; both "
                "sides have to read the same data"
            )
        here = circumstances(self._module)
        if arrived.about.get("circumstances") != here:
            raise ValueError(
                f"step {step}, microbatch {microbatch}: the forward ran with {arrived.about.get('circumstances')}, and "
                f"here are {here}"
            )
        gradients = None
        if self._rank.stage < layout.stages - 1:
            after = process(self._rank._replace(stage=self._rank.stage + 1))
            gradients = _read(self._mail.message(after, label(ACTIVATION, step, microbatch, backward=True)).tensors)
        back = self._through(arrived, batch, gradients)
        arrived.release()
        self._transport.send(source, label(CREDIT, step, microbatch, backward=True), ())
        if self._rank.stage > 0:
            before = process(self._rank._replace(stage=self._rank.stage - 1))
            self._transport.send(before, label(ACTIVATION, step, microbatch, backward=True), _written(back))

    def _through(self, arrived: Arrived, batch: Tensors, gradients: Gradients | None) -> Gradients:
        program = self._program
        if arrived.manifest is None:
            inputs, states = arrived.tensors[: arrived.inputs], arrived.tensors[arrived.inputs :]
            with unchanged(self._module, (), batch):
                return backward_again(
                    lambda *given: program.stage(self._module, given, batch), inputs, states, gradients, program.random
                )
        skeleton = self._skeleton(arrived, batch)
        return skeleton.backward(arrived.manifest, arrived.tensors, gradients, batch)

    def _skeleton(self, arrived: Arrived, batch: Tensors) -> Skeleton:
        """The graph for inputs and a batch of these shapes; built when they first come."""
        said = [(str(dtype), tuple(shape)) for dtype, shape in arrived.about.get("inputs", [])]
        shapes: Shapes = (*said, *((str(one.dtype), tuple(one.shape), one.stride()) for one in batch))
        known = self._skeletons.pop(shapes, None) or self._built(said, batch)
        self._skeletons[shapes] = known
        while len(self._skeletons) > _SKELETONS:
            del self._skeletons[next(iter(self._skeletons))]
        return known

    def _built(self, said: Sequence[tuple[str, tuple[int, ...]]], batch: Tensors) -> Skeleton:
        device = self._held[0].device if self._held else torch.device("cpu")
        leaves = tuple(
            torch.zeros(shape, dtype=kind, device=device).requires_grad_(has_gradient(kind))
            for kind, shape in ((getattr(torch, dtype), shape) for dtype, shape in said)
        )
        with self._program.random.kept(), unchanged(self._module, leaves, batch):
            return Skeleton(lambda: self._program.stage(self._module, leaves, batch), leaves, Places(self._held, batch))


def _written(gradients: Gradients) -> list[torch.Tensor]:
    """For the stage before; of an input without one, a tensor of bytes, which no gradient is."""
    return [torch.empty(0, dtype=torch.uint8) if one is None else one for one in gradients]


def _read(tensors: Sequence[torch.Tensor]) -> Gradients:
    return tuple(None if one.dtype == torch.uint8 else one for one in tensors)
