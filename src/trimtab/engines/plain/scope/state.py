"""Parameters and the state of torch.optim's optimizers, by the parameters' paths in the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from trimtab.engines.plain.scope.naming import plain_path
from trimtab.engines.plain.scope.roles import opened
from trimtab.engines.plain.scope.spread import Spread, find_spread
from trimtab.scope.names import Tap, gradient_name
from trimtab.scope.taps.points import StatePoint
from trimtab.scope.taps.state import LookedUpPoint, ParameterGradientPoint, ParameterPoint, local_part

_SHARDED: Final = ("FSDPModule", "ReplicateModule")


@dataclass(frozen=True, slots=True)
class _Held:
    tap: Tap
    """Of the parameter."""
    parameter: nn.Parameter


def parameter_points(chunk: int, model: nn.Module, spread: Spread, layers: dict[str, int]) -> list[StatePoint]:
    """All parameters and their gradients. ``layers``: number of each layer by its path."""
    points: list[StatePoint] = []
    for held in _held(chunk, model, spread, layers):
        points.append(ParameterPoint(held.tap, held.parameter))
        if held.parameter.requires_grad:
            tap = replace(held.tap, name=gradient_name(held.tap.name), kind="gradient")
            points.append(ParameterGradientPoint(tap, held.parameter))
    return points


def plain_optimizer_points(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]) -> Sequence[StatePoint]:
    """What an optimizer keeps of each parameter and is of its shape; after its first step."""
    held = {
        id(one.parameter): one
        for chunk, model in enumerate(models)
        for one in _held(chunk, model, find_spread(model, None), {})
    }
    points: list[StatePoint] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            one = held.get(id(parameter))
            if one is None or parameter not in optimizer.state:
                continue
            path = one.tap.name.removeprefix("parameters.")
            for key, value in optimizer.state[parameter].items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or not value.dim():
                    continue
                dtype = str(value.dtype).removeprefix("torch.")
                tap = replace(one.tap, name=f"optimizer.{path}.{key}", kind="optimizer", dtype=dtype)
                points.append(LookedUpPoint(tap, _look(optimizer, parameter, key)))
    return points


def _look(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> Any:
    def look() -> Any:
        state = optimizer.state
        return state[parameter].get(key) if parameter in state else None  # asking it would add to it

    return look


def _held(chunk: int, model: nn.Module, spread: Spread, layers: dict[str, int]) -> Iterator[_Held]:
    inner = opened(model)
    sharded = any(cls.__name__ in _SHARDED for module in inner.modules() for cls in type(module).__mro__)
    for path, parameter in inner.named_parameters():
        path = plain_path(path)
        shard, replica, divided = spread.of_parameter(parameter, sharded)
        local = local_part(parameter)
        tap = Tap(
            name=f"parameters.{path}",
            kind="parameter",
            labels=_labels(local.dim(), divided),
            shape=tuple(local.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            shard=shard,
            replica=replica,
            layer=_layer(path, layers),
            module=path.rpartition(".")[0],
            chunk=chunk,
        )
        yield _Held(tap, parameter)


def _labels(dimensions: int, divided: dict[int, str]) -> tuple[str, ...]:
    names = {1: ("out",), 2: ("out", "in")}.get(dimensions, tuple(map(str, range(dimensions))))
    return tuple(f"{name}/{divided[index]}" if index in divided else name for index, name in enumerate(names))


def _layer(path: str, layers: dict[str, int]) -> int:
    while path:
        path = path.rpartition(".")[0]
        if path in layers:
            return layers[path]
    return -1
