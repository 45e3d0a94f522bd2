"""What an iteration was like on one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.pipeline.actions import Work


@dataclass(frozen=True, slots=True)
class IterationReport:
    """Figures of one iteration on one stage, as its host saw them; seconds."""

    stage: int
    iteration: int
    seconds: float
    """From begin to end."""
    compute: float
    """In the model's chunks (on CUDA: launching them) and in hooks around them."""
    waiting: float
    """For messages, and on CUDA for the device."""
    actions: int
    times: Mapping[tuple[Work, int], float]
    """Mean time of the actions whose end was seen since the last report, by work and chunk; the device's, on CUDA."""
    peak: float
    """Most activation memory that the guard counted, in its unit."""
    bytes_sent: int

    @property
    def overhead(self) -> float:
        """What an action costs beside itself and waiting: choosing it, and handing over what it takes and makes."""
        return max(self.seconds - self.compute - self.waiting, 0.0) / max(self.actions, 1)
