"""Pipeline schedules: actions, orders, policies, memory and their simulation (pure), and their execution (torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Pipeline", "positions"]

if TYPE_CHECKING:
    from trimtab.pipeline.execute.door import Pipeline, positions


def __getattr__(name: str) -> Any:
    """What trains, imported when first used: schedules and their simulation need no torch."""
    if name in __all__:
        return getattr(importlib.import_module("trimtab.pipeline.execute.door"), name)
    raise AttributeError(f"module 'trimtab.pipeline' has no attribute {name!r}")
