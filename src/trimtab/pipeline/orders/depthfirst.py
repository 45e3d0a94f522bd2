"""Depth-first order: made by running it, since what is ready first depends on the costs."""

from __future__ import annotations

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.clock import Board, Choice, play
from trimtab.pipeline.orders.order import Rows
from trimtab.pipeline.shape import Shape


class _DepthFirst:
    """Finish the oldest microbatch first, within a cap."""

    def __init__(self, shape: Shape, costs: Costs, cap: float) -> None:
        self._costs = costs
        self._caps = [cap * sum(row) for row in costs.activation]
        self._microbatches = shape.microbatches
        self._forwards = [[0] * shape.chunks for _ in range(shape.stages)]
        self._backwards = [[0] * shape.chunks for _ in range(shape.stages)]

    def choose(self, board: Board, stage: int, now: float) -> Choice:
        for counts, open_now in (
            (self._backwards[stage], self._open_backwards(stage)),
            (self._forwards[stage], self._open_forwards(board, stage)),
        ):
            there = [action for action in open_now if board.there(board.ready(stage, action), now)]
            if there:
                action = min(there, key=lambda action: (action.microbatch, action.chunk))
                counts[action.chunk] += 1
                return action
        coming = [*self._open_backwards(stage), *self._open_forwards(board, stage)]
        times = [ready for action in coming if (ready := board.ready(stage, action)) is not None]
        return min(times, default=None)

    def _open_backwards(self, stage: int) -> list[Action]:
        return [
            Action(Work.BW, chunk, microbatch)
            for chunk, microbatch in enumerate(self._backwards[stage])
            if microbatch < self._forwards[stage][chunk]
        ]

    def _open_forwards(self, board: Board, stage: int) -> list[Action]:
        """Forwards for which there is memory, with what the oldest microbatch still needs held back for it."""
        forwards = self._forwards[stage]
        oldest = min(forwards)
        reserve = sum(
            held
            for held, microbatch in zip(self._costs.activation[stage], forwards, strict=True)
            if microbatch == oldest
        )
        return [
            Action(Work.F, chunk, microbatch)
            for chunk, microbatch in enumerate(forwards)
            if microbatch < self._microbatches
            and board.room(stage, chunk, self._caps[stage] - (reserve if microbatch > oldest else 0.0))
        ]


def depth_first(shape: Shape, costs: Costs) -> Rows:
    """Depth-first: a stage runs the backward of the oldest microbatch that is ready, else the forward of the oldest.

    Activations are released as early as this allows. A forward is only begun within the peak of the interleaved order,
    ``stages + (stages - 1) / chunks`` microbatches, and within what the oldest microbatch does not need.
    """
    cap = shape.stages + (shape.stages - 1) / shape.chunks
    return play(shape, costs, _DepthFirst(shape, costs, cap).choose).rows
