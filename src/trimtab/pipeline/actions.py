"""The actions of a pipeline: what one stage does for one microbatch in one of its model chunks."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Work(IntEnum):
    """Kinds of actions, in the terms of zero bubble schedules (Qi et al., arXiv 2401.10241)."""

    F = 0
    """Forward: needs the output of the position before."""
    B = 1
    """Backward for the input (dgrad): needs the gradient of the position after; its result goes to the one before."""
    W = 2
    """Backward for the weights (wgrad) of a microbatch whose B has run; needs nothing from other stages."""
    BW = 3
    """The whole backward in one: the gradient of the input goes out when both are done."""


class Action(NamedTuple):
    """One entry of a stage's order."""

    work: Work
    chunk: int
    """Model chunk of the stage, from 0."""
    microbatch: int
    """From 0."""

    def __str__(self) -> str:
        return f"{self.work.name}{self.chunk}.{self.microbatch}"
