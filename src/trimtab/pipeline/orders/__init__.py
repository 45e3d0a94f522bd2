"""The orders of an iteration, by name. A new one is a function from shape and costs to rows, and a line in ORDERS."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders.depthfirst import depth_first
from trimtab.pipeline.orders.dualpipe import dualpipe_v
from trimtab.pipeline.orders.loop import breadth_first, interleaved
from trimtab.pipeline.orders.onechunk import gpipe, one_f_one_b
from trimtab.pipeline.orders.order import Order, Rows
from trimtab.pipeline.orders.vshape import v_half, v_min, zb_v
from trimtab.pipeline.orders.zerobubble import zb_h1, zb_h2
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.shape import Placement, Shape

__all__ = ["ORDERS", "Order", "Rows", "default_chunks", "make_plan", "order_of", "placement_of"]

_ONE_V = "its V goes there and back once; for other numbers use interleaved, bfc or dfc"

ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "gpipe": Order(gpipe, fixed_chunks="use bfc for several"),
        "1f1b": Order(one_f_one_b, fixed_chunks="use interleaved for several"),
        "interleaved": Order(interleaved, chunks=2),
        "bfc": Order(breadth_first, chunks=2),
        "dfc": Order(depth_first, chunks=2),
        "zb-h1": Order(zb_h1, fixed_chunks="its split of the backward with several is in zb-v"),
        "zb-h2": Order(zb_h2, fixed_chunks="its split of the backward with several is in zb-v"),
        "zb-v": Order(zb_v, Placement.V, chunks=2, fixed_chunks=_ONE_V),
        "v-half": Order(v_half, Placement.V, chunks=2, fixed_chunks=_ONE_V),
        "v-min": Order(v_min, Placement.V, chunks=2, fixed_chunks=_ONE_V),
        "dualpipe-v": Order(dualpipe_v, Placement.V, chunks=2, fixed_chunks=_ONE_V),
    }
)
"""All orders, in the order in which tables list them."""

USUAL_TRANSFER = 0.05
"""Seconds of a message where a stage's F takes one and no costs are given."""


def order_of(name: str) -> Order:
    """The order of a name; ValueError where there is none."""
    try:
        return ORDERS[name]
    except KeyError:
        raise ValueError(f"there is no order {name!r}: choose one of {', '.join(ORDERS)}") from None


def placement_of(name: str) -> Placement:
    """How an order lays the model over the stages."""
    return order_of(name).placement


def default_chunks(name: str) -> int:
    """Model chunks a stage of an order, where nothing else is asked for."""
    return order_of(name).chunks


def make_plan(name: str, shape: Shape | tuple[int, int, int], costs: Costs | None = None) -> Plan:
    """The plan of a named order.

    :param shape: stages, chunks a stage and microbatches; a tuple takes the order's own placement.
    :param costs: seconds of the actions, for orders that make use of them; without, F, B and W alike and messages of a
        twentieth of them.
    :raises ValueError: there is no such order, or it is not for this shape.
    """
    order = order_of(name)
    order.check_chunks(name, shape.chunks if isinstance(shape, Shape) else shape[1])
    if not isinstance(shape, Shape):
        shape = Shape(*shape, order.placement)
    order.check_placement(name, shape.placement)
    if costs is None:
        costs = Costs.uniform(shape, transfer=USUAL_TRANSFER)
    costs.fits(shape)
    return Plan(name, shape, order.build(shape, costs))
