"""Spots: where in a plain PyTorch model a tensor passes by, before anybody has decided how to see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Side = Literal["input", "output", "q", "k", "v", "core", "map"]
"""Of a module's forward: what it is given, what it returns; the rest are of the attention that it calls."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a model that is called as it is."""

    part: str
    """Of the tap's name: ``mlp.output``."""
    module: torch.nn.Module
    side: Side
    argument: str = ""
    """Keyword of the input, which may also be the first positional argument."""
