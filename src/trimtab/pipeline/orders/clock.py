"""An undisturbed run of an iteration in which an order decides as it goes: orders that need times are made by it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.order import Rows
from trimtab.pipeline.shape import Place, Shape

TOLERANCE = 1e-9
"""Share of a time or of a memory by which sums of floats may be off."""


class Board:
    """What has run so far, when inputs arrive and what each stage holds."""

    def __init__(self, shape: Shape, costs: Costs) -> None:
        places = [[(stage, chunk) for chunk in range(shape.chunks)] for stage in range(shape.stages)]
        self.held = [0.0] * shape.stages
        """Activations each stage holds, in the unit of the costs."""
        self.free = [0.0] * shape.stages
        """When each stage has ended what it started last."""
        self._rows: list[list[Action]] = [[] for _ in places]
        self._costs = costs
        self._microbatches = shape.microbatches
        self._offset = [[shape.position(*place) * shape.microbatches for place in row] for row in places]
        self._targets: dict[bool, list[list[Place | None]]] = {
            True: [[shape.after(*place) for place in row] for row in places],
            False: [[shape.before(*place) for place in row] for row in places],
        }
        self._links: dict[tuple[int, int], float] = {}
        size = shape.positions * shape.microbatches
        self._arrival: dict[bool, list[float | None]] = {True: [None] * size, False: [None] * size}
        self._arrival[True][: shape.microbatches] = [0.0] * shape.microbatches

    @property
    def rows(self) -> Rows:
        """The actions of each stage, as they were started."""
        return tuple(map(tuple, self._rows))

    @property
    def makespan(self) -> float:
        """When the last stage is done."""
        return max(self.free)

    def ready(self, stage: int, action: Action) -> float | None:
        """When the input of an F, B or BW is there; None while its producer has not started."""
        return self._arrival[action.work is Work.F][self._offset[stage][action.chunk] + action.microbatch]

    @staticmethod
    def there(ready: float | None, now: float) -> bool:
        """Whether what is ready then is there now."""
        return ready is not None and ready <= now * (1 + TOLERANCE)

    def room(self, stage: int, chunk: int, cap: float) -> bool:
        """Whether an F of this chunk keeps the stage within a cap."""
        return self.held[stage] + self._costs.activation[stage][chunk] <= cap * (1 + TOLERANCE)

    def start(self, stage: int, action: Action, now: float) -> int | None:
        """Run an action; returns the other stage that gets its result, if any."""
        work, chunk, microbatch = action
        costs = self._costs
        end = self.free[stage] = now + costs.seconds(stage, action)
        self._rows[stage].append(action)
        if work is Work.W:
            self.held[stage] -= costs.kept * costs.activation[stage][chunk]
            return None
        change = 1.0 if work is Work.F else costs.kept - 1.0 if work is Work.B else -1.0
        self.held[stage] += change * costs.activation[stage][chunk]
        forward = work is Work.F
        target = self._targets[forward][stage][chunk]
        if target is None:
            if forward:  # the loss: its gradient is there at once
                self._arrival[False][self._offset[stage][chunk] + microbatch] = end
            return None
        if target.stage == stage:
            self._arrival[forward][self._offset[stage][target.chunk] + microbatch] = end
            return None
        link = (stage, target.stage)
        sent = self._links[link] = max(end, self._links.get(link, 0.0)) + costs.transfer
        self._arrival[forward][self._offset[target.stage][target.chunk] + microbatch] = sent + costs.latency
        return target.stage


Choice = Action | float | None
"""What a free stage does: an action, wait until a time, or wait until something that it can use is on its way."""


def play(shape: Shape, costs: Costs, choose: Callable[[Board, int, float], Choice]) -> Board:
    """Run an iteration; whenever a stage is free, ``choose(board, stage, now)`` says what it does.

    Choices are asked for in the order of time, so all that started before now is known to them.
    """
    board = Board(shape, costs)
    moments = [(0.0, stage) for stage in range(shape.stages)]
    while moments:
        now, stage = heapq.heappop(moments)
        if now < board.free[stage]:
            continue
        choice = choose(board, stage, now)
        if isinstance(choice, Action):
            receiver = board.start(stage, choice, now)
            heapq.heappush(moments, (board.free[stage], stage))
            if receiver is not None and board.free[receiver] <= now:
                heapq.heappush(moments, (now, receiver))
        elif choice is not None and choice > now:
            heapq.heappush(moments, (choice, stage))
    return board
