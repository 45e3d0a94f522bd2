"""Hosts that run ahead of their devices: what is decided before its turn costs nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pipeline_ahead import PAYLOAD, Event, Wire, World, run_ahead, seconds_of

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs
from trimtab.pipeline.execute.hooks import NoHooks
from trimtab.pipeline.execute.mail import Mail
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import make_policy
from trimtab.transport.interface import Label
from trimtab.transport.local import local_transports


def costs_of(plan: Plan) -> Costs:
    """As measured on two H200: 7 ms each, and on the first stage a head of 2 ms more in its second chunk."""
    stages = plan.shape.stages

    def table(each: float) -> tuple[tuple[float, float], ...]:
        return ((each, each + 0.0018), *((each, each),) * (stages - 1))

    return Costs(table(0.0072), table(0.0075), table(0.0074), ((0.5, 0.5),) * stages)


def longer(costs: Costs, condition: str) -> Any:
    """Seconds of an action under a condition."""

    def seconds(stage: int, action: Action) -> float:
        share = 0.4 * random.Random(str((stage, action))).random() if condition == "jitter" else 0.0
        if condition == "slow stage" and stage == 1:
            share = 0.3
        return costs.seconds(stage, action) * (1 + share)

    return seconds


@pytest.mark.parametrize("policy", ["hint", "auto"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("condition", ["calm", "jitter", "slow stage", "slow messages"])
def test_at_its_own_memory_a_plan_may_be_left_without_loss_by_a_host_that_runs_ahead(
    policy: str, stages: int, condition: str
) -> None:
    plan = make_plan("zb-v", (stages, 2, 8))
    costs = costs_of(plan)
    more = {"seconds": longer(costs, condition), "latency": 0.005 if condition == "slow messages" else 0.0002}
    static = seconds_of(plan, make_policy("static"), costs, None, **more)
    assert seconds_of(plan, make_policy(policy), costs, stages, **more) <= 1.005 * static


@pytest.mark.parametrize("occupied", [0.0, 0.0072])
def test_a_link_that_is_busy_does_not_make_auto_leave_a_plan_that_runs_on_time(occupied: float) -> None:
    plan = make_plan("zb-v", (2, 2, 8))
    costs = costs_of(plan)
    static = seconds_of(plan, make_policy("static"), costs, None, occupied=occupied)
    assert seconds_of(plan, make_policy("auto"), costs, 2, occupied=occupied, busy=0.9) <= 1.005 * static


def test_with_messages_in_time_for_their_turn_a_host_that_runs_ahead_keeps_to_the_plan() -> None:
    plan = make_plan("zb-v", (2, 2, 8))
    _, ran = run_ahead(plan, make_policy("hint"), costs_of(plan), 2)
    assert ran[0] == list(plan.actions[0])


def test_what_the_device_has_yet_to_make_does_not_wait_for_the_link() -> None:
    world = World(2)
    mail = Mail(0, Wire(world, 0, 1.0, 0.0), NoHooks(), lambda: world.now[0], True)  # type: ignore[arg-type]
    plan = make_plan("1f1b", (2, 1, 4))
    mail.begin(0, plan.shape, True, None)  # type: ignore[arg-type]
    for number in range(3):  # made at 0, 1 and 2 seconds, and a second on its way
        mail.hand_on(Action(Work.F, 0, number), PAYLOAD, Event(world, 0, float(number)).query)
    queues = []
    for world.now[0] in (0.0, 0.5, 1.0, 2.5, 4.0):
        queues.append(mail.longest_queue())
    assert queues == [0, 0, 0, 0, 0]
    for number in range(3):
        mail.hand_on(Action(Work.F, 0, number), PAYLOAD, Event(world, 0, 4.0).query)
    assert mail.longest_queue() == 2


def test_a_link_is_busy_from_when_a_message_can_go() -> None:
    one, other = local_transports(2)
    made = [False]
    one.send(1, Label(False, 0, 0), PAYLOAD)
    one.send(1, Label(False, 0, 1), PAYLOAD, lambda: made[0])
    assert one._estimator._links[1].under_way == 0
    made[0] = True
    one.poll()
    assert len(other.poll()) == 2
    assert one._estimator._links[1].under_way == 0
    assert one.links()[1].samples == 2
    for transport in (one, other):
        transport.close()
