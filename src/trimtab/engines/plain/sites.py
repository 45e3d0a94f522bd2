"""Which modules of a model are reported, found by the shape of the model alone.

Layers are the elements of the model's largest ModuleList, ModuleDict or Sequential of one class, and of all others
that are like it (an encoder and a decoder, the stages of a ResNet). What lies outside is reported as a whole: the
embedding, the head, and whatever else has weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from trimtab.engines.layers import NAME_EMBEDDING, NAME_LAYER, NAME_OUTPUT, Site
from trimtab.engines.plain.wrappers import WRAPPING_NAMES, class_of, is_compiled, unwrapped

_ALIKE = 0.1
"""A container whose elements are of another class holds layers, too, from this share of the largest one's size."""
_WHOLE_MODEL = "model"


@dataclass(slots=True)
class _Container:
    """A list of modules of one class."""

    cls: type
    elements: list[tuple[int, nn.Module]]
    """Number of each in the container, and the module."""
    size: int


@dataclass(slots=True)
class Found:
    """What is to be hooked in a model."""

    sites: list[Site] = field(default_factory=list)
    enclosing: list[nn.Module] = field(default_factory=list)
    """Modules around the sites, outermost first; calling one is a pass through the model, or through a part of it."""


def find(model: nn.Module, parts: bool, through: bool = False) -> Found:
    """The sites of a model, in the order of its modules; with ``parts`` also those of each layer. ``through``: also
    those in what torch.compile has compiled."""
    search = _Search(_number(_layer_containers(model, through)), through)
    search.walk(model, _WHOLE_MODEL)
    found = search.found
    layers = list(found.sites)
    found.sites.extend(_outside(search.rest, alone=not layers))
    if not found.enclosing:
        found.enclosing.extend(site.module for site in found.sites)  # the model is one site
    if parts:
        for layer in layers:
            found.sites.extend(_parts(layer))
    return found


def _layer_containers(model: nn.Module, through: bool) -> list[_Container]:
    """In the order of the model's modules; none if nothing repeats."""
    containers = list(_containers(model, through))
    if not containers:
        return []
    largest = max(containers, key=lambda container: container.size)
    least = largest.size * _ALIKE
    return [one for one in containers if one.cls is largest.cls or one.size >= least]


def _containers(module: nn.Module, through: bool) -> Iterator[_Container]:
    """Outermost containers of modules of one class: what repeats within a layer is not looked for."""
    if is_compiled(module) and not through:
        return
    container = _as_container(module)
    if container is not None:
        yield container
    taken = {id(element) for _, element in container.elements} if container else set()
    for child in module.children():
        if id(child) not in taken:
            yield from _containers(child, through)


def _as_container(module: nn.Module) -> _Container | None:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return None
    weighty = [(key, child) for key, child in module._modules.items() if child is not None and _size(child)]
    if not weighty:
        return None
    cls, count = Counter(class_of(child) for _, child in weighty).most_common(1)[0]
    if count < 2 and (isinstance(module, nn.Sequential) or len(weighty) > 1):
        return None
    chosen = [(key, child) for key, child in weighty if class_of(child) is cls]
    # A key is the layer's number in the whole model where a part of it is left, except among other modules.
    keyed = not isinstance(module, nn.Sequential) and all(key.isdecimal() for key, _ in chosen)
    elements = [(int(key) if keyed else index, child) for index, (key, child) in enumerate(chosen)]
    return _Container(cls, elements, sum(_size(child) for _, child in chosen))


def _number(containers: list[_Container]) -> dict[int, int]:
    """Layer number by id of the module; each container goes on where the one before it ended."""
    numbers: dict[int, int] = {}
    first = 0
    for container in containers:
        for number, element in container.elements:
            numbers.setdefault(id(element), first + number)
        first += 1 + max(number for number, _ in container.elements)
    return numbers


@dataclass(frozen=True, slots=True)
class _Other:
    """A module with weights outside of the layers."""

    name: str
    module: nn.Module
    behind: bool
    """After the first layer."""


class _Search:
    """Goes through a model from outside: down to the layers where there are any, else to where it first branches."""

    def __init__(self, numbers: dict[int, int], through: bool = False) -> None:
        self._numbers = numbers
        self._through = through
        self._seen: set[int] = set()
        self.found = Found()
        self.rest: list[_Other] = []

    def walk(self, module: nn.Module, name: str, inside: bool = False) -> None:
        """``inside``: the way has already branched."""
        inner = unwrapped(module)
        if id(inner) in self._seen or isinstance(module, torch.jit.ScriptModule) or not _size(module):
            return
        self._seen.add(id(inner))
        number = self._numbers.get(id(module))
        if number is not None:
            self.found.sites.append(Site(NAME_LAYER, inner, number))
        elif (is_compiled(inner) and not self._through) or not self._opens(inner, inside):
            self.rest.append(_Other(name, inner, bool(self.found.sites)))
        else:
            self._enclose(module)
            if inner is not module:
                self._enclose(inner)
            self._open(inner, name, inside)

    def _opens(self, module: nn.Module, inside: bool) -> bool:
        if self._numbers:
            return any(id(part) in self._numbers for part in module.modules())
        return not inside and any(_size(child) for child in module.children())

    def _open(self, module: nn.Module, name: str, inside: bool) -> None:
        inside = inside or sum(_size(child) > 0 for child in module.children()) > 1
        for child_name, child in module.named_children():
            says = child_name not in WRAPPING_NAMES and not child_name.isdecimal()
            self.walk(child, child_name if says else name, inside)

    def _enclose(self, module: nn.Module) -> None:
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):  # which nobody calls
            self.found.enclosing.append(module)


def _outside(rest: list[_Other], alone: bool) -> Iterator[Site]:
    """Embedding, head and others; norms, which take next to no time, are left out, unless there is nothing else."""
    heavy = [other for other in rest if _is_heavy(other.module)] or (rest if alone else [])
    for place, other in enumerate(heavy):
        name = other.name
        last = place == len(heavy) - 1
        if _is_embedding(other.module):
            name = NAME_EMBEDDING
        elif last and (other.behind or (place > 0 and issubclass(class_of(other.module), nn.Linear))):
            name = NAME_OUTPUT
        yield Site(name, other.module, -1)


def _parts(layer: Site) -> Iterator[Site]:
    """The children of a layer that have weights, norms left out."""
    if is_compiled(layer.module):
        return
    for name, child in layer.module.named_children():
        for part_name, part in _callable_parts(name, child):
            if _is_heavy(part):
                yield layer.part(part_name, unwrapped(part))


def _callable_parts(name: str, child: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
        yield name, child
    elif _as_container(child) is None:  # else many of a kind, such as experts
        for element_name, element in child.named_children():
            yield type(element).__name__ if element_name.isdecimal() else element_name, element


def _is_heavy(module: nn.Module) -> bool:
    return any(weight.dim() > 1 for weight in module.parameters())


def _is_embedding(module: nn.Module) -> bool:
    looked_up = sum(_size(part) for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))
    return looked_up * 2 > _size(module)


def _size(module: nn.Module) -> int:
    """Number of weights."""
    return sum(weight.numel() for weight in module.parameters())
