"""The backward's side: a graph that is built once, and gone through for every microbatch with what has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from trimtab.fbd.split import attributes, graph
from trimtab.fbd.split.export import Export, Shipment
from trimtab.fbd.split.manifest import Manifest, Slot
from trimtab.fbd.split.places import Places, span
from trimtab.fbd.split.watching import Watch

Forward = Callable[[], tuple[torch.Tensor, ...]]
"""A forward pass with inputs of the right shapes, whatever is in them; its outputs."""
Recording = Callable[[], AbstractContextManager[None]]
"""Within it, what a forward saves is taken down."""
Looked = Sequence[torch.Tensor]


class Recorded(NamedTuple):
    """Leaves and outputs of what was run within."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


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

        def run(recording: Recording) -> Recorded:
            with recording():
                outputs = forward()
            return Recorded(tuple(inputs), tuple(outputs))

        self._record(run, places)

    @classmethod
    def of_parts(
        cls,
        run: Callable[[Recording], Recorded],
        places: Places,
        look: Callable[[Manifest, Looked], None] | None = None,
    ) -> Skeleton:
        """Of what ``run`` does within the contexts that it is given: parts of a forward, one after the other.

        Args:
            look: is shown the graph's manifest and the tensors of its slots before they are forgotten; what it raises
                is raised here. What it is shown has inputs and outputs behind the saved tensors.
        """
        made = cls.__new__(cls)
        made._record(run, places, look)
        return made

    def _record(
        self,
        run: Callable[[Recording], Recorded],
        places: Places,
        look: Callable[[Manifest, Looked], None] | None = None,
    ) -> None:
        self._places = places
        self._current: tuple[torch.Tensor, ...] | None = None
        self.layouts = True
        """Whether what comes has to lie in memory as here."""
        watch = Watch(places)
        recorder = Export(places, self._saved)

        @contextmanager
        def recording() -> Iterator[None]:
            with recorder, torch.enable_grad(), watch():
                yield

        devices = sorted({one.device.index for one in places.parameters if one.device.type == "cuda"})
        with torch.random.fork_rng(devices):
            self._inputs, self._outputs = run(recording)
        self._manifest_of(recorder, look)
        recorder.forget()  # the tensors of this run
        self._nodes = graph.walk(self._outputs)
        watch.check(self._nodes)
        self._put([torch.empty(0)] * len(self.manifest.slots))
        self._kept = [attributes.Kept(node) for node in self._nodes if getattr(node, "__dict__", None)]

    def _manifest_of(self, recorder: Export, look: Callable[[Manifest, Looked], None] | None) -> None:
        outputs = tuple(one for one in self._outputs if one.requires_grad)
        if look is None:
            self.manifest = recorder.shipment(outputs).manifest
        else:
            self.manifest = recorder.shipment(outputs, self._inputs, self._outputs).manifest
            look(self.manifest, recorder.saved)

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
        return self.through(self.views(manifest, tensors, shared), gradients)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Of the graph, whose values are those of its making."""
        return self._outputs

    def through(
        self, saved: tuple[torch.Tensor, ...], gradients: Sequence[torch.Tensor | None] | None
    ) -> tuple[torch.Tensor | None, ...]:
        """:meth:`backward` with what :meth:`views` found."""
        self._current = saved
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

    def views(
        self, manifest: Manifest, tensors: Sequence[torch.Tensor], shared: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """What came, slot by slot. ValueError as for :meth:`backward`."""
        different = manifest.difference(self.manifest, layouts=self.layouts)
        if different:
            raise ValueError(f"the forward does not fit this side's graph: {different}")
        check_sizes(manifest, tensors)
        there = self._places.shared if shared is None else tuple(shared)
        own = list(zip(manifest.slots[: manifest.own], self.manifest.slots, strict=False))
        homes = {slot.index: here.device for slot, here in own if slot.source == "shipped"}
        at_home = [_at_home(one, homes.get(number)) for number, one in enumerate(tensors)]
        found = [view_of(slot, at_home, self._places.parameters, there) for slot in manifest.slots]
        if not self.layouts:
            found[: len(own)] = [_laid_out(one, here) for one, (_, here) in zip(found, own, strict=False)]
        return tuple(found)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give nodes what they keep as attributes."""
        for node in self.manifest.nodes:
            for path, slot in node.slots:
                attributes.put(self._nodes[node.place], path, tensors[slot])

    def _saved(self, number: int) -> torch.Tensor:
        """What a node asks for while it is gone through."""
        if self._current is None:
            raise RuntimeError("this graph is gone through by Skeleton.backward alone")
        return self._current[number]


def _at_home(storage: torch.Tensor, home: str | None) -> torch.Tensor:
    """Where this side had what lies in it: a transport puts everything on one device, and states of generators, for
    example, have to be on the host."""
    return storage if home is None or storage.device.type == home else storage.to(home)


def _laid_out(tensor: torch.Tensor, here: Slot) -> torch.Tensor:
    """As a node of this side expects it, where that is without gaps: a kernel may count on it."""
    sides = zip(here.shape, tensor.stride(), here.stride, strict=True)
    if here.source != "shipped" or all(size == 1 or a == b for size, a, b in sides):
        return tensor
    made = torch.empty_strided(here.shape, here.stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor) if span(made)[1] == made.nbytes else tensor


def check_sizes(manifest: Manifest, tensors: Sequence[torch.Tensor]) -> None:
    """ValueError where ``tensors`` are not the manifest's storages."""
    sizes = [one.bytes for one in manifest.storages]
    if [one.numel() for one in tensors] != sizes:
        raise ValueError(f"{len(tensors)} tensors came, of other sizes than the manifest's {len(sizes)}")


def view_of(
    slot: Slot, tensors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The tensor of a slot: in what was shipped, in a parameter, or in an input of both sides."""
    kind: torch.dtype = getattr(torch, slot.dtype)
    if slot.source == "shipped":
        whole = tensors[slot.index]
        usable = whole.numel() // kind.itemsize * kind.itemsize
        typed = whole[:usable].view(kind)  # which need not begin where its storage does
        return typed.as_strided(slot.shape, slot.stride, typed.storage_offset() + slot.offset)
    base = (parameters if slot.source == "parameter" else shared)[slot.index].detach()
    if base.dtype != kind:
        raise ValueError(f"{slot.source} {slot.index} is {base.dtype} here and was {kind} in the forward")
    return base.as_strided(slot.shape, slot.stride, base.storage_offset() + slot.offset)


def shipment_of(forward: Forward, places: Places) -> tuple[tuple[torch.Tensor, ...], Shipment]:
    """Run ``forward`` on the forward's side: its outputs, without their graph, and what to send."""
    export = Export(places)
    with export, torch.enable_grad():
        outputs = forward()
    shipment = export.shipment(tuple(one for one in outputs if one.requires_grad))
    export.forget()  # it is in a cycle, and would keep them until Python looks for those
    return tuple(one.detach() for one in outputs), shipment
