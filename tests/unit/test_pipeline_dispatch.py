from __future__ import annotations

import pytest

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.dispatch import Dispatcher, Wait
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Greedy, Hint, Static
from trimtab.pipeline.shape import Placement, Shape

F, B, W, BW = Work.F, Work.B, Work.W, Work.BW
WAIT = Wait(None)


def plan_of(*rows: str, chunks: int = 1, placement: Placement = Placement.LOOP) -> Plan:
    """A plan from rows such as ``F0.0 B0.0 W0.0``."""

    def action(word: str) -> Action:
        work = word.rstrip("0123456789.")
        chunk, microbatch = word[len(work) :].split(".")
        return Action(Work[work], int(chunk), int(microbatch))

    actions = tuple(tuple(map(action, row.split())) for row in rows)
    microbatches = 1 + max(action.microbatch for row in actions for action in row)
    return Plan("test", Shape(len(rows), chunks, microbatches, placement), actions)


def test_the_first_stage_needs_nothing_for_f_and_a_gradient_for_bw():
    stage = Dispatcher(make_plan("1f1b", (2, 1, 2)), 0, Static())
    for action in (Action(F, 0, 0), Action(F, 0, 1)):
        assert stage.next(0.0) == action
        stage.finished(action, 1.0)
    assert stage.next(2.0) == WAIT
    for microbatch in (0, 1):
        stage.arrived(Action(BW, 0, microbatch))
        assert stage.next(3.0) == Action(BW, 0, microbatch)
        assert not stage.done
        stage.finished(Action(BW, 0, microbatch), 4.0)
    assert stage.next(5.0) is None
    assert stage.done


def test_the_last_stage_needs_its_own_forward_to_have_finished():
    stage = Dispatcher(make_plan("1f1b", (2, 1, 1)), 1, Static())
    assert stage.next(0.0) == WAIT
    stage.arrived(Action(F, 0, 0))
    assert stage.next(0.0) == Action(F, 0, 0)
    assert stage.next(0.5) == WAIT
    stage.finished(Action(F, 0, 0), 1.0)
    assert stage.next(1.0) == Action(BW, 0, 0)


def test_turning_points_of_a_v_stay_on_the_stage():
    plan = plan_of(
        "F0.0 F1.0 BW1.0 BW0.0",
        "F0.0 F1.0 BW1.0 BW0.0",
        chunks=2,
        placement=Placement.V,
    )
    last = Dispatcher(plan, 1, Static())
    last.arrived(Action(F, 0, 0))
    for action in (Action(F, 0, 0), Action(F, 1, 0)):
        assert last.next(0.0) == action
        last.finished(action, 1.0)
    assert last.next(1.0) == WAIT
    last.arrived(Action(BW, 1, 0))
    for action in (Action(BW, 1, 0), Action(BW, 0, 0)):
        assert last.next(2.0) == action
        last.finished(action, 3.0)
    assert last.done


def test_one_stage_alone_needs_nothing_from_elsewhere():
    for policy in (Static(), Hint(), Greedy()):
        plan = make_plan("interleaved", (1, 3, 2))
        stage = Dispatcher(plan, 0, policy)
        done: list[Action] = []
        while (action := stage.next(float(len(done)))) is not None:
            assert isinstance(action, Action)
            stage.finished(action, len(done) + 0.5)
            done.append(action)
        assert sorted(done) == sorted(plan.actions[0])


@pytest.mark.parametrize(
    "action", [Action(W, 0, 0), Action(F, 1, 0), Action(F, 0, 2), Action(F, 0, -1), Action(F, -1, 0)]
)
def test_what_takes_nothing_from_elsewhere_neither_arrives_nor_is_announced(action: Action):
    stage = Dispatcher(make_plan("1f1b", (2, 1, 2)), 1, Static())
    with pytest.raises(ValueError, match="stage 1"):
        stage.arrived(action)
    with pytest.raises(ValueError, match="stage 1"):
        stage.announced(action, 1.0)


def test_nothing_arrives_twice():
    stage = Dispatcher(make_plan("1f1b", (2, 1, 2)), 1, Static())
    stage.arrived(Action(F, 0, 1))
    with pytest.raises(ValueError, match=r"stage 1: what F0.1 takes is here already"):
        stage.arrived(Action(F, 0, 1))


def test_messages_that_overtake_each_other_are_taken_in_microbatch_order():
    stage = Dispatcher(make_plan("gpipe", (2, 1, 3)), 1, Greedy())
    stage.arrived(Action(F, 0, 2))
    stage.arrived(Action(F, 0, 1))
    assert stage.next(0.0) == WAIT
    stage.arrived(Action(F, 0, 0))
    assert stage.next(0.0) == Action(F, 0, 0)


def test_an_order_that_mixes_microbatches_runs_as_it_stands_and_only_statically():
    plan = plan_of("F0.1 F0.0 BW0.0 BW0.1", "F0.1 F0.0 BW0.0 BW0.1")
    stage = Dispatcher(plan, 1, Static())
    stage.arrived(Action(F, 0, 1))
    assert stage.next(0.0) == Action(F, 0, 1)
    with pytest.raises(ValueError, match="only policy static"):
        Dispatcher(plan, 1, Hint())


def test_a_bw_waits_for_the_w_before_it_that_adds_to_the_same_gradients():
    plan = plan_of("F0.0 F0.1 B0.0 W0.0 BW0.1")
    for policy in (Hint(), Greedy()):
        stage = Dispatcher(plan, 0, policy)
        done: list[str] = []
        while (action := stage.next(0.0)) is not None:
            assert isinstance(action, Action)
            stage.finished(action, 0.0)
            done.append(str(action))
        assert done.index("W0.0") < done.index("BW0.1")


def test_forwards_alone_hold_nothing():
    row = tuple(Action(F, 0, microbatch) for microbatch in range(4))
    plan = Plan("forward", Shape(2, 1, 4), (row, row))
    for policy in (Static(), Hint(), Greedy()):
        stage = Dispatcher(plan, 1, policy, MemoryGuard(1, [1]))
        for action in row:
            stage.arrived(action)
            assert stage.next(0.0) == action
            stage.finished(action, 0.0)
        assert stage.done
        assert stage.guard.peak == 0


def test_memory_and_the_order_are_kept():
    plan = make_plan("gpipe", (2, 1, 3))
    log = DecisionLog()
    stage = Dispatcher(plan, 0, Static(), costs=Costs.uniform(plan.shape, activation=8.0), log=log)
    for action in plan.actions[0]:
        if action.work is BW:
            stage.arrived(action)
        assert stage.next(0.0) == action
        stage.finished(action, 0.0)
    assert (stage.guard.peak, stage.guard.used) == (24, 0)
    assert log.orders == {0: list(plan.actions[0])}


def test_a_guard_serves_one_iteration_after_the_other():
    plan = make_plan("gpipe", (1, 1, 2))
    guard = MemoryGuard(2, [1])
    for _ in range(2):
        stage = Dispatcher(plan, 0, Static(), guard)
        for action in plan.actions[0]:
            assert stage.next(0.0) == action
            stage.finished(action, 0.0)
    assert guard.peak == 2
