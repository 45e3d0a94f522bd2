"""What a checkpoint of Megatron-Core needs of the engine for it, which scope does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trimtab.scope.taps.points import ModelPoints


class Engine(Protocol):
    """Given by the command line."""

    def cpu(self) -> Callable[[], None]:
        """Let Megatron-Core run on the CPU where there is no GPU; the answer takes that back."""
        ...

    def position(self) -> Any:
        """Where a model's points look for the step: with ``step``, ``microbatch`` and ``aside``."""
        ...

    def points(self, chunk: int, model: Any, position: Any) -> ModelPoints:
        """What a model offers."""
        ...
