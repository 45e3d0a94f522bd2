"""What a forward rank sends to a backward rank of a larger tensor parallel degree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from trimtab.fbd.reshard.cuts import Cut, Degrees
from trimtab.fbd.reshard.evidence import Seen, decide
from trimtab.fbd.reshard.matching import paired
from trimtab.fbd.reshard.packing import Packing
from trimtab.fbd.split.export import Shipment
from trimtab.fbd.split.manifest import Manifest, Slot
from trimtab.fbd.split.skeleton import view_of

_HERE = -1
"""In the place of a slot of the forward: the backward's side has it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Made by a backward rank of a rehearsal; used by the forward rank for every microbatch of that shape."""

    manifest: Manifest
    """Of the backward's graph."""
    sources: tuple[int, ...]
    """Of each of its slots, the forward's; -1: it is on the backward's side anyway."""
    cuts: tuple[Cut | None, ...]
    """Of each; None: it is sent as it is."""

    def received(self, rehearsed: Manifest) -> int:
        """Bytes of a microbatch that the backward rank gets. ``rehearsed``: the forward's, of the rehearsal."""
        return _Way.of(self, rehearsed).manifest.bytes

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"manifest": self.manifest.to_json(), "sources": list(self.sources), "cuts": list(self.cuts)}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Plan:
        """The way back. ValueError for what is no plan."""
        try:
            cuts = tuple(None if one is None else Cut.from_json(one) for one in said["cuts"])
            plan = cls(Manifest.from_json(said["manifest"]), tuple(map(int, said["sources"])), cuts)
        except (KeyError, TypeError) as error:
            raise ValueError(f"plan: it makes no sense ({type(error).__name__}: {error})") from None
        if not len(plan.manifest.slots) == len(plan.sources) == len(plan.cuts):
            raise ValueError("plan: it makes no sense (as many slots as sources and cuts)")
        return plan


def plan_of(
    forward: Manifest,
    tensors: Sequence[torch.Tensor],
    backward: Manifest,
    saved: Sequence[torch.Tensor],
    degrees: Degrees,
) -> Plan:
    """Of a rehearsal that both sides have run.

    Args:
        forward: what the forward's side made.
        tensors: its storages, on any device: of them no more than one tensor at a time is fetched to this side's.
        backward: what this side made of the same inputs.
        saved: tensors of its slots.

    Raises:
        ValueError: the forward cannot be sent to a rank of that degree, and why.
    """
    pairs = paired(forward, backward, tuple(pieces for pieces, _ in degrees.ways()))
    seen: list[Seen] = []
    sources = [_HERE] * len(backward.slots)
    for number, slot in enumerate(backward.slots):
        source = pairs.slots[number]
        there = forward.slots[source]
        _compare(number, there, slot)
        if slot.source == "shipped":
            sources[number] = source
            if number not in pairs.states:
                seen.append(Seen(number, view_of(there, tensors, (), ()), saved[number]))
    decided = decide(seen, degrees)
    return Plan(backward, tuple(sources), tuple(decided.get(number) for number in range(len(backward.slots))))


def _compare(number: int, there: Slot, here: Slot) -> None:
    same = (there.dtype, there.source) == (here.dtype, here.source)
    known = here.source == "shipped" or (there.index == here.index and (there.offset, here.offset) == (0, 0))
    if not (same and known):
        raise ValueError(
            f"saved tensor {number} is {there.dtype}, {there.source} {there.index} from {there.offset} on, in the "
            f"forward, and {here.dtype}, {here.source} {here.index} from {here.offset} on, here"
        )


class Cutter:
    """Of a forward rank, for one shape."""

    def __init__(self, rehearsed: Manifest, plans: dict[int, Plan]) -> None:
        """``rehearsed``: this side's; ``plans``: by whatever names their receivers."""
        self._rehearsed = rehearsed
        self._plans = plans
        self._last: Manifest | None = None
        """Of the last microbatch, and what follows from it."""
        self._ways: dict[int, _Way] = {}

    def cut(self, shipment: Shipment, receiver: int) -> Shipment:
        """What ``receiver`` is to be sent of a microbatch. ValueError where its forward was not as rehearsed."""
        if shipment.manifest is not self._last:
            if shipment.manifest != self._last:
                different = shipment.manifest.difference(self._rehearsed)
                if different:
                    raise ValueError(f"this microbatch's forward is not as it was rehearsed: {different}")
                self._ways.clear()
            self._last = shipment.manifest
        if receiver not in self._ways:
            self._ways[receiver] = _Way.of(self._plans[receiver], shipment.manifest)
        way = self._ways[receiver]
        return Shipment(way.manifest, way.packing.of(shipment.tensors), shipment.versions)


class _Way(NamedTuple):
    """From microbatches of one manifest to one receiver."""

    packing: Packing
    manifest: Manifest
    """Of what it gets."""

    @classmethod
    def of(cls, plan: Plan, manifest: Manifest) -> _Way:
        there, given = plan.manifest, len(manifest.outputs)
        slots = [*range(there.own), *there.outputs[len(there.outputs) - given :]]
        # Outputs follow saved tensors, and in a rehearsal its inputs are between them.
        last = dict(zip(slots[there.own :], manifest.outputs, strict=True))
        sent = {number: last.get(number, plan.sources[number]) for number in slots if plan.sources[number] != _HERE}
        packing = Packing([manifest.slots[one] for one in sent.values()], [plan.cuts[number] for number in sent])
        new = dict(zip(sent, packing.slots, strict=True))
        found = tuple(new.get(number, there.slots[number]) for number in slots)
        outputs = tuple(range(there.own, len(slots)))
        return cls(packing, replace(there, slots=found, storages=packing.storages, inputs=(), outputs=outputs))
