"""torch.distributed.pipelining: what a stage does for a microbatch. The schedules call no hook, but all of them call
these three methods of a stage with the microbatch's number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trimtab.engines.guard import Guard
from trimtab.engines.patches import PIPELINING_PATCHES, PatchError, Patches
from trimtab.engines.plain.layout import StagePlace


class StageListener(Protocol):
    """Is told what stages do. Each method returns what is to be called when it is done."""

    def stage_forward(self, stage: Any, microbatch: int, trains: bool, /) -> Callable[[], None]:
        """A forward begins; ``trains``: it will have a backward."""
        ...

    def stage_backward(self, stage: Any, microbatch: int, /) -> Callable[[], None]:
        """A backward begins: a whole one, or that of the inputs alone."""
        ...

    def stage_weights(self, stage: Any, microbatch: int, /) -> Callable[[], None]:
        """The gradients of the weights begin, which a backward left."""
        ...


class StageMethods:
    """The patches of the stages' methods."""

    def __init__(self, listener: StageListener, guard: Guard) -> None:
        self._listener = listener
        self._guard = guard
        self._patches = Patches()

    def install(self) -> None:
        """Replace the methods; torch.distributed.pipelining has been imported.

        Raises :class:`trimtab.engines.patches.PatchError` with all as it was.
        """
        replacements = (self._forward, self._backward, self._weights)
        try:
            for patch, begin in zip(PIPELINING_PATCHES, replacements, strict=True):
                self._patches.apply(patch, functools.partial(self._around, begin))
        except PatchError:
            self._patches.undo()
            raise

    def remove(self) -> None:
        """Put the methods back."""
        self._patches.undo()

    def _around(
        self, begin: Callable[[Any, int], Callable[[], None]], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        guard = self._guard

        @functools.wraps(original)
        def method(stage: Any, *args: Any, **kwargs: Any) -> Any:
            end = None
            if guard.working:
                try:
                    end = begin(stage, args[0] if args else next(iter(kwargs.values())))
                except Exception as error:
                    guard.failed("the hook before a pipeline stage", error)
            try:
                return original(stage, *args, **kwargs)
            finally:
                if end is not None and guard.working:
                    try:
                        end()
                    except Exception as error:
                        guard.failed("the hook after a pipeline stage", error)

        return method

    def _forward(self, stage: Any, microbatch: int) -> Callable[[], None]:
        return self._listener.stage_forward(stage, microbatch, stage.has_backward and torch.is_grad_enabled())

    def _backward(self, stage: Any, microbatch: int) -> Callable[[], None]:
        return self._listener.stage_backward(stage, microbatch)

    def _weights(self, stage: Any, microbatch: int) -> Callable[[], None]:
        # Without an input that needs a gradient there is nothing to split: the first stage's backward runs here whole.
        whole = stage.stage_index == 0 and stage.dw_builder is None
        return (self._listener.stage_backward if whole else self._listener.stage_weights)(stage, microbatch)


def place_of(stage: Any) -> StagePlace:
    """Where the stage's rank stands in the pipeline."""
    return StagePlace(stage.group_size, stage.group_rank, len(_held(stage)))


def chunk_of(stage: Any) -> int:
    """Number of the stage among those of its rank, in the order of the model."""
    held = _held(stage)
    return held.index(stage.stage_index) if stage.stage_index in held else 0


def _held(stage: Any) -> list[int]:
    return sorted(index for index, rank in stage.stage_index_to_group_rank.items() if rank == stage.group_rank)
