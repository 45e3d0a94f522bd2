from __future__ import annotations

import pytest
from pipeline_loop import run
from test_pipeline_dispatch import WAIT, plan_of

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.dispatch import Dispatcher, Wait
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Auto, Greedy, Hint, Policy, Replay, Static, make_policy

F, B, W, BW = Work.F, Work.B, Work.W, Work.BW


def alone(plan: Plan, stage: int, policy: Policy, guard: MemoryGuard | None = None) -> list[Action]:
    """What a stage does whose inputs are all there before they are needed."""
    dispatcher = Dispatcher(plan, stage, policy, guard)
    for action in plan.actions[stage]:
        side = plan.shape.before if action.work is F else plan.shape.after
        place = side(stage, action.chunk)
        if action.work is not W and place is not None and place.stage != stage:
            dispatcher.arrived(action)
    done: list[Action] = []
    while (action := dispatcher.next(float(len(done)))) is not None:
        assert isinstance(action, Action)
        dispatcher.finished(action, len(done) + 1.0)
        done.append(action)
    return done


@pytest.mark.parametrize("name", list(ORDERS))
@pytest.mark.parametrize("policy", [Static(), Hint()], ids=str)
def test_with_inputs_on_time_it_is_the_plan_under_a_cap_as_small_as_it_needs(name: str, policy: Policy):
    plan = make_plan(name, (4, default_chunks(name), 6))
    chunks = plan.shape.chunks
    for stage, row in enumerate(plan.actions):
        need = MemoryGuard(None, [1 / chunks] * chunks).need(row)
        assert alone(plan, stage, policy, MemoryGuard(need, [1 / chunks] * chunks)) == list(row)


def test_without_deviation_hint_is_static_whatever_is_late():
    plan = make_plan("interleaved", (4, 2, 8))
    costs = Costs.uniform(plan.shape, transfer=0.4)

    def late(stage: int, action: Action, now: float) -> float:
        del now
        return 0.5 + (stage * 7 + action.microbatch * 3) % 5

    static, hint = (run(plan, policy, costs, compute=late) for policy in (Static(), Hint(lookahead=1)))
    assert hint.orders == static.orders
    assert hint.makespan == static.makespan


PLAN = plan_of("F0.0 F0.1 F0.2 B0.0 W0.0 F0.3 B0.1 W0.1 B0.2 W0.2 B0.3 W0.3", *["F0.0 B0.0 W0.0"])
COSTS = Costs.uniform(PLAN.shape, forward=1.0, backward=2.0, wgrad=4.0)


def started(*actions: Action, policy: Policy | None = None) -> Dispatcher:
    """Stage 0 of PLAN after these."""
    stage = Dispatcher(PLAN, 0, policy or Hint(), MemoryGuard(None, [1.0]), COSTS)
    for action in actions:
        assert stage.next(0.0) == action
        stage.finished(action, 0.0)
    return stage


FIRST = tuple(Action(F, 0, microbatch) for microbatch in range(3))


def test_where_a_gradient_is_late_the_next_that_can_begin_is_run():
    assert started(*FIRST).next(0.0) == Action(F, 0, 3)


def test_the_alternative_is_looked_for_so_many_actions_ahead():
    assert started(*FIRST, policy=Hint(lookahead=3)).next(0.0) == Action(F, 0, 3)
    assert started(*FIRST, policy=Hint(lookahead=2)).next(0.0) == WAIT


def test_a_forward_ahead_of_the_plan_leaves_room_for_a_microbatch():
    plan = plan_of("F0.0 F0.1 B0.0 B0.1 F0.2 W0.0 W0.1 B0.2 W0.2", *["F0.0 B0.0 W0.0"])
    for cap, other in ((3, Action(W, 0, 0)), (4, Action(F, 0, 2))):
        stage = Dispatcher(plan, 0, Hint(), MemoryGuard(cap, [1.0]))
        stage.arrived(Action(B, 0, 0))
        for action in (Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0)):
            assert stage.next(0.0) == action
            stage.finished(action, 0.0)
        assert stage.next(0.0) == other


def test_a_cap_below_the_plan_is_kept_by_leaving_the_plan():
    plan = make_plan("gpipe", (2, 1, 6))
    costs = Costs.uniform(plan.shape)
    for policy in (Hint(), Greedy(), make_policy("auto")):
        result = run(plan, policy, costs, cap=2.0)
        assert max(result.peaks) == 2


def test_an_input_expected_soon_is_waited_for_and_not_longer_than_that():
    stage = started(*FIRST)
    stage.announced(Action(B, 0, 0), 10.4)
    assert stage.next(10.0) == Wait(10.5)  # half of the second that F takes
    assert stage.next(10.2) == Wait(10.5)
    assert stage.next(10.5) == Action(F, 0, 3)


@pytest.mark.parametrize("policy", [Hint(), Hint(theta=0), Auto()])
def test_while_the_device_has_work_a_late_input_is_waited_for(policy: Policy):
    stage = started(*FIRST, policy=policy)
    assert stage.next(1.0, 3.0) == Wait(3.0)
    assert stage.next(2.0, 2.5) == Wait(2.5)
    stage.arrived(Action(B, 0, 0))
    assert stage.next(2.2, 2.5) == Action(B, 0, 0)


def test_an_input_expected_late_is_not_waited_for():
    stage = started(*FIRST)
    stage.announced(Action(B, 0, 0), 10.6)
    assert stage.next(10.0) == Action(F, 0, 3)


def test_without_theta_nothing_is_waited_for():
    stage = started(*FIRST, policy=Hint(theta=0.0))
    stage.announced(Action(B, 0, 0), 10.0)
    assert stage.next(10.0) == Action(F, 0, 3)


def test_any_w_is_filler():
    stage = started(*FIRST, policy=Hint(lookahead=1))
    stage.arrived(Action(B, 0, 0))
    for action in (Action(B, 0, 0), Action(W, 0, 0), Action(F, 0, 3)):
        assert stage.next(0.0) == action
        stage.finished(action, 0.0)
    assert stage.next(0.0) == WAIT
    stage.arrived(Action(B, 0, 1))
    assert stage.next(0.0) == Action(B, 0, 1)
    stage.finished(Action(B, 0, 1), 0.0)
    assert stage.next(0.0) == Action(W, 0, 1)


def test_where_times_are_not_given_they_are_measured():
    stage = Dispatcher(PLAN, 0, Hint())
    for number, action in enumerate(FIRST):
        assert stage.next(10.0 * number) == action
        stage.finished(action, 10.0 * number + 6.0)
    stage.announced(Action(B, 0, 0), 32.9)
    assert stage.next(30.0) == Wait(33.0)


def test_greedy_takes_the_oldest_backward_then_a_forward_then_a_w():
    stage = started(*FIRST[:2], policy=Greedy())
    stage.arrived(Action(B, 0, 0))
    for action in (Action(B, 0, 0), Action(F, 0, 2), Action(F, 0, 3), Action(W, 0, 0)):
        assert stage.next(0.0) == action
        stage.finished(action, 0.0)


def test_greedy_prefers_the_older_microbatch_to_the_chunk():
    plan = plan_of("F0.0 F0.1 F1.0 F1.1 BW1.0 BW0.0 BW1.1 BW0.1", *["F0.0 F1.0 BW1.0 BW0.0"], chunks=2)
    stage = Dispatcher(plan, 0, Greedy())
    for action in (Action(F, 0, 0), Action(F, 0, 1)):
        assert stage.next(0.0) == action
        stage.finished(action, 0.0)
    stage.arrived(Action(F, 1, 0))
    stage.arrived(Action(BW, 0, 0))
    assert stage.next(0.0) == Action(BW, 0, 0)
    assert stage.next(0.0) == Action(F, 1, 0)


def test_a_plan_without_w_is_run_without_w():
    for policy in (Hint(), Greedy(), make_policy("auto")):
        plan = make_plan("interleaved", (3, 2, 4))
        result = run(plan, policy, Costs.uniform(plan.shape))
        assert {action.work for row in result.orders for action in row} == {F, BW}


def test_static_says_before_it_runs_that_its_order_needs_more():
    plan = make_plan("gpipe", (2, 1, 4))
    with pytest.raises(ValueError, match=r"order gpipe needs 4 .* cap is 3: .*policy hint"):
        Dispatcher(plan, 0, Static(), MemoryGuard(3, [1]))


def test_replay_wants_the_actions_of_the_plan():
    plan = make_plan("1f1b", (2, 1, 2))
    row = plan.actions[0]
    for order, says in (
        (None, "nothing is recorded of stage 0"),
        (row[:-1], "other actions"),
        ((*row[:-1], row[0]), "other actions"),
        ((*row[:-1], Action(B, 0, 1)), "other actions"),
    ):
        with pytest.raises(ValueError, match=says):
            Dispatcher(plan, 0, Replay({} if order is None else {0: order}))


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("fifo", {}, "no policy 'fifo': choose one of static, hint, greedy, auto"),
        ("static", {"theta": 1}, "policy static has no settings theta"),
        ("hint", {"theta": -1}, "theta"),
        ("hint", {"theta": float("nan")}, "theta"),
        ("hint", {"lookahead": 0}, "lookahead"),
        ("auto", {"lookahead": 0}, "lookahead"),
        ("auto", {"tight": 0.5, "relaxed": 0.9}, "relaxed"),
        ("auto", {"saturated": 0.2}, "quiet"),
    ],
)
def test_impossible_settings(name: str, settings: dict[str, float], says: str):
    with pytest.raises(ValueError, match=says):
        make_policy(name, **settings)
