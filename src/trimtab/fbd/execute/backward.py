"""A backward rank: gradients and the optimizer; goes backwards through what forward ranks have sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trimtab.fbd.execute.fingerprint import fingerprint
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import ACTIVATION, CREDIT, Finish, Program, Tensors, label
from trimtab.fbd.execute.weights import send_weights
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.recompute import backward_again
from trimtab.fbd.split.shipping import Arrived
from trimtab.fbd.split.skeleton import Skeleton
from trimtab.transport.interface import Transport

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class BackwardRank:
    """One of them, on its own process."""

    def __init__(
        self, program: Program, rank: VirtualRank, module: nn.Module, finish: Finish, transport: Transport
    ) -> None:
        """``module``: the stage, as the optimizer knows it."""
        self._program = program
        self._rank = rank
        self._module = module
        self._finish = finish
        self._transport = transport
        self._mail = Mail(transport, program.patience)
        self._skeletons: dict[Shapes, Skeleton] = {}
        self._held = [*module.parameters(), *module.buffers()]

    def step(self, step: int, *, last: bool = False) -> None:
        """All backwards of a step, in order of the microbatches; then the optimizer; then the new weights go to the
        forward ranks, unless this was the ``last`` step.

        Raises:
            ValueError: what came is of another forward or another batch than this side has.
            TransportError: something has not come in time; PeerLost: a process has died.
        """
        layout = self._program.layout
        cell = self._rank.instance // layout.backwards
        for microbatch in layout.microbatches(Role.BACKWARD, self._rank.instance, self._program.microbatches):
            self._backward(step, cell, microbatch)
        self._finish(self._module)
        if not last:
            send_weights(self._transport, self._program, self._rank, self._module, step + 1)

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
        gradients: list[torch.Tensor | None] = [None]
        if self._rank.stage < layout.stages - 1:
            after = process(self._rank._replace(stage=self._rank.stage + 1))
            gradients = list(self._mail.message(after, label(ACTIVATION, step, microbatch, backward=True)).tensors)
        back = self._through(arrived, batch, gradients)
        arrived.release()
        self._transport.send(source, label(CREDIT, step, microbatch, backward=True), ())
        if self._rank.stage > 0:
            before = process(self._rank._replace(stage=self._rank.stage - 1))
            found = [one for one in back if one is not None]
            self._transport.send(before, label(ACTIVATION, step, microbatch, backward=True), found)

    def _through(self, arrived: Arrived, batch: Tensors, gradients: list[torch.Tensor | None]) -> Any:
        program = self._program
        if arrived.manifest is None:
            inputs, states = arrived.tensors[: arrived.inputs], arrived.tensors[arrived.inputs :]
            return backward_again(
                lambda *given: program.stage(self._module, given, batch), inputs, states, gradients, program.random
            )
        skeleton = self._skeleton(arrived, batch)
        return skeleton.backward(arrived.manifest, arrived.tensors, gradients, batch)

    def _skeleton(self, arrived: Arrived, batch: Tensors) -> Skeleton:
        """The graph for inputs and a batch of these shapes; built when they first come."""
        said = [(str(dtype), tuple(shape)) for dtype, shape in arrived.about.get("inputs", [])]
        shapes: Shapes = (*said, *((str(one.dtype), tuple(one.shape)) for one in batch))
        known = self._skeletons.get(shapes)
        if known is None:
            device = self._held[0].device if self._held else torch.device("cpu")
            leaves = tuple(
                torch.zeros(shape, dtype=getattr(torch, dtype), device=device).requires_grad_(
                    getattr(torch, dtype).is_floating_point
                )
                for dtype, shape in said
            )
            with self._program.random.kept():
                known = Skeleton(
                    lambda: self._program.stage(self._module, leaves, batch), leaves, Places(self._held, batch)
                )
            self._skeletons[shapes] = known
        return known
