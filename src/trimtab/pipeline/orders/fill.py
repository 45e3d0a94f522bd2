"""Where the weight gradients go: into the gaps of an order of F and B, or where memory has to be freed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.clock import Board, Choice, play
from trimtab.pipeline.orders.order import Rows
from trimtab.pipeline.shape import Shape

PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
"""How much of a W's time a stage waits for an input that is on its way, rather than start a W. Each is tried: a W in
a gap that is too short delays what comes next, a W that is left for later may find no gap."""


@dataclass(slots=True)
class _Filler:
    """One try: each stage keeps to its row; what has no input yet gives way to a W."""

    rows: Rows
    costs: Costs
    caps: tuple[float, ...]
    patience: float
    at: list[int] = field(init=False)
    pending: list[deque[Action]] = field(init=False)

    def __post_init__(self) -> None:
        self.at = [0] * len(self.rows)
        self.pending = [deque() for _ in self.rows]

    def choose(self, board: Board, stage: int, now: float) -> Choice:
        row, pending = self.rows[stage], self.pending[stage]
        if self.at[stage] == len(row):
            return pending.popleft() if pending else None
        head = row[self.at[stage]]
        if pending and head.work is Work.F and not board.room(stage, head.chunk, self.caps[stage]):
            return pending.popleft()
        ready = board.ready(stage, head)
        if board.there(ready, now):
            self.at[stage] += 1
            if head.work is Work.B:
                pending.append(Action(Work.W, head.chunk, head.microbatch))
            return head
        if not pending:
            return ready
        if ready is not None and ready - now < self.patience * self.costs.seconds(stage, pending[0]):
            return ready
        return pending.popleft()


def fill_wgrads(shape: Shape, costs: Costs, rows: Rows, cap: float) -> Rows:
    """Add a W for each B of the rows; the order of F and B stays.

    W's come in the order of their B's. One is run where the stage would idle, and before an F that would otherwise
    take the stage above the cap. Of several ways to weigh short gaps, the fastest at these costs is returned.

    :param cap: activations in microbatches; without a W to run, the rows are followed above it.
    """
    caps = tuple(cap * sum(row) for row in costs.activation)
    tries = (play(shape, costs, _Filler(rows, costs, caps, patience).choose) for patience in PATIENCE)
    return min(tries, key=lambda board: board.makespan).rows
