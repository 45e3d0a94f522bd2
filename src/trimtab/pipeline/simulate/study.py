"""Questions that take several simulations: how slow may links be, and which order and policy suit a job?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders import ORDERS, make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import POLICIES, Policy, make_policy
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.simulate.disturbance import NONE, Disturbance
from trimtab.pipeline.simulate.engine import simulate
from trimtab.pipeline.simulate.job import Job
from trimtab.pipeline.simulate.portfolio import measured, replan, replanner
from trimtab.pipeline.simulate.result import Result
from trimtab.pipeline.simulate.tables import unit_of

SLOWDOWN: Final = 1.05
"""With messages of c_max an iteration takes this much longer than with messages that take no time."""
_SMALLEST: Final = 1 / 64
_LARGEST: Final = 64.0
_EXACT: Final = 0.01


def c_max(
    plan: Plan | Callable[[Costs], Plan],
    policy: Policy,
    costs: Costs,
    cap: float | None = None,
    *,
    blocking: bool = False,
) -> float:
    """The largest transfer time, in seconds, on all links, with at most 5 % slowdown; infinite without messages.

    Found by doubling and bisection to 1 %, without disturbance: where more transfer time happens to help, the
    smallest crossing near the doubled values is taken. ``plan`` may be a function that plans for given costs.
    """

    def makespan(transfer: float) -> float:
        moved = replace(costs, transfer=transfer)
        made = plan if isinstance(plan, Plan) else plan(moved)
        return simulate(made, policy, moved, NONE, cap, blocking=blocking).makespan

    if len(costs.forward) == 1:
        return math.inf
    unit = unit_of(costs)
    limit = SLOWDOWN * makespan(0.0)
    low, high = 0.0, _SMALLEST * unit
    while makespan(high) <= limit:
        low, high = high, 2 * high
        if high > _LARGEST * unit:
            return math.inf
    while high - low > _EXACT * high and high > _SMALLEST * _EXACT * unit:
        middle = (low + high) / 2
        if makespan(middle) <= limit:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Row:
    """One order under one policy: a result, or why there is none."""

    order: str
    policy: str
    chunks: int
    result: Result | None
    problem: str = ""
    c_max: float | None = None
    """Seconds."""


def ranked(
    job: Job,
    disturbance: Disturbance = NONE,
    cap: Callable[[Plan, str], float | None] | None = None,
    seed: int = 0,
    *,
    blocking: bool = False,
    sync: float = 0.0,
    with_c_max: bool = False,
    replanned: bool = False,
    orders: Sequence[str] = tuple(ORDERS),
    policies: Sequence[str] = tuple(POLICIES),
) -> list[Row]:
    """Each order under each policy, for the same job: the fastest first, what is not possible last.

    ``cap`` says what a plan under a policy may hold; where it raises ValueError, that is why it is not possible.
    ``replanned``: ``auto`` follows plans made for what lasts.
    """
    rows: list[Row] = []
    for name in orders:
        try:
            shape = shape_of(name, job)
            costs = job.costs(shape)
            plan = make_plan(name, shape, costs)
        except ValueError as error:
            rows += [Row(name, policy, job.chunks, None, str(error)) for policy in policies]
            continue
        for policy in policies:
            chosen, largest, again = make_policy(policy), None, replanned and policy == "auto"
            try:
                limit = None if cap is None else cap(plan, policy)
                used = planned_for(plan, chosen, costs, limit, disturbance, job) if again else plan
                result = simulate(
                    used, chosen, costs, disturbance, limit, seed, blocking=blocking, sync=sync, links=job.links
                )
                if with_c_max:
                    planner = replanner(plan, limit, chosen) if again else plan
                    largest = c_max(planner, chosen, costs, limit, blocking=blocking)
            except ValueError as error:
                rows.append(Row(name, policy, shape.chunks, None, str(error)))
                continue
            rows.append(Row(name, policy, shape.chunks, result, c_max=largest))
    return sorted(rows, key=lambda row: math.inf if row.result is None else row.result.makespan)


def shape_of(name: str, job: Job) -> Shape:
    """The shape in which an order would run a job: the job's own chunks where the order takes that many."""
    order = ORDERS[name]
    chunks = job.chunks
    odd = order.placement is Placement.V and chunks % 2
    if order.fixed_chunks is not None or odd or (chunks == 1 and order.chunks > 1):
        chunks = order.chunks
    return Shape(job.stages, chunks, job.microbatches, order.placement)


def planned_for(
    plan: Plan, policy: Policy, costs: Costs, cap: float | None, disturbance: Disturbance, job: Job
) -> Plan:
    """A plan for what lasts of a disturbance, as stages find it that have measured it for some iterations."""
    lasting, links = measured(costs, disturbance, plan.shape, job.links)
    return replan(plan, lasting, cap, links, policy).plan
