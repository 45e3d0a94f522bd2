"""What the actions of a job cost: seconds, memory and messages. Measured, from a scan report, or uniform."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.shape import Shape

Table = tuple[tuple[float, ...], ...]
"""A figure for each chunk of each stage: ``table[stage][chunk]``."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds and memory of each model chunk, and seconds of a message."""

    forward: Table
    """Seconds of F."""
    backward: Table
    """Seconds of B, the gradient of the input; BW takes ``backward + wgrad``."""
    wgrad: Table
    """Seconds of W."""
    activation: Table
    """What one microbatch holds from the start of its F on: the chunks of a stage add up to 1, or bytes."""
    kept: float = 1.0
    """Share of the activation that is still held from the end of B to the end of W."""
    latency: float = 0.0
    """Seconds from the end of a message's transfer to its arrival."""
    transfer: float = 0.0
    """Seconds a message occupies its link."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "wgrad", "activation"):
            table: Table = getattr(self, name)
            if not table or any(len(row) != len(self.forward[0]) for row in table) or len(table) != len(self.forward):
                raise ValueError(f"costs: {name} must have a figure for each chunk of each stage")
            if any(not (math.isfinite(value) and value >= 0) for row in table for value in row):
                raise ValueError(f"costs: {name} must be finite and at least 0")
        for name in ("latency", "transfer"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"costs: {name} must be finite and at least 0, not {getattr(self, name)}")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"costs: kept is a share from 0 to 1, not {self.kept}")

    @classmethod
    def uniform(
        cls,
        shape: Shape,
        forward: float = 1.0,
        backward: float = 1.0,
        wgrad: float = 1.0,
        transfer: float = 0.0,
        latency: float = 0.0,
        activation: float = 1.0,
        kept: float = 1.0,
    ) -> Self:
        """The same for every stage; seconds and memory are a *stage's* and divided by its chunks, messages are not."""

        def table(of_stage: float) -> Table:
            return ((of_stage / shape.chunks,) * shape.chunks,) * shape.stages

        return cls(table(forward), table(backward), table(wgrad), table(activation), kept, latency, transfer)

    def fits(self, shape: Shape) -> None:
        """Raise ValueError where the tables are not of this shape."""
        found = (len(self.forward), len(self.forward[0]))
        if found != (shape.stages, shape.chunks):
            raise ValueError(
                f"costs are of {found[0]} stages and {found[1]} chunks a stage, "
                f"the plan has {shape.stages} and {shape.chunks}"
            )

    def seconds(self, stage: int, action: Action) -> float:
        """How long an action takes on its stage."""
        work, chunk = action.work, action.chunk
        if work is Work.F:
            return self.forward[stage][chunk]
        if work is Work.B:
            return self.backward[stage][chunk]
        if work is Work.W:
            return self.wgrad[stage][chunk]
        return self.backward[stage][chunk] + self.wgrad[stage][chunk]

    def load(self, shape: Shape) -> tuple[float, ...]:
        """Seconds of compute of each stage in an iteration; the largest is a lower bound of the iteration."""
        return tuple(
            shape.microbatches * (sum(self.forward[stage]) + sum(self.backward[stage]) + sum(self.wgrad[stage]))
            for stage in range(shape.stages)
        )
