"""The autograd graph behind some outputs: a walk that is the same on both sides, and what nodes keep themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from trimtab.fbd.split import attributes
from trimtab.fbd.split.places import Places


def walk(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """All nodes behind ``outputs``, each once, in an order that follows from the graph alone."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [one.grad_fn for one in reversed(outputs) if one.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        waiting.extend(after for after, _ in reversed(node.next_functions) if after is not None)
    return found


_ALIKE: Final = {"ReshapeAliasBackward0": "ViewBackward0"}
"""Nodes that save the same and do the same; PyTorch makes the second where a dispatch mode is on, as in a rehearsal."""


def names(nodes: Sequence[Any]) -> tuple[str, ...]:
    """Of nodes, as they name themselves."""
    return tuple(name_of(node) for node in nodes)


def name_of(node: Any) -> str:
    """The same for nodes that do the same."""
    name: str = node.name()
    return _ALIKE.get(name, name)


def edges(nodes: Sequence[Any], places: Places) -> tuple[str, ...]:
    """Of each node, where each of its gradients goes: a node of the walk and which of its outputs, or which parameter.
    Nothing else shows that a value chosen by the data was another output of the same node, or another bias."""
    numbers = {id(node): number for number, node in enumerate(nodes)}
    found: list[str] = []
    for node in nodes:
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found.append(" ".join(map(str, (places.of(variable) or ("a leaf",))[:2])))
        else:
            found.append(
                ",".join("-" if after is None else f"{numbers[id(after)]}.{at}" for after, at in node.next_functions)
            )
    return tuple(found)


def has_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of that type can have one."""
    return dtype.is_floating_point or dtype.is_complex


def go_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None, *, again: bool = False
) -> None:
    """Go backwards from ``outputs``.

    Args:
        gradients: one for each output, None where nobody used it; None in the place of all: the one output is a loss.
        again: the graph will be gone through again.

    Raises:
        ValueError: gradients and outputs do not fit each other.
    """
    if gradients is None:
        if len(outputs) != 1 or outputs[0].numel() != 1:
            raise ValueError("the last stage has to give one scalar, the loss, and nothing else")
        gradients = [torch.ones_like(outputs[0])]
    if len(gradients) != len(outputs):
        raise ValueError(f"{len(gradients)} gradients came for {len(outputs)} outputs of the stage")
    pairs = [(a, b) for a, b in zip(outputs, gradients, strict=True) if b is not None and a.requires_grad]
    if pairs:
        torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs], retain_graph=again)


class Probe:
    """While a graph is looked at, saved tensors are asked for, and this notes which: nothing has to be unpacked."""

    def __init__(self) -> None:
        self.on = False
        self.asked: list[int] = []
        self._nothing = torch.empty(0)

    def __enter__(self) -> Probe:
        self.on, self.asked = True, []
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False

    def answer(self, number: int) -> torch.Tensor:
        """In the place of a saved tensor."""
        self.asked.append(number)
        return self._nothing


def kept_values(node: Any, probe: Probe, places: Places) -> tuple[tuple[str, str], ...]:
    """Plain values that it keeps, written out: they have to be the same on both sides. A number that a tensor was
    divided by is one, so a loss that is divided by a count of this microbatch's tokens shows.

    ``probe`` is on. Raises ValueError for saved tensors that somebody else packed: activation checkpointing without
    reentrance does, and computes them anew from what it holds on its own side. It asks for that time and again. And for
    what can neither be sent nor compared.
    """
    inside = attributes.hidden(node, places)
    if inside:
        raise ValueError(
            f"{node.name()} keeps a tensor within its {inside}, where it cannot be sent: give it to the function as an "
            "argument, or use mode recompute"
        )
    found: list[tuple[str, object]] = []
    fields = _fields(type(node))
    found += [(name, getattr(node, name)) for name in fields.plain]
    for name in fields.saved:
        before = len(probe.asked)
        try:
            value = getattr(node, name)
        except Exception as error:  # of a computation that got nothing in the place of its inputs
            raise ValueError(_foreign(node)) from error
        if len(probe.asked) == before and isinstance(value, torch.Tensor) and value.dim() == 0:
            found.append((name, value.item()))  # a number as an operand, which no hook packs
        elif len(probe.asked) == before and not (value is None or value == ()):
            raise ValueError(_foreign(node))
    if len(set(probe.asked)) != len(probe.asked):
        raise ValueError(_foreign(node))
    return (*attributes.values(node, places), *((name, attributes.written(value)) for name, value in found))


def _foreign(node: Any) -> str:
    return (
        f"{node.name()} keeps what its backward needs where it cannot be sent; activation checkpointing has to be "
        "reentrant (use_reentrant=True)"
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """What nodes of a type have saved."""

    plain: tuple[str, ...]
    saved: tuple[str, ...]
    """Tensors: asking for one unpacks it."""


@cache
def _fields(kind: type) -> _Fields:
    known = set(dir(kind))
    named = sorted(name for name in known if name.startswith("_saved_"))
    saved = tuple(name for name in named if f"_raw{name}" in known)
    plain = tuple(name for name in named if f"_raw{name}" not in known)
    return _Fields(plain, (*saved, *(("saved_tensors",) if "saved_tensors" in known else ())))
