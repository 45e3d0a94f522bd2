"""The backward's side: a graph that is built once, and gone through for every microbatch with what has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trimtab.fbd.split import attributes, graph
from trimtab.fbd.split.export import Export, Shipment
from trimtab.fbd.split.manifest import Manifest, Slot
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.watching import Watch

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
            ValueError: ``forward`` keeps something that can neither be sent nor compared.
        """
        self._inputs = tuple(inputs)
        self._places = places
        self._current: tuple[torch.Tensor, ...] | None = None
        watch = Watch(places)
        recorder = Export(places, self._saved)
        devices = sorted({one.device.index for one in (*inputs, *places.parameters) if one.device.type == "cuda"})
        with torch.random.fork_rng(devices), recorder, torch.enable_grad(), watch():
            outputs = forward()
        self._outputs = tuple(outputs)
        self.manifest = recorder.shipment(tuple(one for one in outputs if one.requires_grad)).manifest
        watch.check(self.manifest.names)
        recorder.forget()  # the tensors of this run
        self._nodes = graph.walk(self._outputs)
        self._homes = {slot.index: slot.device for slot in self.manifest.slots if slot.source == "shipped"}
        self._put([torch.empty(0)] * len(self.manifest.slots))
        self._kept = [attributes.Kept(node) for node in self._nodes if getattr(node, "__dict__", None)]

    def backward(
        self,
        manifest: Manifest,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None] | None,
        shared: Sequence[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Go backwards for a microbatch: gradients are accumulated into the parameters, by the usual hooks.

        Args:
            manifest: of the forward.
            tensors: what was shipped (uint8, one dimension).
            gradients: of each output, None where nobody used it; None in the place of all: the one output is a loss.
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
        at_home = [self._at_home(number, one) for number, one in enumerate(tensors)]
        self._current = tuple(self._view(slot, at_home, there) for slot in manifest.slots)
        for one in self._inputs:
            one.grad = None
        try:
            self._put(self._current)
            graph.go_backward(self._outputs, gradients, again=True)
        finally:
            self._current = None
            for one in self._kept:
                one.restore()
        found = tuple(one.grad for one in self._inputs)
        for one in self._inputs:
            one.grad = None
        return found

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give nodes what they keep as attributes."""
        for node in self.manifest.nodes:
            for path, slot in node.slots:
                attributes.put(self._nodes[node.place], path, tensors[slot])

    def _at_home(self, number: int, storage: torch.Tensor) -> torch.Tensor:
        """Where this side had what lies in it: a transport puts everything on one device, and states of generators, for
        example, have to be on the host."""
        home = self._homes.get(number, storage.device.type)
        return storage if storage.device.type == home else storage.to(home)

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
