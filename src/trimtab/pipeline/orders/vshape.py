"""Orders of two model chunks a stage, laid there and back: zero bubble and controllable memory.

A microbatch goes down the stages through chunk 0 and up again through chunk 1, so the first stage has the model's
input and its loss, and holds a microbatch of chunk 0 long and one of chunk 1 shortly; on the last stage it is the
other way round. The sum is nearly even (Qi et al., arXiv 2405.15362).
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.fill import fill_wgrads
from trimtab.pipeline.orders.order import Row, Rows, first_microbatches
from trimtab.pipeline.shape import Shape

DOWN, UP = 0, 1
"""The chunk whose forward goes from the first stage to the last, and the one that comes back."""

PERIOD = 6
"""Actions of one microbatch on a stage: F, B and W of two chunks."""


class Block(NamedTuple):
    """When one microbatch runs, in units of one action; the next one runs the same a period later."""

    slopes: tuple[int, int, int, int]
    """From stage to stage: F down, F up, B of the chunk that came up (goes down), B of the other (goes up)."""
    starts: tuple[int, int, int, int]
    """At the stage where each of them begins."""

    def times(self, stages: int, stage: int) -> list[int]:
        """On one stage: F down, F up, B of up, B of down."""
        after = stages - 1 - stage
        along = (stage, after, stage, after)
        return [start + slope * way for start, slope, way in zip(self.starts, self.slopes, along, strict=True)]


def building_block(stages: int, slopes: tuple[int, int, int, int]) -> Block:
    """The shortest block of these slopes that can repeat: no two of its F and B fall on one time on any stage.

    The turns, from F down to F up, to B, and to the other B, take at least one unit each; longer ones are tried in
    the order of their sum until nothing collides.
    """
    along = stages - 1
    for turns in sorted(product(range(1, PERIOD + 1), repeat=3), key=lambda turns: (sum(turns), turns)):
        first = slopes[0] * along + turns[0]
        second = first + slopes[1] * along + turns[1]
        third = second + slopes[2] * along + turns[2]
        block = Block(slopes, (0, first, second, third))
        # Every slope moves by whole units, so what happens repeats after PERIOD stages.
        if all(
            len({time % PERIOD for time in block.times(stages, stage)}) == 4 for stage in range(min(stages, PERIOD))
        ):
            return block
    raise AssertionError(f"no block of slopes {slopes} for {stages} stages")


def repeated_block(shape: Shape, slopes: tuple[int, int, int, int]) -> Rows:
    """F and B of all microbatches in the order of their times in the repeated block."""
    block = building_block(shape.stages, slopes)
    kinds = ((Work.F, DOWN), (Work.F, UP), (Work.B, UP), (Work.B, DOWN))
    rows: list[tuple[Action, ...]] = []
    for stage in range(shape.stages):
        timed = sorted(
            (time + PERIOD * microbatch, Action(work, chunk, microbatch))
            for (work, chunk), time in zip(kinds, block.times(shape.stages, stage), strict=True)
            for microbatch in range(shape.microbatches)
        )
        rows.append(tuple(action for _, action in timed))
    return tuple(rows)


def v_half(shape: Shape, costs: Costs) -> Rows:
    """V-Half: half of 1F1B's memory; a microbatch waits on every other leg of its way."""
    return fill_wgrads(shape, costs, repeated_block(shape, (2, 1, 2, 1)), cap=(shape.stages + 2) // 2)


def v_min(shape: Shape, costs: Costs) -> Rows:
    """V-Min: a third of 1F1B's memory; a microbatch never waits, so unequal times and messages cost most here."""
    return fill_wgrads(shape, costs, repeated_block(shape, (1, 1, 1, 1)), cap=(shape.stages + 4) // 3)


def _zero_bubble_row(stages: int, stage: int, microbatches: int) -> tuple[Action, ...]:
    after = stages - 1 - stage
    ahead = 2 * after + 1 + stage
    row = Row()
    row.add(*[(Work.F, DOWN)] * (2 * after + 1))
    row.add(*[(Work.F, UP), (Work.F, DOWN)] * stage)
    row.add(*[(Work.F, UP), (Work.B, UP)] * (after + 1))
    row.add(*[(Work.F, DOWN), (Work.B, DOWN), (Work.F, UP), (Work.B, UP)] * (microbatches - ahead))
    row.add(*[(Work.B, DOWN), (Work.F, UP), (Work.B, UP)] * after)
    row.add(*[(Work.B, DOWN), (Work.B, UP)] * stage)
    row.add(*[(Work.B, DOWN)] * (after + 1))
    return tuple(row.actions)


def zb_v(shape: Shape, costs: Costs) -> Rows:
    """ZB-V: at F = B = W no stage idles once it has begun, in 1F1B's memory.

    A stage runs forwards down until its first one comes back, then one of each kind in turn. Written for at least
    ``2 stages - 1`` microbatches; fewer are the same order without the others.
    """
    microbatches = max(shape.microbatches, 2 * shape.stages - 1)
    rows = tuple(_zero_bubble_row(shape.stages, stage, microbatches) for stage in range(shape.stages))
    return fill_wgrads(shape, costs, first_microbatches(rows, shape.microbatches), cap=shape.stages)
