"""trimtab: see and steer the training of large models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "attach", "span"]

if TYPE_CHECKING:
    from trimtab.attach import attach
    from trimtab.record.spans import span


def __getattr__(name: str) -> Any:
    """``attach`` and ``span``, imported when first used: importing trimtab alone brings no torch and no pyarrow."""
    if name == "attach":
        return importlib.import_module("trimtab.attach")  # the module is callable; see there
    if name == "span":
        globals()["span"] = found = importlib.import_module("trimtab.record.spans").span
        return found
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
