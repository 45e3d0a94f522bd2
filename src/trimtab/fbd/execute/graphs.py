"""Graphs of a stage's forward on the backward side, one for each shape that comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from trimtab.fbd.execute.checks import device_of, unchanged
from trimtab.fbd.execute.program import Program, Tensors
from trimtab.fbd.reshard.cuts import Degrees
from trimtab.fbd.reshard.plan import Plan
from trimtab.fbd.reshard.rehearsal import plan_for
from trimtab.fbd.split.graph import has_gradient
from trimtab.fbd.split.manifest import Manifest
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.shipping import Arrived
from trimtab.fbd.split.skeleton import Skeleton
from trimtab.fbd.split.within import Within

Shapes = tuple[tuple[Any, ...], ...]
Gradients = tuple[torch.Tensor | None, ...]
_MOST: Final = 8
"""Graphs that are kept, of the shapes that came last."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A graph, and the leaves that it begins with."""

    graph: Skeleton | Within
    leaves: Tensors

    @property
    def manifest(self) -> Manifest:
        """Of what comes."""
        return (self.graph.skeleton if isinstance(self.graph, Within) else self.graph).manifest


class Graphs:
    """Of one rank."""

    def __init__(self, program: Program, module: nn.Module) -> None:
        self._program = program
        self._module = module
        self._held = [*module.parameters(), *module.buffers()]
        self._made: dict[Shapes, _Made] = {}

    def forget(self) -> None:
        """All of them, but those that were made with their forward ranks, which have not been told."""
        if self._program.layout.forward_tp == self._program.layout.backward_tp:
            self._made.clear()

    def difference(self, manifest: Manifest, about: dict[str, Any], batch: Tensors) -> str:
        """Where a forward is not as this side's graph; empty: nowhere. ValueError where there can be none."""
        return manifest.difference(self._of(about, batch).manifest)

    def planned(self, words: dict[str, Any], batch: Tensors, degrees: Degrees) -> Plan:
        """Make the graph of a rehearsal at another degree. ValueError where what was saved cannot be cut for it."""
        program, module = self._program, self._module
        assert program.cores is not None
        leaves = self._leaves(words["about"])
        within = Within(program.cores(module), Places(self._held, batch))
        manifest = Manifest.from_json(words["whole"])
        with program.random.kept(), unchanged(module, leaves, batch):
            plan = plan_for(within, self._stage(leaves, batch), manifest, words["tensors"], degrees)
        self._made[_shapes(words["about"], batch)] = _Made(within, leaves)
        return plan

    def through(self, arrived: Arrived, batch: Tensors, gradients: Gradients | None) -> Gradients:
        """Gradients of the inputs of a microbatch, from what came."""
        assert arrived.manifest is not None
        made = self._of(arrived.about, batch)
        if isinstance(made.graph, Skeleton):
            return made.graph.backward(arrived.manifest, arrived.tensors, gradients, batch)
        with unchanged(self._module, (), batch):
            return made.graph.backward(
                self._stage(made.leaves, batch), made.leaves, arrived.manifest, arrived.tensors, gradients, batch
            )

    def _of(self, about: dict[str, Any], batch: Tensors) -> _Made:
        """The graph for inputs and a batch of these shapes; made when they first come."""
        shapes = _shapes(about, batch)
        known = self._made.pop(shapes, None) or self._new(about, batch)
        self._made[shapes] = known
        while len(self._made) > _MOST:
            del self._made[next(iter(self._made))]
        return known

    def _new(self, about: dict[str, Any], batch: Tensors) -> _Made:
        program, module = self._program, self._module
        if program.layout.forward_tp != program.layout.backward_tp:
            raise ValueError(
                "a microbatch of another shape than the first: with different tensor parallel degrees all are alike"
            )
        leaves = self._leaves(about)
        forward, places = self._stage(leaves, batch), Places(self._held, batch)
        with program.random.kept(), unchanged(module, leaves, batch):
            if program.cores is None:
                return _Made(Skeleton(forward, leaves, places), leaves)
            within = Within(program.cores(module), places)
            within.build(forward)
            return _Made(within, leaves)

    def _stage(self, leaves: Tensors, batch: Tensors) -> Callable[[], Tensors]:
        return lambda: self._program.stage(self._module, leaves, batch)

    def _unknown(self, kind: torch.dtype) -> float:
        """In the place of values of inputs, which this side has not: with cores, nothing may use them."""
        return float("nan") if self._program.cores is not None and has_gradient(kind) else 0

    def _leaves(self, about: dict[str, Any]) -> Tensors:
        device, shape_of = device_of(self._module), self._program.hooks.input_shape
        said: Sequence[tuple[str, list[int]]] = about.get("inputs", [])
        found = ((getattr(torch, dtype), shape_of(tuple(shape))) for dtype, shape in said)
        return tuple(
            torch.full(shape, self._unknown(kind), dtype=kind, device=device).requires_grad_(has_gradient(kind))
            for kind, shape in found
        )


def _shapes(about: dict[str, Any], batch: Tensors) -> Shapes:
    said = [(str(dtype), tuple(shape)) for dtype, shape in about.get("inputs", [])]
    return (*said, *((str(one.dtype), tuple(one.shape), one.stride()) for one in batch))
