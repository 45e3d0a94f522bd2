"""The forward's side: an ordinary forward pass whose saved tensors are taken out of the graph, to be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trimtab.fbd.split import attributes, graph
from trimtab.fbd.split.manifest import Manifest, Node, Slot, Storage
from trimtab.fbd.split.places import Places, span

ALIGNMENT: Final = 64
"""Bytes: what is cut out of a storage begins at a multiple, so that views of any type fit into it."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """What the backward's side needs of a microbatch."""

    manifest: Manifest
    tensors: tuple[torch.Tensor, ...]
    """Bytes (uint8, one dimension), one for each storage of the manifest."""
    versions: tuple[tuple[torch.Tensor, int], ...] = ()
    """Saved tensors and their versions when they were saved."""

    def check(self) -> None:
        """RuntimeError where something was written into after it had been saved: a backward here would refuse it, too.
        To be called before the tensors are sent."""
        for tensor, version in self.versions:
            if tensor._version != version:  # what autograd itself compares
                raise RuntimeError(
                    f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place after the "
                    "forward had saved it"
                )


class Export(saved_tensors_hooks):
    """A context manager around one forward pass; :meth:`shipment` then says what to send.

    The graph behind the outputs keeps numbers in the place of tensors, so it cannot be gone through backwards here.
    """

    def __init__(self, places: Places, unpack: Callable[[int], torch.Tensor] | None = None) -> None:
        """``places``: what the other side has anyway. ``unpack``: what a node gets for the number of a saved tensor."""
        super().__init__(self._pack, self._unpack)
        self._probe = graph.Probe()
        self._given = unpack or _gone
        self._places = places
        self._saved: list[torch.Tensor] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def _pack(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided or tensor.is_quantized or is_traceable_wrapper_subclass(tensor):
            raise ValueError(f"the forward saves a {_kind(tensor)} tensor, which cannot be sent; use mode recompute")
        saved = tensor.detach().resolve_conj().resolve_neg()  # shares storage and version
        self._saved.append(saved)
        if self._places.of(saved) is None:
            self._versions.append((saved, saved._version))
        return len(self._saved) - 1

    def _unpack(self, number: int) -> torch.Tensor:
        return self._probe.answer(number) if self._probe.on else self._given(number)

    def forget(self) -> None:
        """What was saved."""
        self._saved.clear()
        self._versions.clear()

    def shipment(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor] = (),
        values: Sequence[torch.Tensor] = (),
    ) -> Shipment:
        """Of the forward that has made ``outputs``.

        Args:
            inputs: go along as they are.
            values: go along after them: outputs whose values the other side uses.

        Raises:
            ValueError: something can neither be sent nor compared.
        """
        nodes = graph.walk(outputs)
        kept: list[Node] = []
        saved: list[tuple[int, ...]] = []
        with self._probe:
            for place, node in enumerate(nodes):
                slots = tuple((path, self._pack(tensor)) for path, tensor in attributes.tensors(node))
                before = len(self._probe.asked)
                plain = graph.kept_values(node, self._probe, self._places)
                saved.append(tuple(self._probe.asked[before:]))
                if slots or plain:
                    kept.append(Node(place, graph.name_of(node), slots, plain))
        into, out = (tuple(self._pack(one) for one in some) for some in (inputs, values))
        tensors, storages, slots = laid_out(self._places, self._saved)
        edges = graph.edges(nodes, self._places)
        manifest = Manifest(slots, storages, tuple(kept), graph.names(nodes), edges, tuple(saved), into, out)
        return Shipment(manifest, tensors, tuple(self._versions))

    @property
    def saved(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the slots."""
        return tuple(self._saved)


def _kind(tensor: torch.Tensor) -> str:
    strided = tensor.layout is torch.strided
    return type(tensor).__name__ if strided and not tensor.is_quantized else str(tensor.layout).removeprefix("torch.")


def _gone(number: int) -> torch.Tensor:
    raise RuntimeError(f"saved tensor {number} has gone to where the backward runs")


def laid_out(
    places: Places, saved: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], tuple[Storage, ...], tuple[Slot, ...]]:
    """Tensors as parts of storages, each of which is sent once, as far as any needs it."""
    cut = _Cut(places, saved)
    return cut.tensors, cut.storages, cut.slots


class _Cut:
    """Saved tensors as parts of storages."""

    def __init__(self, places: Places, saved: Sequence[torch.Tensor]) -> None:
        ranges: dict[int, list[int]] = {}
        order: dict[int, torch.Tensor] = {}
        for tensor in saved:
            if places.of(tensor) is None:
                storage = tensor.untyped_storage().data_ptr()
                begin, end = span(tensor)
                order.setdefault(storage, tensor)
                known = ranges.setdefault(storage, [begin, end])
                known[0], known[1] = min(known[0], begin), max(known[1], end)
        index = {storage: number for number, storage in enumerate(order)}
        begins = {storage: found[0] // ALIGNMENT * ALIGNMENT for storage, found in ranges.items()}
        self.tensors = tuple(
            _bytes_of(tensor, begins[storage], ranges[storage][1]) for storage, tensor in order.items()
        )
        self.storages = tuple(Storage(one.numel()) for one in self.tensors)
        self.slots = tuple(_slot(places, tensor, index, begins) for tensor in saved)


def _bytes_of(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, begin, (max(end - begin, 0),), (1,))


def _slot(places: Places, tensor: torch.Tensor, index: dict[int, int], begins: dict[int, int]) -> Slot:
    about = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
    place = places.of(tensor)
    if place is not None:
        return Slot(*about, *place, tensor.device.type)
    storage = tensor.untyped_storage().data_ptr()
    begin = tensor.storage_offset() * tensor.element_size() - begins[storage]
    return Slot(*about, "shipped", index[storage], begin // tensor.element_size(), tensor.device.type)
