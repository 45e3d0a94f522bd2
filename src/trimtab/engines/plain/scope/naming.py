"""A model's tensors by the names that scope gives them, and where in the model they pass by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torch import nn

from trimtab.engines.layers import NAME_EMBEDDING, NAME_LAYER, NAME_OUTPUT, Site
from trimtab.engines.plain.scope.roles import final_norm, is_block, opened, spots_of_block
from trimtab.engines.plain.sites import find
from trimtab.engines.plain.wrappers import WRAPPING_NAMES
from trimtab.scope.names import layer_name
from trimtab.scope.taps.spots import Spot

_MOST_MODULES: Final = 512
"""That are offered by their path in a model in which nothing is recognised."""
_WRAPPERS: Final = frozenset(name for name in WRAPPING_NAMES if name.startswith("_"))


@dataclass(frozen=True, slots=True)
class Named:
    """A place in a model, and what the tensor there is called."""

    name: str
    spot: Spot
    layer: int = -1


def named_spots(model: nn.Module) -> list[Named]:
    """In the order of a forward."""
    found = find(model, parts=False, through=True)
    layers = [site for site in found.sites if site.name == NAME_LAYER]
    paths = module_paths(model)
    embeddings = [site for site in found.sites if site.name == NAME_EMBEDDING]
    token = max(embeddings, key=_rows, default=None)
    named: list[Named] = []
    others: list[Site] = []
    head: Site | None = None
    for site in found.sites:
        if site.name == NAME_LAYER:
            named.extend(_of_block(site, paths))
        elif site is token:
            named.insert(0, Named("embedding.output", Spot("output", opened(site.module), "output")))
        elif layers and site.name == NAME_OUTPUT and _is_last(site, found.sites):
            head = site
        else:
            others.append(site)
    norm = final_norm(model, [site.module for site in layers]) if layers else None
    if norm is not None:
        named.append(Named("final_norm.output", Spot("output", norm, "output")))
    if head is not None:
        named.append(Named("logits", Spot("output", opened(head.module), "output")))
    modules = [opened(site.module) for site in others] if layers else _weighted(model)
    named.extend(_by_path(module, paths) for module in modules)
    return named


def spots_to_place(module: nn.Module) -> list[Spot]:
    """Of a module that is about to be compiled: those of a block, or those of a model."""
    if is_block(module):
        return list(spots_of_block(opened(module)))
    return [named.spot for named in named_spots(module)]


def module_paths(model: nn.Module) -> dict[int, str]:
    """Path in the model of each module, by its id; wrappers have no part in it."""
    return {id(module): plain_path(path) for path, module in opened(model).named_modules()}


def plain_path(path: str) -> str:
    """A path without what wrappers add to it."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _of_block(site: Site, paths: dict[int, str]) -> Iterator[Named]:
    for spot in spots_of_block(site.module):
        yield Named(layer_name(site.layer, spot.part), spot, site.layer)
    if not is_block(site.module):  # nothing in it is known by name
        for child in opened(site.module).children():
            if any(True for _ in child.parameters()):
                yield _by_path(opened(child), paths, site.layer)


def _by_path(module: nn.Module, paths: dict[int, str], layer: int = -1) -> Named:
    path = paths.get(id(module), "")
    name = f"modules.{path}.output" if path else "modules.output"
    return Named(name, Spot("output", module, "output"), layer)


def _weighted(model: nn.Module) -> list[nn.Module]:
    modules = [module for module in opened(model).modules() if module._parameters and module is not model]
    return modules[:_MOST_MODULES]


def _rows(site: Site) -> int:
    return max((part.num_embeddings for part in site.module.modules() if isinstance(part, nn.Embedding)), default=0)


def _is_last(site: Site, sites: list[Site]) -> bool:
    return not any(other.name == NAME_OUTPUT for other in sites[sites.index(site) + 1 :])
