"""What taps are called, and the patterns that choose among them.

A name is dotted: ``layers.3.mlp.output``. Layers count from 0 over the whole model, whatever pipeline stage or chunk
holds them. In a pattern ``*`` stands for one segment (or a part of it), ``**`` for any number of segments, ``{a,b}``
for alternatives, and ``0-3`` for a range of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

TapKind = Literal["activation", "gradient", "parameter", "optimizer", "attention", "communication"]
Shard = tuple[tuple[str, int, int], ...]
"""Over which parallel axes ranks hold different parts: (axis, index, count) each. Equal shards are replicas."""
GRADIENT: Final = ".grad"
"""Ending of the name of a tensor's gradient."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A tensor that a model offers, on one rank."""

    name: str
    kind: TapKind
    labels: tuple[str, ...] = ()
    """What each dimension is: ``("s", "b", "h")``."""
    shape: tuple[int, ...] | None = None
    """On this rank; None where it is not known before it has been seen."""
    dtype: str = ""
    shard: Shard = ()
    replica: int = 0
    """Index among the ranks that hold the very same part."""
    layer: int = -1
    heads: tuple[int, int, int] | None = None
    """First head on this rank, how many, and how many the whole model has."""
    module: str = ""
    """Path of the module in its model chunk."""
    chunk: int = 0
