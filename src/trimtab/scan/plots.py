"""What the report draws, as values: the scan fills it, :mod:`trimtab.scan.report` renders it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt


class Category(StrEnum):
    """What a stretch of a rank's timeline was spent on; each has its own colour."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WGRAD = "wgrad"
    """The backward for the weights alone."""
    OPTIMIZER = "optimizer"
    KERNEL = "kernel"
    """Work of the device of which no more is known."""
    OTHER = "other"
    """Other work of the rank: data loading, garbage collection, checkpoints."""
    TRANSFER = "transfer"
    """Communication that moves data."""
    WAIT = "wait"
    """Communication that waits for another rank."""
    GAP = "gap"
    """Nothing known ran."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of one rank's timeline, in seconds from the start of the step drawn."""

    rank: int
    start_s: float
    end_s: float
    category: Category
    label: str = ""


@dataclass(frozen=True, slots=True)
class ReportPlots:
    """Everything the report's figures are drawn from. What is empty is left out of the report."""

    heatmap_ranks: tuple[int, ...] = ()
    heatmap_steps: tuple[int, ...] = ()
    heatmap: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    """Shape (ranks, steps): excess compute time against the peers as a ratio (0: as the peers, 0.5: half as
    long again); NaN where unknown."""
    timeline: tuple[Segment, ...] = ()
    timeline_step: int | None = None
    """The step that the timeline shows."""
    lost_by_rank: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds a step on the critical path that its peers do not need."""
    waited_by_rank: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds a step that each rank spends waiting for others, for whatever reason."""
    clock_error_us_by_rank: dict[int, float] = field(default_factory=dict[int, float])
    step_time_s: dict[int, float] = field(default_factory=dict[int, float])
    """Time of each judged step."""

    def __post_init__(self) -> None:
        expected = (len(self.heatmap_ranks), len(self.heatmap_steps))
        if self.heatmap.size and self.heatmap.shape != expected:
            raise ValueError(f"plots: the heat map is of shape {self.heatmap.shape}, but its axes say {expected}")
