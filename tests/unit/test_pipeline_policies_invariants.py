"""Whatever is late, however little memory there is: no policy hangs, repeats an action or exceeds the cap."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_loop import Run, run

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.dispatch import Signals
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan, placement_of
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Policy, Replay, make_policy
from trimtab.pipeline.shape import Placement, Shape

DYNAMIC = ("hint", "greedy", "auto")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of any order, small."""
    name = draw(st.sampled_from(list(ORDERS)))
    chunks = default_chunks(name)
    if ORDERS[name].fixed_chunks is None:
        chunks = draw(st.sampled_from([2, 4] if placement_of(name) is Placement.V else [1, 2, 3]))
    shape = Shape(draw(st.integers(1, 5)), chunks, draw(st.integers(1, 7)), placement_of(name))
    return make_plan(name, shape)


@st.composite
def costs_of(draw: st.DrawFn, shape: Shape) -> Costs:
    """Any times and sizes, zero among them."""
    times = st.sampled_from([0.0, 0.001, 0.5, 1.0, 3.0])
    sizes = st.sampled_from([0.1, 1 / 3, 0.5, 1.0])

    def table(values: st.SearchStrategy[float]) -> tuple[tuple[float, ...], ...]:
        row = st.tuples(*[values] * shape.chunks)
        return draw(st.tuples(*[row] * shape.stages))

    kept = draw(st.sampled_from([0.0, 0.3, 1.0]))
    return Costs(table(times), table(times), table(times), table(sizes), kept, draw(times), draw(times))


class Adversary:
    """Delays of any length, in any order: messages overtake each other, and what was announced comes late or early."""

    def __init__(self, seed: int, costs: Costs) -> None:
        self._random, self._costs = random.Random(seed), costs

    def compute(self, stage: int, action: Action, now: float) -> float:
        """Seconds of an action."""
        return self._costs.seconds(stage, action) * self._random.choice((0.1, 1, 1, 10))

    def extra(self, source: int, to: int) -> float:
        """Seconds beyond a link's own."""
        return self._random.choice((0.0, 0.0, 0.3, 1.0, 30.0))

    def observe(self, stage: int, guard: MemoryGuard) -> Signals:
        """Readings that have nothing to do with what is the case."""
        return Signals(self._random.choice((0.0, 0.5, 0.97, 1.0, 2.0)), 1.0, self._random.random(), 0)


def played(plan: Plan, policy: Policy, costs: Costs, seed: int, cap: float | None, announce: bool = True) -> Run:
    adversary = Adversary(seed, costs)
    result = run(
        plan,
        policy,
        costs,
        cap=cap,
        compute=adversary.compute,
        extra=adversary.extra,
        announce=announce,
        observe=adversary.observe,
    )
    for done, planned in zip(result.orders, plan.actions, strict=True):
        assert sorted(done) == sorted(planned)
    if cap is not None:
        assert max(result.peaks) <= cap * (1 + 1e-6)
    return result


def sums_in_order(orders: list[list[Action]]) -> bool:
    """Whether each chunk's gradients are added up in microbatch order."""
    for row in orders:
        for kinds in ((Work.F,), (Work.B, Work.BW), (Work.W, Work.BW)):
            for chunk in {action.chunk for action in row}:
                microbatches = [a.microbatch for a in row if a.chunk == chunk and a.work in kinds]
                if microbatches != sorted(microbatches):
                    return False
    return True


def never_stuck(data: st.DataObject) -> None:
    plan = data.draw(plans())
    costs = data.draw(costs_of(plan.shape))
    seed = data.draw(st.integers(0, 2**32))
    whole = max(map(sum, costs.activation))
    policy = make_policy(data.draw(st.sampled_from(DYNAMIC)))
    cap = data.draw(st.sampled_from([None, 1.0, 1.3, 2.0, 4.0]))
    result = played(plan, policy, costs, seed, cap and cap * whole, data.draw(st.booleans()))
    assert sums_in_order(result.orders)
    recorded = Replay({stage: tuple(order) for stage, order in result.log.orders.items()})
    again = played(plan, recorded, costs, seed + 1, cap and cap * whole)
    assert again.orders == result.orders
    assert again.peaks == pytest.approx(result.peaks)


def static_is_the_plan(data: st.DataObject) -> None:
    plan = data.draw(plans())
    costs = data.draw(costs_of(plan.shape))
    result = played(plan, make_policy("static"), costs, data.draw(st.integers(0, 2**32)), None)
    assert result.orders == [list(row) for row in plan.actions]
    least = max(result.peaks)
    assert played(plan, make_policy("static"), costs, 0, least).peaks == pytest.approx(result.peaks)


def everyday(number: int) -> Callable[[Callable[[st.DataObject], None]], Callable[[st.DataObject], None]]:
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@everyday(150)
@given(st.data())
def test_no_policy_is_ever_stuck(data: st.DataObject):
    never_stuck(data)


@everyday(100)
@given(st.data())
def test_static_is_the_plan_whatever_is_late(data: st.DataObject):
    static_is_the_plan(data)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@everyday(5000)
@given(st.data())
def test_no_policy_is_ever_stuck_thousands(data: st.DataObject):
    never_stuck(data)
