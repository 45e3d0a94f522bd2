"""The autograd graph behind some outputs: a walk that is the same on both sides, and what nodes keep themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

_PLAIN: Final = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_OURS: Final = frozenset({"main_grad"})
"""Attributes of parameters that a node may keep, and that belong to the side it is on."""
_LONGEST_VALUE: Final = 200
Path = tuple[str | int, ...]
"""An attribute's name, then indices and keys into what it holds."""


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


def names(nodes: Sequence[Any]) -> tuple[str, ...]:
    """Of nodes, as they name themselves."""
    return tuple(node.name() for node in nodes)


def kept_tensors(node: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Tensors that a node of Python keeps as attributes, also within lists, tuples and dictionaries: states of random
    generators of activation checkpointing, for example. What an object of some other type holds is the side's own."""
    for name, value in _attributes(node):
        yield from _within((name,), value)


def _within(path: Path, value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield path, value
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _within((*path, number), one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if isinstance(key, (str, int)):
                yield from _within((*path, key), one)


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


def kept_values(node: Any, probe: Probe) -> tuple[tuple[str, str], ...]:
    """Plain values that it keeps, written out: they have to be the same on both sides. A number that a tensor was
    divided by is one, so a loss that is divided by a count of this microbatch's tokens shows.

    ``probe`` is on. Raises ValueError for saved tensors that somebody else packed: activation checkpointing without
    reentrance does, and computes them anew from what it holds on its own side. It asks for that time and again.
    """
    found = [(name, value) for name, value in _attributes(node) if isinstance(value, _PLAIN)]
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
    return tuple((name, repr(value)[:_LONGEST_VALUE]) for name, value in found)


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


def set_tensor(node: Any, path: Path, tensor: torch.Tensor) -> None:
    """Give a node another tensor in the place of one that :func:`kept_tensors` named."""
    name = str(path[0])
    setattr(node, name, _replaced(getattr(node, name), path[1:], tensor))


def _replaced(held: Any, path: Path, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    first = path[0]
    if isinstance(held, dict):
        return held | {first: _replaced(held[first], path[1:], tensor)}
    parts = list(held)
    parts[int(first)] = _replaced(parts[int(first)], path[1:], tensor)
    return type(held)(parts)


def _attributes(node: Any) -> list[tuple[str, Any]]:
    """Of a node that :class:`torch.autograd.Function` made; nodes of C++ have saved tensors only."""
    kept: dict[str, Any] = getattr(node, "__dict__", {})
    return [(name, value) for name, value in sorted(kept.items()) if not name.startswith("_") and name not in _OURS]
