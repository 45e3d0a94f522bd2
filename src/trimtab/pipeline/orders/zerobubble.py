"""Orders of one model chunk a stage with the backward split in two (Qi et al., arXiv 2401.10241)."""

from __future__ import annotations

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.fill import fill_wgrads
from trimtab.pipeline.orders.onechunk import alternate
from trimtab.pipeline.orders.order import Rows
from trimtab.pipeline.shape import Shape


def _alternating(shape: Shape, ahead: int) -> Rows:
    """F and B; a stage runs so many forwards ahead for each stage after it."""
    forwards = [Action(Work.F, 0, microbatch) for microbatch in range(shape.microbatches)]
    backwards = [Action(Work.B, 0, microbatch) for microbatch in range(shape.microbatches)]
    return tuple(alternate(forwards, backwards, ahead * (shape.stages - 1 - stage)) for stage in range(shape.stages))


def zb_h1(shape: Shape, costs: Costs) -> Rows:
    """ZB-H1: 1F1B whose weight gradients fill the end of the iteration, within 1F1B's memory on the first stage."""
    return fill_wgrads(shape, costs, _alternating(shape, 1), cap=shape.stages)


def zb_h2(shape: Shape, costs: Costs) -> Rows:
    """ZB-H2: twice as many forwards ahead, so that from its first to its last action a stage need not idle.

    The stages still begin one after the other, and so end; the next iteration has to overlap with this one (the paper
    validates the optimizer step afterwards) for that time to be won.
    """
    return fill_wgrads(shape, costs, _alternating(shape, 2), cap=2 * shape.stages - 1)
