"""What :class:`trimtab.engines.megatron.MegatronEngine` tells scope: models, optimizers, steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from trimtab.engines.layers import Position
from trimtab.scope.job.handle import ScheduleCall
from trimtab.scope.job.session import ScopeSession
from trimtab.topology import Coordinates


class MegatronScope:
    """Stands between the engine and scope. What goes wrong here ends scope, and not the engine."""

    def __init__(self, scope: ScopeSession, position: Position) -> None:
        self._scope = scope
        self._position = position
        self._chunks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        scope.position = position

    def place(self, coordinates: Coordinates) -> None:
        """Where this rank stands."""
        self._scope.place(coordinates.as_dict())

    def meet(self, chunks: list[Any]) -> None:
        """The model chunks of a training step; those that are new are looked through."""
        if all(chunk in self._chunks for chunk in chunks):
            return
        try:
            from trimtab.engines.megatron_scope import megatron_points

            for index, chunk in enumerate(chunks):
                if chunk not in self._chunks:
                    self._chunks.add(chunk)
                    self._scope.meet(index, megatron_points(index, chunk, self._position), chunk)
        except Exception as error:
            self._scope.step_aside("looking through a model", error)

    def step_begin(
        self, step: int, schedule: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """``schedule`` is about to run a training step with these arguments."""
        self._scope.step_begin(step, ScheduleCall(schedule, args, keywords))

    def data(self, iterator: Any) -> Any:
        """The job's data iterator, or one that gives first what a paired run has read ahead."""
        lookahead = self._scope.job.lookahead
        return iterator if lookahead is None else lookahead.wrap(iterator)

    def passes_over(self) -> None:
        """It has."""
        self._scope.passes_over()

    def optimizer_begin(self) -> None:
        """The outermost optimizer is about to make its step."""
        self._scope.optimizer_begin()

    def optimizer_ended(self, optimizer: Any) -> None:
        """It has; after its first step, it has a state to look at."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        try:
            from trimtab.engines.megatron_scope import megatron_optimizer_points

            self._scope.meet_optimizer(optimizer, megatron_optimizer_points(optimizer, list(self._scope.job.chunks)))
        except Exception as error:
            self._scope.step_aside("looking through an optimizer", error)
