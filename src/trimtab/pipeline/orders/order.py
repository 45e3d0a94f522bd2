"""What an order is: a function from a shape and costs to the actions of each stage, and what it asks of the shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.shape import Placement, Shape

Rows = tuple[tuple[Action, ...], ...]
"""The actions of each stage in order."""


@dataclass(frozen=True, slots=True)
class Order:
    """A named way to order an iteration."""

    build: Callable[[Shape, Costs], Rows]
    """Makes the rows for any number of stages and microbatches from 1."""
    placement: Placement = Placement.LOOP
    chunks: int = 1
    """Model chunks a stage, where nothing else is asked for."""
    fixed_chunks: str | None = None
    """For orders of exactly ``chunks`` chunks: what to use for other numbers."""

    def check_chunks(self, name: str, chunks: int) -> None:
        """Raise ValueError where the order is not for so many chunks a stage."""
        if self.fixed_chunks is not None and chunks != self.chunks:
            raise ValueError(
                f"order {name} has {self.chunks} model chunk{'s' if self.chunks > 1 else ''} a stage, "
                f"not {chunks}: {self.fixed_chunks}"
            )

    def check_placement(self, name: str, placement: Placement) -> None:
        """Raise ValueError where the order is not for this placement."""
        if placement is not self.placement:
            raise ValueError(f"order {name} is for placement {self.placement.value}, not {placement.value}")


def first_microbatches(rows: Rows, microbatches: int) -> Rows:
    """The rows without the microbatches from a number on.

    What is left can run if the rows could: microbatches do not depend on each other.
    """
    return tuple(tuple(action for action in row if action.microbatch < microbatches) for row in rows)


class Row:
    """A stage's row, written down as what comes next: of each kind of work and chunk the next microbatch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[Work, int], int] = {}

    def add(self, *entries: tuple[Work, int]) -> None:
        """Kinds of work and their chunks, in order; B and BW of a chunk share one count."""
        for work, chunk in entries:
            counted = (Work.B if work is Work.BW else work, chunk)
            microbatch = self._next.get(counted, 0)
            self._next[counted] = microbatch + 1
            self.actions.append(Action(work, chunk, microbatch))
