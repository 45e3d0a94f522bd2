"""What :class:`trimtab.engines.plain.engine.PlainEngine` tells scope: models and optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trimtab.engines.layers import Position
from trimtab.engines.plain.layout import StagePlace
from trimtab.record.complain import failed
from trimtab.scope.job.session import ScopeSession
from trimtab.topology import Coordinates

if TYPE_CHECKING:
    from trimtab.engines.plain.scope.compiling import CompilePatch
    from trimtab.scope.taps.placing import CompiledTaps


class PlainScope:
    """Stands between the engine and scope. What goes wrong here ends scope, and not the engine."""

    def __init__(self, scope: ScopeSession, position: Position) -> None:
        self._scope = scope
        self._position = position
        self._models = 0
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._taps: CompiledTaps | None = None
        self._patch: CompilePatch | None = None
        scope.position = position

    def install(self) -> None:
        """Have permanent taps placed in what will be compiled, if that is wanted."""
        if not self._scope.job.config.compiled_taps:
            return
        try:
            from trimtab.engines.plain.scope.compiling import CompilePatch
            from trimtab.scope.taps.placing import CompiledTaps

            self._taps = CompiledTaps()
            self._patch = CompilePatch(self._taps)
            self._patch.install()
        except Exception as error:
            failed(f"compiled models will have no taps ({error})")

    def remove(self) -> None:
        """Put torch's own back."""
        if self._patch is not None:
            self._patch.remove()

    def read(self, read: Callable[[Any], Any], iterator: Any) -> Any:
        """The next batch: first what a paired run has read ahead."""
        lookahead = self._scope.job.lookahead
        return read(iterator) if lookahead is None else lookahead.read(iterator, read)

    def place(self, coordinates: Coordinates) -> None:
        """Where this rank stands."""
        self._scope.place(coordinates.as_dict())

    def meet(self, model: torch.nn.Module, stage: StagePlace | None = None) -> None:
        """A model is seen for the first time; models count as chunks."""
        try:
            from trimtab.engines.plain.scope import plain_points

            points = plain_points(self._models, model, self._position, self._taps, stage)
            self._scope.meet(self._models, points, model)
            self._models += 1
        except Exception as error:
            self._scope.step_aside("looking through a model", error)

    def optimizer_begin(self) -> None:
        """An optimizer is about to make its step."""
        self._scope.optimizer_begin()

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """It has; after its first step, it has a state to look at."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        try:
            from trimtab.engines.plain.scope import plain_optimizer_points

            self._scope.meet_optimizer(optimizer, plain_optimizer_points(optimizer, list(self._scope.job.chunks)))
        except Exception as error:
            self._scope.step_aside("looking through an optimizer", error)
