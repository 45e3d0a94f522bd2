"""The batches of a step, asked for once each and in order, whatever order they are used in."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.fbd.execute.program import Program, Tensors


class Batches:
    """Of one rank: a loader that is read from the front serves it."""

    def __init__(self, program: Program, cell: int, mine: Sequence[int]) -> None:
        """``mine``: the rank's own microbatches, in order."""
        self._program = program
        self._cell = cell
        self._mine = mine
        self._step = -1
        self._asked = 0
        self._held: dict[int, Tensors] = {}

    def of(self, step: int, microbatch: int) -> Tensors:
        """The batch of a microbatch, which need not be the rank's own."""
        if step != self._step:
            self._step, self._asked = step, 0
            self._held.clear()
        if microbatch not in self._held and microbatch not in self._mine:
            self._held[microbatch] = self._program.batch(step, self._cell, microbatch)
        while microbatch not in self._held and self._asked < len(self._mine):
            one = self._mine[self._asked]
            self._asked += 1
            self._held[one] = self._program.batch(step, self._cell, one)
        return self._held[microbatch]

    def used(self, microbatch: int) -> None:
        """It is not needed any more."""
        self._held.pop(microbatch, None)
