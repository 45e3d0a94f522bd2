"""The engine of Megatron-Core for ``trimtab scope generate``, which knows no engine itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Megatron:
    """The engine of Megatron-Core for trimtab scope generate, see :mod:`trimtab.scope.generate.engine`."""

    def cpu(self) -> Callable[[], None]:
        from trimtab.engines import cpu

        return cpu.install()

    def position(self) -> Any:
        from trimtab.engines.layers import Position

        return Position()

    def points(self, chunk: int, model: Any, position: Any) -> Any:
        from trimtab.engines.megatron_scope import megatron_points

        return megatron_points(chunk, model, position)
