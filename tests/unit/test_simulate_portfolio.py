"""Plans for lasting conditions: complete, within the cap, never worse, and better where links are slow."""

import importlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan
from trimtab.pipeline.policies import Auto, Static, make_policy
from trimtab.pipeline.simulate import parse, portfolio, simulate
from trimtab.pipeline.simulate.portfolio import measured, replan, replanner
from trimtab.pipeline.simulate.study import c_max

SLOW = {(1, 2): 1.0, (2, 1): 1.0}


def case(order="zb-v", stages=4, microbatches=8, transfer=0.05):
    plan = make_plan(order, (stages, default_chunks(order), microbatches))
    return plan, Costs.uniform(plan.shape, transfer=transfer)


def test_a_slow_link_is_planned_for():
    plan, costs = case()
    found = replan(plan, costs, 5.5, SLOW)
    assert found.gain > 0.01
    assert found.plan.name == "zb-v re-planned"
    again = simulate(found.plan, Auto(), costs, cap=5.5, links=SLOW)
    assert again.makespan == found.makespan
    assert found.before == simulate(plan, Auto(), costs, cap=5.5, links=SLOW).makespan
    assert max(again.peak_activation) <= 5.5


def test_a_calm_pipeline_keeps_its_plan():
    plan, costs = case("zb-v", 4, 8)
    found = replan(plan, costs, plan.peak())
    assert found.plan is plan
    assert found.makespan == found.before
    assert found.source == "zb-v, as it was"


@settings(max_examples=12, deadline=None)
@given(
    order=st.sampled_from(list(ORDERS)),
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 7),
    transfer=st.sampled_from([0.0, 0.1, 0.6]),
    slow=st.sampled_from([1.0, 1.5]),
    spare=st.sampled_from([None, 0.0, 1.0]),
)
def test_what_holds_of_every_new_plan(order, stages, microbatches, transfer, slow, spare):
    plan, costs = case(order, stages, microbatches, transfer)
    costs, links = measured(costs, parse([f"slow-stage={slow}@0"], stages), plan.shape)
    cap = None if spare is None else plan.peak() + spare
    found = replan(plan, costs, cap, links)
    assert found.makespan <= found.before
    found.plan.validate()
    assert found.plan.in_order
    assert (found.plan.shape, found.plan.split) == (plan.shape, plan.split)
    result = simulate(found.plan, Auto(), costs, cap=plan.peak() if cap is None else cap, links=links)
    assert result.makespan == found.makespan
    assert replan(plan, costs, cap, links) == found


def test_large_iterations_are_compared_with_fewer_microbatches_and_planned_whole(monkeypatch):
    plan, costs = case("zb-h1", 2, 40, 0.3)
    exact = replan(plan, costs)
    monkeypatch.setattr(portfolio, "MOST_ACTIONS", 60)
    found = replan(plan, costs)
    found.plan.validate()
    assert found.plan.shape.microbatches == 40
    assert found.makespan <= found.before
    assert found.makespan == pytest.approx(exact.makespan, rel=0.02)


def test_bytes_are_as_good_as_microbatches():
    plan, costs = case()
    in_bytes = replace(costs, activation=tuple(tuple(1e9 * a for a in row) for row in costs.activation))
    assert replan(plan, in_bytes, 5.5e9, SLOW).plan == replan(plan, costs, 5.5, SLOW).plan


def test_twice_the_transfer_time_of_interleaved_is_borne_in_the_same_memory():
    """With at most 5 % slowdown; the memory is what interleaved needs."""
    base, costs = case("interleaved")
    usual = c_max(base, Static(), costs)
    plan, _ = case()
    planner = replanner(plan, base.peak(), Auto())

    def makespan(transfer):
        moved = Costs.uniform(plan.shape, transfer=transfer)
        return simulate(planner(moved), Auto(), moved, cap=base.peak()).makespan

    assert makespan(2 * usual) <= 1.05 * makespan(0.0)


def test_what_is_measured_is_what_lasts():
    plan, costs = case("1f1b", 4, 8)
    disturbance = parse(["slow-stage=2@1", "link=0.5@0>1", "jitter=0.3", "transient=link:4"], 4)
    found, links = measured(costs, disturbance, plan.shape, {(2, 3): 0.2})
    assert [row[0] for row in found.forward] == [1.0, 2.0, 1.0, 1.0]
    assert links == {(0, 1): 0.5, (2, 3): 0.2}
    _, everywhere = measured(costs, parse(["link=0.5@all"], 4), plan.shape)
    assert len(everywhere) == 12


def test_a_cap_that_the_policy_cannot_follow_is_said():
    plan, costs = case("gpipe", 2, 4)
    with pytest.raises(ValueError, match=r"gpipe cannot be followed by policy static within 2"):
        replan(plan, costs, 2.0, policy=make_policy("static"))


def test_the_benchmark_plans_anew_for_what_lasts_and_not_for_what_it_cannot_know():
    bench = importlib.import_module("pipeline_simulated")
    anew = bench.Case("zb-v", "auto", 2, 0.5, replan=True)
    plain = replace(anew, replan=False)
    assert bench.run(anew, 4, 8, "link=1.0").ratio < bench.run(plain, 4, 8, "link=1.0").ratio
    assert bench.run(anew, 4, 8, "transient=link:4").plan == bench.replanned(anew, 4, 8, "")
    assert {case.policy for case in bench.cases()} == {"static", "hint", "greedy", "auto"}
    assert str(anew) == "zb-v, auto re-planned, +0.5"
