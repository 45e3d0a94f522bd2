"""What a node of :class:`torch.autograd.Function` keeps as attributes: tensors travel, plain values have to be the same
on both sides, and a tensor that hides elsewhere is refused: it would be another microbatch's on the backward's side."""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any, Final

import torch

from trimtab.fbd.split.places import Places

Path = tuple[str | int, ...]
"""An attribute's name, then indices and keys into what it holds."""

_PLAIN: Final = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, slice, range, type),
    *(torch.dtype, torch.layout, torch.memory_format),
)
_OF_ITS_SIDE: Final = frozenset({"main_grad", "fwd_devices", "fwd_gpu_devices"})
"""Gradients of parameters that a node may keep, and numbers of devices: each side has its own."""
_LONGEST_VALUE: Final = 200
_DEEPEST: Final = 8
_MOST_SEEN: Final = 10_000
_FUNCTIONS: Final = (types.FunctionType, types.MethodType, functools.partial)
_OPAQUE: Final = (torch.nn.Module, torch.Generator, torch.distributed.ProcessGroup, types.ModuleType, type)
"""In which nothing is looked for: they are the side's own."""


def tensors(node: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """Attributes that are tensors, also within lists, tuples and dictionaries: states of random generators of
    activation checkpointing, for example. Not parameters: they are the side's own."""
    for name, value in _attributes(node):
        for path, one in _leaves((name,), value):
            if isinstance(one, torch.Tensor) and not isinstance(one, torch.nn.Parameter):
                yield path, one


def values(node: Any, places: Places) -> list[tuple[str, str]]:
    """Everything else that can be written out; of a parameter, which one it is."""
    found: list[tuple[str, str]] = []
    for name, value in _attributes(node):
        for path, one in _leaves((name,), value):
            if isinstance(one, torch.nn.Parameter):
                found.append((_spelled(path), str((places.of(one) or ("unknown",))[:2])))
            elif isinstance(one, torch.device):
                found.append((_spelled(path), one.type))
            elif isinstance(one, _PLAIN):
                found.append((_spelled(path), written(one)))
            elif type(one).__module__ == "numpy":  # arrays and their scalars
                found.append((_spelled(path), written((str(one.dtype), one.shape, one.tobytes()))))
            elif isinstance(one, _FUNCTIONS) and (enclosed := list(_enclosed(one))):
                found.append((_spelled(path), written(enclosed)))
    return found


def _enclosed(value: object, depth: int = 0) -> Iterator[str]:
    """Plain values that a function encloses, or is given in advance."""
    if isinstance(value, _PLAIN):
        yield written(value)
    elif depth <= _DEEPEST and isinstance(value, (*_FUNCTIONS, list, tuple, dict)):
        for one in _held(value):
            yield from _enclosed(one, depth + 1)


def written(value: object) -> str:
    """A value as text that is another for another value."""
    text = repr(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def hidden(node: Any, places: Places) -> str:
    """The attribute in which a tensor hides: in what a function encloses, or in an object of some other type. Empty: in
    none. Parameters and buffers may: each side has its own there."""
    for name, value in _attributes(node):
        for _, one in _leaves((name,), value):
            if not isinstance(one, torch.Tensor) and hides(one, places):
                return name
    return ""


def hides(value: object, places: Places) -> bool:
    """Whether a tensor that is no parameter or buffer can be reached from ``value``, or too much for all to be seen."""
    waiting, seen = [value], {id(value): value}
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            if not isinstance(one, torch.nn.Parameter) and (places.of(one) or ("",))[0] != "parameter":
                return True
        elif not isinstance(one, (*_PLAIN, *_OPAQUE)):
            new = {id(held): held for held in _held(one) if id(held) not in seen}
            seen |= new
            waiting += new.values()
        if len(seen) > _MOST_SEEN:
            return True
    return False


def _held(value: Any) -> Iterator[object]:
    if isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).values()
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType())
    else:
        yield from getattr(value, "__dict__", {}).values()
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from (getattr(value, name, None) for name in slots if isinstance(name, str))


def put(node: Any, path: Path, tensor: torch.Tensor) -> None:
    """Give a node another tensor in the place of one that :func:`tensors` named."""
    name = str(path[0])
    setattr(node, name, _replaced(getattr(node, name), path[1:], tensor))


class Kept:
    """The attributes of a node as they are now. A backward may change them, and ordinarily each microbatch has its
    own."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self._attributes = {name: _copied(value) for name, value in getattr(node, "__dict__", {}).items()}

    def restore(self) -> None:
        """As they were."""
        kept: dict[str, Any] = getattr(self._node, "__dict__", {})
        for name in [one for one in kept if one not in self._attributes]:
            delattr(self._node, name)
        for name, value in self._attributes.items():
            setattr(self._node, name, _copied(value))


def _copied(value: Any) -> Any:
    """Containers anew, what is in them as it is."""
    if type(value) is dict:
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if type(value) is list else value


def _attributes(node: Any) -> list[tuple[str, Any]]:
    """Nodes of C++ have saved tensors only."""
    kept: dict[str, Any] = getattr(node, "__dict__", {})
    return [(name, value) for name, value in sorted(kept.items()) if name not in _OF_ITS_SIDE]


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """What is in lists, tuples and dictionaries; those of other keys than words and numbers are leaves themselves."""
    if isinstance(value, (list, tuple)):
        yield path, len(value)
        for number, one in enumerate(value):
            yield from _leaves((*path, number), one)
    elif isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        yield path, written(sorted(value, key=repr))
        for key, one in value.items():
            yield from _leaves((*path, key), one)
    else:
        yield path, value


def _spelled(path: Path) -> str:
    return ".".join(map(str, path))


def _replaced(held: Any, path: Path, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    first = path[0]
    if isinstance(held, dict):
        return {**held, first: _replaced(held[first], path[1:], tensor)}
    parts = list(held)
    parts[int(first)] = _replaced(parts[int(first)], path[1:], tensor)
    make = getattr(type(held), "_make", type(held))  # of a named tuple
    return make(parts)
