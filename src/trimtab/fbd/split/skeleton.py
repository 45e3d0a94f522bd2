"""The backward's side: a graph that is built once, and gone through for every microbatch with what has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trimtab.fbd.split import graph
from trimtab.fbd.split.export import Export, Shipment
from trimtab.fbd.split.manifest import Manifest, Slot
from trimtab.fbd.split.places import Places

Forward = Callable[[], tuple[torch.Tensor, ...]]
"""A forward pass with inputs of the right shapes, whatever is in them; its outputs."""


class Skeleton:
    """The graph of one model chunk at one shape.

    One backward at a time: nodes are given what they keep for each microbatch.
    """

    def __init__(self, forward: Forward, inputs: Sequence[torch.Tensor], places: Places) -> None:
        """Runs ``forward`` once, without leaving a trace in the random generators.

        Args:
            forward: of this side's own parameters.
            inputs: leaves of the graph whose gradients are wanted; ``forward`` uses them.
            places: this side's parameters and shared inputs, in the order of the other side's.

        Raises:
            ValueError: something else packs tensors in ``forward``, so that they cannot be had.
        """
        self._inputs = tuple(inputs)
        self._places = places
        self._current: tuple[torch.Tensor, ...] | None = None
        recorder = Export(places, self._saved)
        devices = sorted({one.device.index for one in (*inputs, *places.parameters) if one.device.type == "cuda"})
        with torch.random.fork_rng(devices), recorder, torch.enable_grad():
            outputs = forward()
        self._outputs = tuple(one for one in outputs if one.requires_grad)
        self.manifest = recorder.shipment(self._outputs).manifest
        recorder.forget()  # the tensors of this run
        self._nodes = graph.walk(self._outputs)

    def backward(
        self,
        manifest: Manifest,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        shared: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Go backwards for a microbatch: gradients are accumulated into the parameters, by the usual hooks.

        Args:
            manifest: of the forward.
            tensors: what was shipped (uint8, one dimension).
            gradients: of each output that has one; None: 1, for a scalar.
            shared: this microbatch's inputs that both sides have, in the order of ``places``; None: those given there.

        Returns:
            The gradient of each input.

        Raises:
            ValueError: the forward was another one than this graph, in one line that says where.
        """
        different = manifest.difference(self.manifest)
        if different:
            raise ValueError(f"the forward does not fit this side's graph: {different}")
        self._check(manifest, tensors)
        there = self._places.shared if shared is None else tuple(shared)
        self._current = tuple(self._view(slot, tensors, there) for slot in manifest.slots)
        for node in manifest.nodes:
            for path, slot in node.slots:
                graph.set_tensor(self._nodes[node.place], path, self._current[slot])
        for one in self._inputs:
            one.grad = None
        try:
            torch.autograd.backward(self._outputs, list(gradients), retain_graph=True)
        finally:
            self._current = None
        return tuple(one.grad for one in self._inputs)

    def _check(self, manifest: Manifest, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [one.bytes for one in manifest.storages]
        if [one.numel() for one in tensors] != sizes:
            raise ValueError(f"{len(tensors)} tensors came, of other sizes than the manifest's {len(sizes)}")

    def _saved(self, number: int) -> torch.Tensor:
        """What a node asks for while it is gone through."""
        if self._current is None:
            raise RuntimeError("this graph is gone through by Skeleton.backward alone")
        return self._current[number]

    def _view(self, slot: Slot, tensors: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, slot.dtype)
        if slot.source == "shipped":
            whole = tensors[slot.index]
            usable = whole.numel() // kind.itemsize * kind.itemsize
            return whole[:usable].view(kind).as_strided(slot.shape, slot.stride, slot.offset)
        base = (self._places.parameters if slot.source == "parameter" else shared)[slot.index].detach()
        if base.dtype != kind:
            raise ValueError(f"{slot.source} {slot.index} is {base.dtype} here and was {kind} in the forward")
        return base.as_strided(slot.shape, slot.stride, base.storage_offset() + slot.offset)


def shipment_of(forward: Forward, places: Places) -> tuple[tuple[torch.Tensor, ...], Shipment]:
    """Run ``forward`` on the forward's side: its outputs, without their graph, and what to send."""
    export = Export(places)
    with export, torch.enable_grad():
        outputs = forward()
    shipment = export.shipment(tuple(one for one in outputs if one.requires_grad))
    return tuple(one.detach() for one in outputs), shipment
