"""What is trained, as a user says it; the same on every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import nn

from trimtab.fbd.ranks import Layout, Placement
from trimtab.fbd.split.random_states import RandomStates
from trimtab.transport.interface import Label

Tensors = tuple[torch.Tensor, ...]
Stage = Callable[[nn.Module, Tensors, Tensors], Tensors]
"""A stage's forward of one microbatch: its module, what the stage before gave (nothing on the first), and the batch;
what it gives the next, or on the last stage the loss alone, scaled as its gradient is to count."""
Batch = Callable[[int, int, int], Tensors]
"""Step, cell, microbatch: the tensors that all stages may use. Forward and backward side each ask for them, and have to
get the same."""
Finish = Callable[[nn.Module], None]
"""After the last backward of a step: reduce gradients over replicas, clip, let the optimizer step, clear gradients."""

ACTIVATION: Final = 0
SHIPMENT: Final = 1
WEIGHTS: Final = 2
CREDIT: Final = 3
"""Chunks of labels, that tell messages apart."""


@dataclass(frozen=True, slots=True)
class Program:
    """All of it. ValueError, in one line, where it does not fit together."""

    layout: Layout
    microbatches: int
    """Of a cell in a step."""
    stage: Stage
    batch: Batch
    mode: Literal["ship", "recompute"] = "ship"
    ahead: int = 2
    """Microbatches that a forward rank may have sent to a backward rank and not heard back of, which holds them."""
    patience: float = 60.0
    """Seconds until what does not come is taken to be lost."""
    random: RandomStates = field(default_factory=RandomStates)

    def __post_init__(self) -> None:
        if self.microbatches < 1 or self.microbatches % self.layout.backwards:
            raise ValueError(
                f"{self.microbatches} microbatches of a cell are to be the same number, from 1 on, for each of its "
                f"{self.layout.backwards} backward instances"
            )
        if self.ahead < 1:
            raise ValueError(f"ahead: at least 1 microbatch, not {self.ahead}")
        if self.layout.forward_tp != 1 or self.layout.backward_tp != 1:
            raise ValueError("tensor parallelism is not there yet; forward_tp and backward_tp have to be 1")
        if self.mode not in ("ship", "recompute"):
            raise ValueError(f"mode {self.mode!r}: expected ship or recompute")

    @property
    def placement(self) -> Placement:
        """A process for each virtual rank."""
        return Placement(self.layout)


def label(chunk: int, step: int, microbatch: int = 0, *, backward: bool = False) -> Label:
    """Of a message."""
    return Label(backward, chunk, microbatch, step)
