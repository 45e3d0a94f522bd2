"""Scan: an event table becomes a verdict. Pure functions over values; nothing here imports torch.

What it offers is loaded when it is asked for: a job that imports :mod:`trimtab.scan.online` has no tables.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.scan.analysis import Analysis, analyze
    from trimtab.scan.model import Report

__all__ = ["Analysis", "Report", "analyze"]

_FROM = {"Analysis": "trimtab.scan.analysis", "analyze": "trimtab.scan.analysis", "Report": "trimtab.scan.model"}


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(import_module(_FROM[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
