"""What a forward pass saved, tensor by tensor, without their values: both sides must have the same one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Literal

Source = Literal["shipped", "parameter", "shared"]
"""Where the backward's side gets it from: it comes, or is there: a parameter (or buffer), or an input of both."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that autograd saved, in the order of saving."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    source: Source
    index: int
    """Of the storage, the parameter, or the shared input."""
    offset: int
    """Elements from the begin of what ``index`` names: of a storage, of what is shipped of it."""
    device: str = "cpu"
    """Its type. The sides may have different ones."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that are shipped: a part of a storage that one or several slots lie in."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the graph that keeps more than saved tensors."""

    place: int
    """In the walk of the graph."""
    name: str
    slots: tuple[tuple[tuple[str | int, ...], int], ...]
    """Tensors that it keeps: attribute, and indices and keys into what that holds; with the slot of each."""
    values: tuple[tuple[str, str], ...]
    """Attributes that are plain values, written out."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of it."""

    slots: tuple[Slot, ...]
    storages: tuple[Storage, ...]
    nodes: tuple[Node, ...]
    names: tuple[str, ...] = field(default=())
    """Of all nodes, in the order of the walk."""
    edges: tuple[str, ...] = field(default=())
    """Where their gradients go."""
    saved: tuple[tuple[int, ...], ...] = field(default=())
    """Of each node, the slots that it saved."""
    inputs: tuple[int, ...] = field(default=())
    """Slots that no node saved: what a rehearsal went in with."""
    outputs: tuple[int, ...] = field(default=())
    """Slots of what came out, where the other side uses its values."""

    @property
    def bytes(self) -> int:
        """That travel."""
        return sum(storage.bytes for storage in self.storages)

    @property
    def own(self) -> int:
        """Slots that nodes of the graph saved: the first ones."""
        return len(self.slots) - len(self.inputs) - len(self.outputs)

    def difference(self, other: Manifest, *, layouts: bool = True) -> str:
        """Where ``other``, the backward's side, is not the same; empty: nowhere.

        How much of a storage is shipped, and so where a slot lies in it, is the forward's affair. So are strides where
        not ``layouts``. What is behind the saved tensors, in and out, each side may have or not.
        """
        ours, theirs = (one.slots[: one.own] for one in (self, other))
        for what, a, b in (("nodes", self.names, other.names), ("saved tensors", ours, theirs)):
            if len(a) != len(b):
                return f"the forward made {len(a)} {what}, the backward's side has {len(b)}"
        for place, (a, b) in enumerate(zip(self.names, other.names, strict=True)):
            if a != b:
                return f"node {place} of the graph is {a} in the forward and {b} here"
        for place, (a, b) in enumerate(zip(self.edges, other.edges, strict=True)):
            if a != b:
                return f"gradients of {self.names[place]} (node {place}) go to {a} in the forward and to {b} here"
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if _essence(a, layouts) != _essence(b, layouts):
                return f"saved tensor {number} is {_said(a)} in the forward and {_said(b)} here"
        for a, b in zip_longest(self.nodes, other.nodes):
            if a != b:
                name, place = (a.name, a.place) if a else (b.name, b.place)
                return f"{name} (node {place}) keeps {_kept(a, b)} in the forward and {_kept(b, a)} here"
        return ""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> Manifest:
        """The way back. ValueError for what is no manifest."""
        try:
            return cls(
                tuple(
                    Slot(
                        one["dtype"],
                        tuple(one["shape"]),
                        tuple(one["stride"]),
                        one["source"],
                        one["index"],
                        one["offset"],
                        one["device"],
                    )
                    for one in said["slots"]
                ),
                tuple(Storage(one["bytes"]) for one in said["storages"]),
                tuple(
                    Node(
                        one["place"],
                        one["name"],
                        tuple((tuple(path), slot) for path, slot in one["slots"]),
                        tuple((name, value) for name, value in one["values"]),
                    )
                    for one in said["nodes"]
                ),
                tuple(said["names"]),
                tuple(said["edges"]),
                tuple(tuple(one) for one in said["saved"]),
                tuple(said["inputs"]),
                tuple(said["outputs"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"manifest: it makes no sense ({type(error).__name__}: {error})") from None


def _essence(slot: Slot, layouts: bool) -> tuple[object, ...]:
    known = () if slot.source == "shipped" else (slot.index, slot.offset)
    # Nothing is reached by the stride of a dimension that has one element.
    strides = tuple(stride for size, stride in zip(slot.shape, slot.stride, strict=True) if layouts and size > 1)
    return (slot.dtype, slot.shape, strides, slot.source, *known)


def _said(slot: Slot) -> str:
    shape = "x".join(map(str, slot.shape)) or "a scalar"
    where = slot.source if slot.source == "shipped" else f"{slot.source} {slot.index}"
    return f"{slot.dtype} {shape} ({where})"


def _kept(node: Node | None, other: Node | None) -> str:
    """What of a node is not as in the other."""
    if node is None or other is None or node.place != other.place:
        return "nothing" if node is None else "something"
    differing = [f"{name} {value}" for name, value in node.values if (name, value) not in other.values]
    return ", ".join(differing) or f"{len(node.slots)} tensors as {len(node.values)} values"
