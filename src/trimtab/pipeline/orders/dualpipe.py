"""DualPipeV (DeepSeek, github.com/deepseek-ai/DualPipe): DualPipe's order cut in half, on a V placement."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.fill import fill_wgrads
from trimtab.pipeline.orders.order import Row, Rows, first_microbatches
from trimtab.pipeline.orders.vshape import DOWN, UP
from trimtab.pipeline.shape import Shape


def _row(stages: int, stage: int, microbatches: int) -> tuple[Action, ...]:
    """One stage, in the published steps; a pair that may overlap is the forward, then the backward."""
    after = stages - 1 - stage
    row = Row()
    row.add(*[(Work.F, DOWN)] * (2 * after))
    row.add(*[(Work.F, DOWN), (Work.F, UP)] * (stage + 1))
    row.add(*[(Work.B, UP), (Work.W, UP), (Work.F, UP)] * after)
    main = [(Work.F, DOWN), (Work.BW, UP), (Work.F, UP), (Work.BW, DOWN)]
    row.add(*main * (microbatches - 2 * stages + stage + 1))
    row.add(*[(Work.BW, UP), (Work.F, UP), (Work.BW, DOWN)] * after)
    last = [(Work.BW, UP), (Work.BW, DOWN)] * (stage + 1)
    whole = stage + 1  # from the middle of the last backwards on, those for the input go first
    row.add(*last[:whole])
    row.add(*[(Work.B, chunk) for _, chunk in last[whole:]], *[(Work.B, DOWN)] * after)
    return _late_wgrads(row.actions, within=after)


def _late_wgrads(actions: Sequence[Action], within: int) -> tuple[Action, ...]:
    """Add the W's that are missing: one before each of the last so many B's, the others at the end, in their order."""
    there = {action for action in actions if action.work is Work.W}
    owed = [
        weights
        for action in actions
        if action.work is Work.B and (weights := action._replace(work=Work.W)) not in there
    ]
    row = list(actions[: len(actions) - within])
    for action in actions[len(actions) - within :]:
        if owed and owed[0]._replace(work=Work.B) in row:
            row.append(owed.pop(0))
        row.append(action)
    return (*row, *owed)


def dualpipe_v(shape: Shape, costs: Costs) -> Rows:
    """DualPipeV: forwards of one chunk meet backwards of the other; only the ends of the iteration split backwards.

    Published for at least twice as many microbatches as stages. With fewer there is nothing but ends: all backwards
    are split, and the weight gradients fill gaps.
    """
    microbatches = max(shape.microbatches, 2 * shape.stages)
    rows = tuple(_row(shape.stages, stage, microbatches) for stage in range(shape.stages))
    if shape.microbatches == microbatches:
        return rows
    split = tuple(
        tuple(
            action._replace(work=Work.B) if action.work is Work.BW else action
            for action in row
            if action.work is not Work.W
        )
        for row in first_microbatches(rows, shape.microbatches)
    )
    return fill_wgrads(shape, costs, split, cap=shape.stages + 0.5)
