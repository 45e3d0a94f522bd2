"""State of Megatron-Core's optimizers, by the parameters that it is of: float32 masters and Adam's moments.

Three kinds hold it in three ways: in float32 nothing but the moments is kept; with 16-bit parameters each has a master
copy; a distributed optimizer holds flat shards, of as much of each parameter as lies in this rank's part of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from trimtab.engines.megatron_scope.parameters import Held, dtype_name, held_parameters
from trimtab.engines.megatron_scope.place import find_place, shard
from trimtab.scope.names import Tap, gradient_name
from trimtab.scope.taps.points import StatePoint
from trimtab.scope.taps.state import LookedUpPoint, ParameterGradientPoint

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_MASTER: Final = "master_param"
"""Key of the master copy in the state of optimizers that keep it there."""


def megatron_optimizer_points(optimizer: Any, models: Iterable[torch.nn.Module]) -> Sequence[StatePoint]:
    """State points of an optimizer of Megatron-Core, chained ones included; best after its first step.

    ``models`` are all model chunks of this rank, in order. With a distributed optimizer also the reduced part of each
    parameter's gradient.
    """
    place = find_place()
    held = {
        id(one.parameter): one for chunk, model in enumerate(models) for one in held_parameters(chunk, model, place)
    }
    points: list[StatePoint] = []
    for single in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        distributed = hasattr(single, "model_param_group_index_map")
        points.extend((_distributed if distributed else _whole)(single, held))
    return points


def _whole(optimizer: Any, held: dict[int, Held]) -> Iterator[StatePoint]:
    """Each parameter's whole state, on each of its ranks."""
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        return
    models = [one for group in getattr(optimizer, "float16_groups", ()) for one in group]
    masters = [one for group in getattr(optimizer, "fp32_from_float16_groups", ()) for one in group]
    of_master = {id(master): model for model, master in zip(models, masters, strict=True)}
    for group in inner.param_groups:
        for kept in group["params"]:
            model = of_master.get(id(kept), kept)
            one = held.get(id(model))
            if one is None:
                continue

            def tap(key: str, one: Held = one, kept: torch.Tensor = kept) -> Tap:
                return one.tap(f"optimizer.{one.path}.{key}", "optimizer", kept.dtype)

            if model is not kept:
                yield LookedUpPoint(tap("master"), partial(_itself, kept))
            yield from _moments(inner, partial(_itself, kept), tap)


def _distributed(optimizer: Any, held: dict[int, Held]) -> Iterator[StatePoint]:
    """This rank's shard of each parameter's state."""
    inner, group = optimizer.optimizer, optimizer.data_parallel_group
    index, count = group.rank(), group.size()
    for model, (group_index, order) in optimizer.model_param_group_index_map.items():
        one = held.get(id(model))
        if one is None:
            continue
        found = optimizer._get_model_param_range_map(model)["param"]
        first, end = int(found.start), int(found.end)
        kept = partial(_in_group, inner, group_index, order)
        base = replace(
            one.tap(f"parameters.{one.path}", "optimizer"),
            labels=("flat/dp",) if count > 1 else ("flat",),
            shape=(end - first,),
            shard=(*one.shard, *shard(("dp", index, count))),
            replica=one.replica // count,
            part=(first, end),
        )

        def tap(key: str, one: Held = one, base: Tap = base, dtype: str = "float32") -> Tap:
            return replace(base, name=f"optimizer.{one.path}.{key}", dtype=dtype)

        gradient = getattr(model, "main_grad", None)
        name = gradient_name(base.name)
        dtype = dtype_name(gradient.dtype if isinstance(gradient, torch.Tensor) else torch.float32)
        yield ParameterGradientPoint(replace(base, name=name, kind="gradient", dtype=dtype), model)
        state = inner.state.get(kept(), {})
        if _MASTER in state:
            yield LookedUpPoint(tap("master"), partial(_state_of, inner, kept, _MASTER))
        elif model.dtype != torch.float32:
            yield LookedUpPoint(tap("master"), kept)
        yield from _moments(inner, kept, tap)


def _moments(inner: Any, kept: Callable[[], Any], tap: Callable[[str], Tap]) -> Iterator[StatePoint]:
    """What the inner optimizer keeps of a parameter: before its first step as Adam does, then as it does."""
    parameter = kept()
    state = inner.state.get(parameter, {})
    keys = [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == parameter.shape]
    for key in keys if state else _MOMENTS:
        if key != _MASTER:
            yield LookedUpPoint(tap(key), partial(_state_of, inner, kept, key))


def _itself(kept: Any) -> Any:
    return kept


def _in_group(inner: Any, group: int, order: int) -> Any:
    return inner.param_groups[group]["params"][order]


def _state_of(inner: Any, kept: Callable[[], Any], key: str) -> Any:
    state = inner.state
    parameter = kept()
    return state[parameter].get(key) if parameter in state else None  # asking a default dictionary would add to it
