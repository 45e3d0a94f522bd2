"""The simulation: closed forms, the published table, what must hold of every schedule, and what options do."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import check, run

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import POLICIES, Static, make_policy
from trimtab.pipeline.shape import Shape
from trimtab.pipeline.simulate import StuckError, parse, simulate
from trimtab.pipeline.simulate.study import c_max
from trimtab.pipeline.timing import evaluate

SIZES = [(1, 1), (2, 3), (4, 8), (8, 32), (5, 7)]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_1f1b_and_gpipe_have_the_bubble_of_the_closed_form(stages, microbatches):
    for order in ("1f1b", "gpipe"):
        result = run(order, stages=stages, microbatches=microbatches, forward=1.0, backward=2.0, wgrad=1.5)
        assert result.makespan == pytest.approx((microbatches + stages - 1) * 4.5, rel=1e-6)
        assert result.bound == pytest.approx(microbatches * 4.5, rel=1e-6)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 2), (8, 32, 2), (8, 32, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages, microbatches, chunks):
    result = run("interleaved", stages=stages, microbatches=microbatches, chunks=chunks)
    assert result.makespan == pytest.approx(3 * microbatches + 3 * (stages - 1) / chunks, rel=1e-6)
    assert max(result.peak_activation) == pytest.approx(stages + (stages - 1) / chunks)


def test_zb_h1_has_the_bubble_of_the_closed_form():
    result = run("zb-h1", stages=4, microbatches=16)
    assert result.makespan == pytest.approx(16 * 3 + 3, rel=1e-6)
    assert max(result.peak_activation) == 4


@pytest.mark.parametrize(
    ("order", "chunks", "plain", "slow_stage", "half", "one"),
    [
        ("1f1b", 1, 1.254, 1.122, 1.384, 1.541),
        ("zb-h1", 1, 1.087, 1.042, 1.115, 1.270),
        ("interleaved", 2, 1.125, 1.047, 1.144, 1.257),
        ("interleaved", 4, 1.087, 1.026, 1.233, 1.865),
        ("bfc", 2, 1.117, 1.078, 1.126, 1.465),
        ("zb-v", 2, 1.054, 1.015, 1.089, 1.180),
    ],
)
def test_agrees_with_an_independent_simulation(order, chunks, plain, slow_stage, half, one):
    """P=8, m=32, F=B=W, messages of 0.05 F; the order of zb-v there was another one, and somewhat slower."""
    for expected, disturb in ((plain, ()), (slow_stage, "slow-stage=1.5"), (half, "link=0.5"), (one, "link=1.0")):
        result = run(order, chunks=chunks, stages=8, microbatches=32, transfer=0.05, disturb=disturb)
        assert result.ratio == pytest.approx(expected, rel=0.01 if order == "zb-v" else 0.001)


def test_blocking_sends_agree_too():
    result = run("interleaved", stages=8, microbatches=32, transfer=0.05, disturb="link=0.5", blocking=True)
    assert result.ratio == pytest.approx(1.503, abs=0.001)
    assert max(result.blocked) > 0
    assert run("1f1b", transfer=0.0, blocking=True).makespan == run("1f1b", transfer=0.0).makespan


def test_c_max_agrees_too():
    for order, expected in (("interleaved", 0.177), ("bfc", 0.380)):
        plan = make_plan(order, (8, 2, 32))
        assert c_max(plan, make_policy("static"), Costs.uniform(plan.shape)) == pytest.approx(expected, rel=0.02)


def test_c_max_is_where_the_slowdown_is_5_percent():
    plan = make_plan("zb-h1", (4, 1, 8))
    costs = Costs.uniform(plan.shape, forward=2.0, transfer=9.0)
    found = c_max(plan, make_policy("static"), costs)
    limit = 1.05 * simulate(plan, make_policy("static"), replace(costs, transfer=0.0)).makespan
    assert simulate(plan, make_policy("static"), replace(costs, transfer=found)).makespan <= limit
    assert simulate(plan, make_policy("static"), replace(costs, transfer=1.03 * found)).makespan > limit
    assert (
        c_max(make_plan("1f1b", (1, 1, 4)), make_policy("static"), Costs(((1.0,),), ((1.0,),), ((1.0,),), ((1.0,),)))
        == math.inf
    )


@pytest.mark.parametrize("order", list(ORDERS))
def test_static_orders_take_the_time_that_follows_from_the_plan(order):
    plan = make_plan(order, (4, default_chunks(order), 6))
    costs = Costs.uniform(plan.shape, 1.0, 1.25, 0.75, transfer=0.125, latency=0.0625)
    result = simulate(plan, make_policy("static"), costs)
    timing = evaluate(plan, costs)
    assert result.makespan == pytest.approx(timing.makespan, rel=1e-6)
    assert tuple(tuple(one.action for one in row) for row in result.ran) == plan.actions
    assert result.deviations == 0
    assert max(result.peak_activation) == pytest.approx(plan.peak())


@dataclass(frozen=True)
class ByEvents:
    """Static, but for the engine: simulated event by event."""

    name: str = "static"

    def chooser(self, stage):
        return Static().chooser(stage)


DISTURBED = st.lists(
    st.sampled_from(
        [
            "link=0.7",
            "link=1.5@all",
            "link=2@0>1",
            "slow-stage=1.7@0",
            "jitter=0.4",
            "tail=0.1x4",
            "transient=link:3,0.2-0.6",
        ]
    ),
    max_size=3,
    unique=True,
)


CASE = st.fixed_dictionaries(
    {
        "order": st.sampled_from(list(ORDERS)),
        "policy": st.sampled_from(list(POLICIES)),
        "stages": st.integers(2, 5),
        "microbatches": st.integers(1, 9),
        "disturb": DISTURBED,
        "spare": st.sampled_from([None, 0.0, 0.5, 2.0, -100.0]),
        "kept": st.sampled_from([1.0, 0.5, 0.0]),
        "seed": st.integers(0, 3),
        "blocking": st.booleans(),
    }
)


def holds(order, policy, stages, microbatches, disturb, spare, kept, seed, blocking):
    plan = make_plan(order, (stages, default_chunks(order), microbatches))
    costs = Costs.uniform(plan.shape, 1.0, 1.1, 0.8, transfer=0.1, latency=0.02, kept=kept)
    peak = plan.peak(kept)
    cap = None if spare is None else max(1.0, peak + spare)
    if policy == "static" and cap is not None:
        cap = max(cap, peak)
    arguments = (plan, make_policy(policy), costs, parse(disturb, stages), cap, seed)
    result = simulate(*arguments, blocking=blocking)
    check(result, costs)
    again = simulate(*arguments, blocking=blocking)
    assert (again.ran, again.sent, again.makespan) == (result.ran, result.sent, result.makespan)


@settings(max_examples=200, deadline=None)
@given(CASE)
def test_what_holds_of_every_schedule(case):
    holds(**case)


@settings(max_examples=100, deadline=None)
@given(CASE)
def test_orders_that_nothing_changes_need_no_events(case):
    plan = make_plan(case["order"], (case["stages"], default_chunks(case["order"]), case["microbatches"]))
    costs = Costs.uniform(plan.shape, 1.0, 1.1, 0.8, transfer=0.1, latency=0.02, kept=case["kept"])
    disturbance = parse(case["disturb"], case["stages"])
    fast, slow = (
        simulate(plan, policy, costs, disturbance, plan.peak(), case["seed"], blocking=case["blocking"])
        for policy in (Static(), ByEvents())
    )
    assert fast.ran == slow.ran
    assert sorted(fast.sent) == sorted(slow.sent)
    assert fast.blocked == pytest.approx(slow.blocked)
    assert fast.peak_activation == pytest.approx(slow.peak_activation)


@pytest.mark.parametrize(
    "rows",
    [
        (("F", "BW"), ("BW", "F")),
        (("BW", "F"), ("F", "BW")),
        (("F", "W", "B"), ("F", "B", "W")),
    ],
)
def test_plans_that_cannot_run_are_said_to(rows):
    actions = tuple(tuple(Action(Work[work], 0, 0) for work in row) for row in rows)
    plan = Plan("wrong", Shape(2, 1, 1), actions)
    for policy in (Static(), ByEvents()):
        with pytest.raises(StuckError, match="wait for each other"):
            simulate(plan, policy, Costs.uniform(plan.shape))


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(CASE)
def test_what_holds_of_thousands_of_schedules(case):
    holds(**case)


def test_disturbed_work_is_the_same_for_every_order_and_policy():
    disturb = ("jitter=0.3", "tail=0.1x3")
    loads = [
        run(order, policy, chunks=2, disturb=disturb, seed=4).loads
        for order, policy in (("interleaved", "static"), ("bfc", "hint"), ("zb-v", "greedy"), ("dualpipe-v", "static"))
    ]
    assert all(load == pytest.approx(loads[0]) for load in loads)
    other = run("interleaved", chunks=2, disturb=disturb, seed=5).loads
    assert other != pytest.approx(loads[0])


def test_jitter_and_tails_are_of_the_size_asked_for():
    result = run("gpipe", stages=4, microbatches=400, disturb="jitter=0.2")
    took = [end - start for row in result.ran for action, start, end in row if action.work is Work.F]
    mean = sum(took) / len(took)
    assert mean == pytest.approx(1.0, abs=0.02)
    assert math.sqrt(sum((one - mean) ** 2 for one in took) / len(took)) == pytest.approx(0.2, abs=0.02)
    result = run("gpipe", stages=4, microbatches=400, disturb="tail=0.05x3")
    took = [round(end - start, 6) for row in result.ran for action, start, end in row if action.work is Work.F]
    assert set(took) == {1.0, 3.0}
    assert took.count(3.0) / len(took) == pytest.approx(0.05, abs=0.02)


def test_transient_disturbances_hold_for_their_time_only():
    slow = run("gpipe", stages=2, microbatches=10, disturb="transient=slow-stage:3@1,0.5-0.75", transfer=0.1)
    for one in slow.ran[1]:
        usual = 1.0 if one.action.work is Work.F else 2.0
        within = 15 <= one.start < 22.5
        assert one.end - one.start == pytest.approx(usual * (3 if within else 1), rel=1e-6)
    late = run("gpipe", stages=2, microbatches=10, disturb="transient=link:2@0>1,0.1-0.2", transfer=0.1)
    took = {3 <= m.begin < 6: m.arrival - m.begin for m in late.sent if m.source == 0}
    assert took[True] == pytest.approx(2.0, rel=1e-6)
    assert took[False] == pytest.approx(0.1, rel=1e-5)


def test_links_and_latency():
    result = run("1f1b", stages=2, microbatches=2, transfer=0.5, latency=0.25, links={(1, 0): 1.0})
    took = {message.source: message.arrival - message.begin for message in result.sent}
    assert took == pytest.approx({0: 0.75, 1: 1.25}, rel=1e-6)


def test_gradients_are_reduced_one_chunk_after_the_other_beside_the_rest():
    free = run("interleaved", stages=2, microbatches=2)
    synced = run("interleaved", stages=2, microbatches=2, sync=2.0)
    assert synced.makespan == pytest.approx(free.makespan + 2.0, rel=1e-6)
    assert synced.loads == free.loads
    assert run("interleaved", stages=2, microbatches=2, sync=0.0).makespan == free.makespan


def test_windows_of_a_schedule_done_by_hand():
    """Two stages, one microbatch: F0 0-1, F1 1.5-2.5, BW1 2.5-4.5, BW0 5-7."""
    result = run("1f1b", stages=2, microbatches=1, transfer=0.5)
    assert result.makespan == pytest.approx(7.0)
    assert result.windows.pp == pytest.approx(0.5)
    assert result.windows.dp == pytest.approx((0.0 + 2.5) / 2)
    assert result.windows.dp_first == pytest.approx(2.5)
    assert result.idle == pytest.approx((4 / 7, 4 / 7))


def test_deviations_count_what_overtook():
    result = run("1f1b", "hint", stages=4, microbatches=8, transfer=0.05, disturb="link=3")
    assert result.deviations > 0
    assert run("1f1b", "static", stages=4, microbatches=8, disturb="link=3").deviations == 0


def test_breadth_first_widens_the_windows_without_a_slower_iteration():
    wide = run("bfc", stages=8, chunks=4, microbatches=32, transfer=0.05)
    base = run("interleaved", stages=8, chunks=4, microbatches=32, transfer=0.05)
    assert wide.makespan <= base.makespan
    assert wide.windows.pp >= 2.6 * base.windows.pp
    assert wide.windows.dp >= 2.4 * base.windows.dp


class Lazy:
    """A policy that never begins anything."""

    name = "static"

    def chooser(self, stage):
        return self

    def choose(self, now):
        from trimtab.pipeline.policies import Wait

        return Wait(None)

    def began(self, action: Action):
        pass

    def observe(self, signals, now):
        pass


def test_stages_that_wait_for_each_other_are_said_and_not_waited_for():
    plan = make_plan("1f1b", (2, 1, 2))
    with pytest.raises(StuckError, match="stage 0 after 0 actions"):
        simulate(plan, Lazy(), Costs.uniform(plan.shape))


def test_disturbances_of_stages_that_are_not_there_are_refused():
    plan = make_plan("1f1b", (2, 1, 2))
    with pytest.raises(ValueError, match=r"slow-stage=2@5.*pipeline of 2"):
        simulate(plan, make_policy("static"), Costs.uniform(plan.shape), parse(["slow-stage=2@5"], 8))
