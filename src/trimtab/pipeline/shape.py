"""The shape of an iteration: stages, model chunks, microbatches, and which part of the model lies where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Placement(StrEnum):
    """How the parts of the model, in their order, are laid over the stages."""

    LOOP = "loop"
    """Round and round: chunk c of stage s is part c * stages + s (Megatron's virtual stages)."""
    V = "v"
    """There and back: every other chunk runs from the last stage to the first, so that turning points stay on one
    stage (ZB-V; Qi et al., arXiv 2405.15362)."""


class Place(NamedTuple):
    """A model chunk of a stage."""

    stage: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How many stages, chunks a stage and microbatches an iteration has.

    A *position* numbers the parts of the model from 0, its input, to ``stages * chunks - 1``, its loss.
    """

    stages: int
    chunks: int
    microbatches: int
    placement: Placement = Placement.LOOP

    def __post_init__(self) -> None:
        for name in ("stages", "chunks", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.placement is Placement.V and self.chunks % 2:
            raise ValueError(f"placement v needs an even number of chunks a stage, not {self.chunks}")

    @property
    def positions(self) -> int:
        """Parts of the model."""
        return self.stages * self.chunks

    def position(self, stage: int, chunk: int) -> int:
        """Where in the model a stage's chunk is."""
        backwards = self.placement is Placement.V and chunk % 2 == 1
        return chunk * self.stages + (self.stages - 1 - stage if backwards else stage)

    def place(self, position: int) -> Place:
        """Stage and chunk of a position."""
        chunk, along = divmod(position, self.stages)
        backwards = self.placement is Placement.V and chunk % 2 == 1
        return Place(self.stages - 1 - along if backwards else along, chunk)

    def before(self, stage: int, chunk: int) -> Place | None:
        """Whose output this chunk takes; None where the model begins."""
        position = self.position(stage, chunk)
        return self.place(position - 1) if position else None

    def after(self, stage: int, chunk: int) -> Place | None:
        """Who takes this chunk's output; None where the model ends."""
        position = self.position(stage, chunk) + 1
        return self.place(position) if position < self.positions else None
