"""Plans for lasting conditions: of many that a stage could follow, the one that does best in simulation.

A policy deviates where an input is late now. Where links or stages are slow for good, a plan that knows so is better:
forwards that run further ahead of a slow link, weight gradients kept for the gaps that it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from trimtab.pipeline.actions import Work
from trimtab.pipeline.costs import Costs, Table
from trimtab.pipeline.orders import ORDERS, make_plan
from trimtab.pipeline.orders.fill import fill_wgrads
from trimtab.pipeline.orders.order import Rows
from trimtab.pipeline.orders.vshape import repeated_block
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Auto, Hint, Policy, Static
from trimtab.pipeline.shape import Placement, Shape
from trimtab.pipeline.simulate.disturbance import NONE, Disturbance, Link, SlowLink, SlowStage
from trimtab.pipeline.simulate.engine import run
from trimtab.pipeline.simulate.result import Result
from trimtab.pipeline.simulate.tables import tabulate, unit_of

SLOPES: Final = ((3, 3, 3, 3), (4, 4, 4, 4), (4, 5, 4, 5))
"""Of V blocks: time from stage to stage, in actions. Wide ones leave room for messages."""
LEAST_GAIN: Final = 0.002
"""Another plan is taken only if it is faster by this share."""
OTHERS: Final[tuple[Policy, ...]] = (Static(), Hint(), Hint(lookahead=24))
"""The best candidates are also run under these; the order in which they ran is followed, whatever made it."""
FINALISTS: Final = 3
MOST_ACTIONS: Final = 3000
"""Of an iteration while plans are compared: with more, the comparison is made with fewer microbatches."""

Builder: TypeAlias = Callable[[Shape, Costs, float], Plan]


@dataclass(frozen=True, slots=True)
class Replanned:
    """A plan for what was measured."""

    plan: Plan
    """In the order in which the best simulation ran; the plan given, if none is clearly better."""
    source: str
    """What it comes from: order, and policy under which that ran."""
    makespan: float
    """Simulated seconds under the policy that will follow the plan."""
    before: float
    """Those of the plan given."""

    @property
    def gain(self) -> float:
        """Share of the iteration that is saved."""
        return 1 - self.makespan / self.before if self.before > 0 else 0.0


def replan(
    plan: Plan,
    costs: Costs,
    cap: float | None = None,
    links: Mapping[Link, float] | None = None,
    policy: Policy | None = None,
) -> Replanned:
    """The best plan found for the same stages, chunks, microbatches and placement.

    Whole backwards stay whole, split ones split. Equal arguments give equal plans, on whichever machine: each stage may
    find its own. Of large iterations fewer microbatches are compared.

    Args:
        plan: What is followed now; its microbatches must be in order.
        costs: Measured.
        cap: Most activations a stage may hold, in the unit of ``costs.activation``; None: what ``plan`` needs at most.
        links: Seconds of a message on links that differ from ``costs.transfer``.
        policy: Follows the plan; None: ``auto``.
    """
    limit = plan.peak(costs.kept) * max(map(sum, costs.activation)) if cap is None else cap
    trial = _Trial(costs, limit, links or {}, policy or Auto())
    shape = _smaller(plan.shape)
    # Orders are made for messages alike on all links: as usual, or as on the slowest.
    slowest = max([costs.transfer, *trial.links.values()])
    usual = [costs] if slowest == costs.transfer else [costs, replace(costs, transfer=slowest)]
    tried: list[tuple[float, int, Builder, Costs, Policy | None]] = []
    for build in (_as_given(plan), *_builders(plan)):
        for made_for in usual:
            took = trial.run(build(shape, made_for, limit), trial.policy)
            if took is not None:
                tried.append((took.makespan, len(tried), build, made_for, None))
    for _, _, build, made_for, _ in sorted(tried, key=lambda one: one[:2])[:FINALISTS]:
        for other in OTHERS:
            found = trial.followed(build(shape, made_for, limit), other)
            if found is not None:
                tried.append((found[1].makespan, len(tried), build, made_for, other))
    _, _, build, made_for, other = min(tried, key=lambda one: one[:2])
    return trial.chosen(plan, build(plan.shape, made_for, limit), other)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What all candidates are tried with."""

    costs: Costs
    cap: float
    links: Mapping[Link, float]
    policy: Policy

    def run(self, plan: Plan, policy: Policy) -> Result | None:
        """None where plan, policy and cap do not go together."""
        try:
            return run(plan, policy, self.costs, tabulate(plan, self.costs, NONE, 0, self.links), self.cap)
        except ValueError:
            return None

    def followed(self, plan: Plan, other: Policy | None) -> tuple[Plan, Result] | None:
        """The order in which ``plan`` ran under another policy, and the result of following that."""
        first = self.run(plan, other or self.policy)
        if first is None:
            return None
        made = Plan(plan.name, plan.shape, tuple(tuple(one.action for one in row) for row in first.ran))
        result = self.run(made, self.policy)
        return None if result is None else (made, result)

    def chosen(self, plan: Plan, best: Plan, other: Policy | None) -> Replanned:
        """The best one in full size, if it is clearly better there."""
        before = self.run(plan, self.policy)
        if before is None:
            raise ValueError(f"order {plan.name} cannot be followed by policy {self.policy.name} within {self.cap:g}")
        found = self.followed(best, other)
        if found is None or found[1].makespan > (1 - LEAST_GAIN) * before.makespan:
            return Replanned(plan, f"{plan.name}, as it was", before.makespan, before.makespan)
        made = replace(found[0], name=f"{plan.name} re-planned")
        source = f"{best.name}, {(other or self.policy).name}"
        return Replanned(made, source, found[1].makespan, before.makespan)


def replanner(plan: Plan, cap: float | None, policy: Policy) -> Callable[[Costs], Plan]:
    """:func:`replan` as a function of the costs alone."""

    def made(costs: Costs) -> Plan:
        return replan(plan, costs, cap, None, policy).plan

    return made


def measured(
    costs: Costs, disturbance: Disturbance, shape: Shape, links: Mapping[Link, float] | None = None
) -> tuple[Costs, dict[Link, float]]:
    """Costs and seconds of messages as stages would measure them: with what is slow for good."""
    factor = [1.0] * shape.stages
    found = dict(links or {})
    unit = unit_of(costs)
    for part in disturbance.parts:
        if isinstance(part, SlowStage):
            factor[part.stage] *= part.factor
        elif isinstance(part, SlowLink):
            everywhere = [(a, b) for a in range(shape.stages) for b in range(shape.stages) if a != b]
            found |= dict.fromkeys(part.links or everywhere, part.transfer * unit)

    def slowed(table: Table) -> Table:
        return tuple(tuple(one * times for one in row) for row, times in zip(table, factor, strict=True))

    return (
        replace(costs, forward=slowed(costs.forward), backward=slowed(costs.backward), wgrad=slowed(costs.wgrad)),
        found,
    )


def _smaller(shape: Shape) -> Shape:
    """As many microbatches as can be compared quickly, and at least as show the steady state."""
    fitting = MOST_ACTIONS // (3 * shape.stages * shape.chunks)
    return replace(shape, microbatches=min(shape.microbatches, max(fitting, 3 * shape.stages)))


def _as_given(plan: Plan) -> Builder:
    """The plan itself, or its first microbatches."""

    def build(shape: Shape, costs: Costs, cap: float) -> Plan:
        del costs, cap
        if shape == plan.shape:
            return plan
        rows = tuple(tuple(action for action in row if action.microbatch < shape.microbatches) for row in plan.actions)
        return Plan(plan.name, shape, rows)

    return build


def _builders(plan: Plan) -> Iterator[Builder]:
    """Candidates of the same kind as a plan."""
    shape, split = plan.shape, plan.split
    for name, order in ORDERS.items():
        if order.placement is not shape.placement or (order.fixed_chunks is not None and order.chunks != shape.chunks):
            continue
        probe = make_plan(name, replace(shape, microbatches=1))
        if probe.split == split:
            yield _named(name)
    if split and shape.placement is Placement.V and shape.chunks == 2:
        yield _filled(lambda of: make_plan("zb-v", of).actions, "zb-v")
        for slopes in SLOPES:
            yield _filled(lambda of, slopes=slopes: repeated_block(of, slopes), f"block {slopes}")


def _named(name: str) -> Builder:
    def build(shape: Shape, costs: Costs, cap: float) -> Plan:
        del cap
        return make_plan(name, shape, costs)

    return build


def _filled(make: Callable[[Shape], Rows], name: str) -> Builder:
    """F and B of an order, with its W's where they fit best under the cap."""

    def build(shape: Shape, costs: Costs, cap: float) -> Plan:
        rows = tuple(tuple(a for a in row if a.work is not Work.W) for row in make(shape))
        microbatch = max(map(sum, costs.activation))
        return Plan(name, shape, fill_wgrads(shape, costs, rows, cap / microbatch))

    return build
