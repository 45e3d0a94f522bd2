"""Orders of one model chunk a stage and whole backwards."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.order import Rows
from trimtab.pipeline.shape import Shape


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """So many forwards first, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    row = list(forwards[:warmup])
    for index, forward in enumerate(forwards[warmup:]):
        row += (forward, backwards[index])
    row += backwards[len(forwards) - warmup :]
    return tuple(row)


def gpipe(shape: Shape, _costs: Costs) -> Rows:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965), in microbatch order."""
    row = tuple(Action(work, 0, microbatch) for work in (Work.F, Work.BW) for microbatch in range(shape.microbatches))
    return (row,) * shape.stages


def one_f_one_b(shape: Shape, _costs: Costs) -> Rows:
    """1F1B (PipeDream-flush; Narayanan et al., arXiv 2006.09503).

    A stage runs as many forwards ahead as there are stages after it, then a forward and a backward in turn.
    """
    forwards = [Action(Work.F, 0, microbatch) for microbatch in range(shape.microbatches)]
    backwards = [Action(Work.BW, 0, microbatch) for microbatch in range(shape.microbatches)]
    return tuple(alternate(forwards, backwards, shape.stages - 1 - stage) for stage in range(shape.stages))
