"""Finding the models that are trained, without the script's help: they are where the optimizers' parameters are."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch


def models_of(parameters: Sequence[torch.Tensor]) -> list[torch.nn.Module]:
    """The outermost modules that hold any of the parameters.

    An optimizer with weights of its own (master copies, shards) leads nowhere; then whatever has a gradient counts.
    Looks through all objects that the garbage collector knows: a tenth of a second for some 400,000 of them.
    """
    outermost = _outermost_modules()
    wanted = {id(parameter) for parameter in parameters}
    found = [module for module in outermost if any(id(weight) in wanted for weight in module.parameters())]
    return found or [module for module in outermost if any(weight.grad is not None for weight in module.parameters())]


def _outermost_modules() -> list[torch.nn.Module]:
    # The type is asked, not the object: some objects answer for others, and do things when asked.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    inner = {id(child) for module in modules for child in _children(module)}
    return [module for module in modules if id(module) not in inner]


def _children(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    held = vars(module).get("_modules") or {}  # not there yet in a module that is being made
    return [child for child in held.values() if child is not None]
