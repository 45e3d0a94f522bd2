"""Activations and their gradients, attentions and parameters of a model in plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from trimtab.engines.calls import compiled_in_place
from trimtab.engines.plain.layout import StagePlace
from trimtab.engines.plain.scope.naming import Named, module_paths, named_spots
from trimtab.engines.plain.scope.roles import opened
from trimtab.engines.plain.scope.spread import Spread, find_spread
from trimtab.engines.plain.scope.state import parameter_points
from trimtab.scope.names import Tap, gradient_name
from trimtab.scope.taps.activations import ActivationPoint, GradientPoint
from trimtab.scope.taps.points import AttentionPoint, ModelPoints, Point
from trimtab.scope.taps.sdpa import AttentionCalls, CalledAttention
from trimtab.scope.taps.sources import InputSource, OutputSource, Source
from trimtab.scope.taps.spots import Spot
from trimtab.scope.taps.where import Aside, Where

if TYPE_CHECKING:
    from trimtab.scope.taps.placing import CompiledTaps

_HIDDEN: Final = ("b", "s", "h")
_LABELS: Final = {
    **dict.fromkeys(("attention.q", "attention.k", "attention.v", "attention.core"), ("b", "n", "s", "d")),
    "attention.map": ("b", "n", "s", "d"),
    "mlp.hidden": ("b", "s", "f"),
    "router.logits": ("t", "e"),
}
_HEADS: Final = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads")
_GROUPS: Final = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_kv_head", "kv_heads", "num_query_groups")


def plain_points(
    chunk: int,
    model: nn.Module,
    where: Where,
    compiled: CompiledTaps | None = None,
    stage: StagePlace | None = None,
) -> ModelPoints:
    """What a model offers on this rank. Hooks nothing.

    Tensors inside of what torch.compile has compiled are offered where ``compiled`` has placed a tap before; ``stage``
    is the place of a model that is a stage of torch.distributed.pipelining.
    """
    return _Builder(chunk, model, where, compiled, stage).build()


class _Builder:
    def __init__(
        self, chunk: int, model: nn.Module, where: Where, compiled: CompiledTaps | None, stage: StagePlace | None
    ) -> None:
        self._chunk = chunk
        self._model = model
        self._where = where
        self._aside = Aside()
        self._compiled = compiled
        self._inside = _compiled_modules(model)
        self._spread: Spread = find_spread(model, stage)
        self._paths = module_paths(model)
        self._calls: dict[int, AttentionCalls] = {}
        self._points: list[Point] = []
        self._attention: list[AttentionPoint] = []

    def build(self) -> ModelPoints:
        layers: dict[str, int] = {}
        for named in named_spots(self._model):
            if named.spot.part == "input" and named.layer >= 0:
                layers[self._paths.get(id(opened(named.spot.module)), "")] = named.layer
            self._add(named)
        if id(self._model) not in self._inside:
            self._add_loss()
        state = parameter_points(self._chunk, self._model, self._spread, layers)
        return ModelPoints(self._points, self._attention, state)

    def _add_loss(self) -> None:
        """Where the model itself gives it: alone, or under that name."""
        source = OutputSource(self._model, self._aside, "loss", accept=lambda tensor: tensor.dim() == 0)
        shard, replica = self._spread.of_activation("loss")
        tap = Tap("loss", "activation", (), (), shard=shard, replica=replica, chunk=self._chunk)
        self._eager(tap, source)

    def _add(self, named: Named) -> None:
        """A tensor and its gradient, or an attention."""
        spot, tap = named.spot, self._tap(named)
        if spot.side == "map" and self._spread.cp[1] > 1:
            return  # which keys the other ranks hold is not known
        if id(spot.module) in self._inside:
            self._permanent(tap, spot)
        elif spot.side == "map":
            self._attention.append(CalledAttention(tap, self._calls_of(spot.module), self._where))
        else:
            self._eager(tap, self._source(spot))

    def _eager(self, tap: Tap, source: Source) -> None:
        self._points.append(ActivationPoint(tap, source, self._where))
        self._points.append(GradientPoint(_gradient(tap), source, self._where, self._aside))

    def _permanent(self, tap: Tap, spot: Spot) -> None:
        if self._compiled is None:
            return
        from trimtab.scope.taps.placing import CompiledAttention, CompiledPoint  # defines operators of torch

        number = self._compiled.number(spot) or self._compiled.number(replace(spot, module=opened(spot.module)))
        if number is None:
            return
        if spot.side == "map":
            self._attention.append(CompiledAttention(tap, number, self._where, self._aside))
        else:
            # A gradient there is that of what comes after the tap: of the residual stream only the MLP's branch does.
            for kind in (tap,) if spot.part == "residual" else (tap, _gradient(tap)):
                self._points.append(CompiledPoint(kind, number, self._where, self._aside))

    def _source(self, spot: Spot) -> Source:
        if spot.side == "input":
            return InputSource(spot.module, self._aside, 0, spot.argument)
        if spot.side == "output":
            return OutputSource(spot.module, self._aside)
        assert spot.side != "map"
        return self._calls_of(spot.module).source(spot.side)

    def _calls_of(self, module: nn.Module) -> AttentionCalls:
        return self._calls.setdefault(id(module), AttentionCalls(module, self._aside))

    def _tap(self, named: Named) -> Tap:
        spot = named.spot
        shard, replica = self._spread.of_activation(spot.part)
        recognised = not named.name.startswith("modules.")
        labels = _LABELS.get(spot.part, _HIDDEN) if recognised else ()
        return Tap(
            name=named.name,
            kind="attention" if spot.side == "map" else "activation",
            labels=("b", "s", "v") if named.name == "logits" else labels,
            shard=shard,
            replica=replica,
            layer=named.layer,
            heads=self._heads(spot),
            module=self._paths.get(id(opened(spot.module)), ""),
            chunk=self._chunk,
        )

    def _heads(self, spot: Spot) -> tuple[int, int, int] | None:
        """Of queries and outputs. A model may repeat its keys and values for each query's head before the call or not,
        so those are counted only where it makes no difference."""
        if spot.side not in ("q", "k", "v", "core", "map"):
            return None
        total = _count(spot.module, _HEADS)
        rank, size = self._spread.tp
        if total is None or total % size:
            return None
        if spot.side in ("k", "v") and _count(spot.module, _GROUPS) not in (None, total):
            return None
        return rank * (total // size), total // size, total


def _gradient(tap: Tap) -> Tap:
    return replace(tap, name=gradient_name(tap.name), kind="gradient")


def _compiled_modules(model: nn.Module) -> set[int]:
    """Ids of the modules in whose forward hooks that are added now would not fire."""
    inside: set[int] = set()
    for module in model.modules():
        if compiled_in_place(module):
            inside.update(id(part) for part in module.modules())
        elif "_orig_mod" in module._modules:  # it is called as ever, and what it holds is not
            inside.update(id(part) for part in module.modules() if part is not module)
    return inside


def _count(module: Any, names: tuple[str, ...]) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(owner, name, None)
            if isinstance(found, int) and not isinstance(found, torch.Tensor) and found > 0:
                return found
    return None
