"""The forward of a stage on the forward side: what it gives the next stage, and what its backward needs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.fbd.execute.checks import circumstances, unchanged
from trimtab.fbd.execute.fingerprint import fingerprint, layout_of
from trimtab.fbd.execute.program import Mode, Program, Tensors
from trimtab.fbd.ranks import VirtualRank
from trimtab.fbd.split.export import Shipment
from trimtab.fbd.split.graph import has_gradient
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.recompute import Seed, forward_only
from trimtab.fbd.split.shipping import Sender
from trimtab.fbd.split.skeleton import shipment_of
from trimtab.fbd.split.within import ship_within
from trimtab.transport.interface import Label


@dataclass(frozen=True, slots=True)
class Parcel:
    """What the backward of a microbatch needs."""

    content: Shipment | Seed
    about: dict[str, Any]
    beside: Tensors
    """Of the last stage, the loss; and before it the fingerprint of a batch that lies on a device."""

    def send(self, sender: Sender, to: int, label: Label) -> None:
        """Queue it."""
        if isinstance(self.content, Seed):
            sender.send_seed(to, label, self.content, self.about)
        else:
            sender.send(to, label, self.content, self.about)

    @property
    def bytes(self) -> int:
        """That travel."""
        return self.content.bytes if isinstance(self.content, Seed) else self.content.manifest.bytes


class Forwarding:
    """Of one rank."""

    def __init__(self, program: Program, rank: VirtualRank, module: nn.Module) -> None:
        self._program = program
        self._rank = rank
        self._module = module
        self._held = [*module.parameters(), *module.buffers()]

    def run(self, mode: Mode, inputs: Tensors, batch: Tensors) -> tuple[Tensors, Parcel]:
        """Outputs without a graph, and what to send. ValueError where the stage cannot be trained so."""
        program, module = self._program, self._module
        about = {
            "batch": layout_of(batch),
            "circumstances": circumstances(module),
            "inputs": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in inputs],
        }
        mark = fingerprint(batch)
        beside: Tensors = (mark,) if mark.is_cuda else ()
        if not beside:
            about["fingerprint"] = int(mark)
        if mode == "recompute":
            with unchanged(module, inputs, batch):
                outputs, seed = forward_only(lambda *given: program.stage(module, given, batch), inputs, program.random)
            return outputs, Parcel(seed, about, self._beside(beside, outputs))
        leaves = tuple(one.detach().requires_grad_(has_gradient(one.dtype)) for one in inputs)
        places = Places(self._held, batch)
        with unchanged(module, leaves, batch):
            if program.cores is None:
                outputs, shipment = shipment_of(lambda: program.stage(module, leaves, batch), places)
            else:
                cores = program.cores(module)
                outputs, shipment = ship_within(cores, lambda: program.stage(module, leaves, batch), places)
        return outputs, Parcel(shipment, about, self._beside(beside, outputs))

    def _beside(self, beside: Tensors, outputs: Tensors) -> Tensors:
        return (*beside, *outputs) if self._rank.stage == self._program.layout.stages - 1 else beside


def sow(program: Program, step: int, cell: int, microbatch: int, stage: int) -> None:
    """Set PyTorch's generators to where this forward is to draw from, if the program says so."""
    if program.seed is None:
        return
    name = f"{program.seed} {step} {cell} {microbatch} {stage}"
    torch.manual_seed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1)
