"""A forward rank: weights and nothing else; runs forwards, and sends on what they made and what they saved."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from trimtab.fbd.execute.checks import check_rank, circumstances, unchanged
from trimtab.fbd.execute.fingerprint import fingerprint
from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import ACTIVATION, SHIPMENT, Program, Tensors, label
from trimtab.fbd.execute.streams import Streams
from trimtab.fbd.execute.weights import receive_weights
from trimtab.fbd.ranks import Role, VirtualRank
from trimtab.fbd.split.graph import has_gradient
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.recompute import forward_only
from trimtab.fbd.split.shipping import Sender
from trimtab.fbd.split.skeleton import shipment_of
from trimtab.transport.interface import Transport


class ForwardRank:
    """One of them, on its own process."""

    def __init__(self, program: Program, rank: VirtualRank, module: nn.Module, transport: Transport) -> None:
        """``module``: the stage; its weights come from the backward ranks.

        Raises:
            ValueError: this process cannot be ``rank``, or the stage cannot be trained so.
        """
        check_rank(program, rank, Role.FORWARD, module, transport)
        self._program = program
        self._rank = rank
        self._module = module
        self._transport = Streams(transport)
        self._sender = Sender(self._transport)
        self._open: Counter[int] = Counter()
        """Shipments of which the backward has not been heard, by process."""
        self._mail = Mail(self._transport, program.patience, self._credit)
        self._held = [*module.parameters(), *module.buffers()]

    def step(self, step: int) -> list[torch.Tensor]:
        """All forwards of a step. On the last stage the losses of its microbatches, else nothing.

        Raises:
            ValueError: forward and backward of the stage cannot be apart, and why.
            TransportError: something has not come in time; PeerLost: a process has died.
        """
        receive_weights(self._mail, self._program, self._rank, self._module, step)
        layout = self._program.layout
        cell = self._rank.instance // layout.forwards
        losses: list[torch.Tensor] = []
        for microbatch in layout.microbatches(Role.FORWARD, self._rank.instance, self._program.microbatches):
            outputs = self._forward(step, cell, microbatch)
            if self._rank.stage == layout.stages - 1:
                losses += outputs
            else:
                self._transport.send(self._process(self._rank.stage + 1), label(ACTIVATION, step, microbatch), outputs)
        return losses

    def _forward(self, step: int, cell: int, microbatch: int) -> Tensors:
        program = self._program
        inputs = self._inputs(step, microbatch)
        batch = program.batch(step, cell, microbatch)
        to = self._backward_process(cell, microbatch)
        self._mail.until(lambda: self._open[to] < program.ahead or None, f"a free place on process {to}")
        about = {"batch": fingerprint(batch), "circumstances": circumstances(self._module)}
        where = label(SHIPMENT, step, microbatch)
        if program.mode == "recompute":
            with unchanged(self._module, inputs, batch):
                outputs, seed = forward_only(
                    lambda *given: program.stage(self._module, given, batch), inputs, program.random
                )
            self._sender.send_seed(to, where, seed, about)
        else:
            leaves = tuple(one.detach().requires_grad_(has_gradient(one.dtype)) for one in inputs)
            with unchanged(self._module, leaves, batch):
                outputs, shipment = shipment_of(
                    lambda: program.stage(self._module, leaves, batch), Places(self._held, batch)
                )
            about |= {"inputs": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in inputs]}
            self._sender.send(to, where, shipment, about)
        self._open[to] += 1
        return outputs

    def _inputs(self, step: int, microbatch: int) -> Tensors:
        if self._rank.stage == 0:
            return ()
        message = self._mail.message(self._process(self._rank.stage - 1), label(ACTIVATION, step, microbatch))
        return message.tensors

    def _process(self, stage: int) -> int:
        """Of the same forward instance of another stage: a microbatch stays with it."""
        return self._program.placement.process(self._rank._replace(stage=stage))

    def _backward_process(self, cell: int, microbatch: int) -> int:
        instance = self._program.layout.instance_of(Role.BACKWARD, cell, microbatch)
        return self._program.placement.process(VirtualRank(Role.BACKWARD, self._rank.stage, instance, 0))

    def _credit(self, process: int) -> None:
        self._open[process] -= 1
