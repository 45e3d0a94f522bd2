"""Orders of several model chunks a stage, laid round and round, and whole backwards."""

from __future__ import annotations

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.onechunk import alternate, one_f_one_b
from trimtab.pipeline.orders.order import Rows, first_microbatches
from trimtab.pipeline.shape import Shape


def interleaved(shape: Shape, costs: Costs) -> Rows:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473).

    Microbatches go in groups as large as the pipeline: a stage runs a group through its first chunk, then through its
    second, and so on; backwards the same from the last chunk down. It runs ahead by ``2 (stages after it) + (chunks -
    1) stages`` forwards. Where the microbatches do not fill the last group, it is the order of full groups without
    the ones that are not there.
    """
    if shape.chunks == 1:
        return one_f_one_b(shape, costs)
    groups = -(-shape.microbatches // shape.stages)
    rows: list[tuple[Action, ...]] = []
    turns = [
        (chunk, group * shape.stages + within)
        for group in range(groups)
        for chunk in range(shape.chunks)
        for within in range(shape.stages)
    ]
    forwards = [Action(Work.F, chunk, microbatch) for chunk, microbatch in turns]
    backwards = [Action(Work.BW, shape.chunks - 1 - chunk, microbatch) for chunk, microbatch in turns]
    for stage in range(shape.stages):
        warmup = 2 * (shape.stages - 1 - stage) + (shape.chunks - 1) * shape.stages
        rows.append(alternate(forwards, backwards, warmup))
    return first_microbatches(tuple(rows), shape.microbatches)


def breadth_first(shape: Shape, _costs: Costs) -> Rows:
    """Breadth-first (Lamy-Poirier, arXiv 2211.05953): all microbatches through a chunk before the next chunk.

    Every message has the longest time until it is needed, and the gradients of a chunk are complete, and can be
    reduced, while earlier chunks still run. Holds the activations of all microbatches.
    """
    microbatches = range(shape.microbatches)
    forwards = [Action(Work.F, chunk, microbatch) for chunk in range(shape.chunks) for microbatch in microbatches]
    backwards = [
        Action(Work.BW, chunk, microbatch) for chunk in reversed(range(shape.chunks)) for microbatch in microbatches
    ]
    return ((*forwards, *backwards),) * shape.stages
