"""The backward of a stage on the backward side: through what came, or through a graph of this side's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from trimtab.fbd.execute.checks import circumstances, device_of, unchanged
from trimtab.fbd.execute.cutting import degrees_of
from trimtab.fbd.execute.fingerprint import fingerprint, layout_of
from trimtab.fbd.execute.graphs import Gradients, Graphs
from trimtab.fbd.execute.program import Program, Tensors
from trimtab.fbd.ranks import VirtualRank
from trimtab.fbd.split.graph import go_backward, has_gradient
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.recompute import backward_again
from trimtab.fbd.split.shipping import Arrived

OTHER_BATCH: Final = "the forward had another batch than the backward has; both sides have to read the same data"


class Graph(NamedTuple):
    """Of a forward that was run here."""

    leaves: Tensors
    outputs: Tensors

    def backward(self, gradients: Gradients | None) -> Gradients:
        """Gradients of the inputs."""
        go_backward(self.outputs, gradients)
        return tuple(one.grad for one in self.leaves)


class Backing:
    """Of one rank."""

    def __init__(self, program: Program, rank: VirtualRank, module: nn.Module) -> None:
        self._program = program
        self._rank = rank
        self._module = module
        self._graphs = Graphs(program, module)

    def check(self, about: dict[str, Any], batch: Tensors) -> str:
        """Why a forward was another one than this side has, as far as the host knows; empty: it was not."""
        if about.get("batch") != layout_of(batch):
            return OTHER_BATCH
        here = circumstances(self._module)
        if about.get("circumstances") != here:
            return f"the forward ran with {about.get('circumstances')}, and here are {here}"
        return ""

    def differs(self, about: dict[str, Any], beside: list[torch.Tensor], batch: Tensors) -> torch.Tensor | bool:
        """Whether the batch's bytes were others; on a device, where that is seen only there. Takes the fingerprint out
        of ``beside``, if it came that way. Nothing waits for a device."""
        mine = fingerprint(batch)
        theirs = about["fingerprint"] if "fingerprint" in about else beside.pop(0)
        if isinstance(theirs, torch.Tensor):
            return theirs != (mine if mine.is_cuda else int(mine))
        return (mine != theirs) if mine.is_cuda else int(mine) != theirs

    def compare(self, words: dict[str, Any], batch: Tensors) -> dict[str, str]:
        """In a rehearsal: by mode, why this side could not go backwards."""
        modes = list(words["sent"])
        why = self.check(words["about"], batch)
        if not why and words["hash"] != int(fingerprint(batch)):
            why = OTHER_BATCH
        if why:
            return dict.fromkeys(modes, why)
        found: dict[str, str] = {}
        here = device_of(self._module).type
        if "recompute" in modes and words["draws"] and words["device"] != here:
            found["recompute"] = (
                f"the forward draws random numbers on {words['device']}, and run again on {here} it would draw others: "
                "use mode ship"
            )
        if "ship" in modes:
            found |= self._compare_graphs(words, batch)
        return found

    def _compare_graphs(self, words: dict[str, Any], batch: Tensors) -> dict[str, str]:
        try:
            if "whole" in words:
                words["plan"] = self._graphs.planned(words, batch, degrees_of(self._program, self._rank))
                return {}
            different = self._graphs.difference(Manifest.from_json(words["manifest"]), words["about"], batch)
        except ValueError as error:
            return {"ship": str(error)}
        return {"ship": f"the forward does not fit this side's graph: {different}"} if different else {}

    def forget(self) -> None:
        """The graphs that were made: the next microbatches make new ones."""
        self._graphs.forget()

    def through(self, arrived: Arrived, batch: Tensors, gradients: Gradients | None) -> Gradients:
        """Gradients of the inputs of a microbatch, from what came."""
        program = self._program
        if arrived.manifest is None:
            inputs, states = arrived.tensors[: arrived.inputs], arrived.tensors[arrived.inputs :]
            with unchanged(self._module, (), batch):
                return backward_again(
                    lambda *given: program.stage(self._module, given, batch), inputs, states, gradients, program.random
                )
        return self._graphs.through(arrived, batch, gradients)

    def ordinary(self, inputs: Sequence[torch.Tensor], batch: Tensors) -> Graph:
        """A forward as in ordinary training."""
        leaves = tuple(one.detach().requires_grad_(has_gradient(one.dtype)) for one in inputs)
        with torch.enable_grad():
            return Graph(leaves, tuple(self._program.stage(self._module, leaves, batch)))
