"""New plans from measured times, and readings of memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from execute_runs import SEED, Job, alone, gradients, together

from trimtab.config import PipelineConfig
from trimtab.pipeline import Pipeline
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.execute.device_memory import DeviceMemory
from trimtab.pipeline.execute.pace import Times
from trimtab.pipeline.execute.replanning import SPENT, Measured, better, figures_of, measured_of
from trimtab.pipeline.execute.schedule import Schedule
from trimtab.pipeline.execute.settings import plan_of, policy_of
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Chooser, Policy, Stage
from trimtab.pipeline.shape import Shape
from trimtab.pipeline.timing import evaluate
from trimtab.transport.interface import LinkEstimate
from trimtab.transport.local import local_transports

SHAPE = Shape(4, 1, 8)
CONFIG = PipelineConfig(policy="hint", order="zb-h1")


def stage_of(forward: float, backward: float, wgrad: float, **more: Any) -> Measured:
    return Measured({(Work.F, 0): forward, (Work.B, 0): backward, (Work.W, 0): wgrad}, **more)


def test_figures_travel_and_become_costs() -> None:
    stages = [
        stage_of(
            1.0,
            2.0,
            3.0 + number,
            links={(number + 1) % 4: (0.1 * number, 0.5)},
            room=5.0 - number,
            spent=0.01 * number,
        )
        for number in range(4)
    ]
    assert [Measured.unpack(stage.pack()) for stage in stages] == stages
    figures = figures_of(SHAPE, stages)
    assert figures is not None
    costs = figures.costs
    assert costs.wgrad == ((3.0,), (4.0,), (5.0,), (6.0,))
    assert costs.latency == pytest.approx(0.3)
    assert costs.transfer == 0.5
    assert figures.links == {(0, 1): 0.5, (1, 2): 0.5, (2, 3): 0.5, (3, 0): 0.5}
    assert figures.room == 2.0
    assert figures.spent == pytest.approx(0.03)
    assert figures_of(SHAPE, [*stages[:3], Measured({(Work.F, 0): 1.0})]) is None
    whole = figures_of(SHAPE, [*stages[:3], Measured({(Work.F, 0): 1.0, (Work.BW, 0): 3.0})])
    assert whole is not None
    assert (whole.costs.backward[3], whole.costs.wgrad[3]) == ((1.5,), (1.5,))


def test_plans_are_compared_again_when_a_time_has_moved() -> None:
    before = figures_of(SHAPE, [stage_of(1.0, 2.0, 3.0, links={1: (0.0, 0.4)})] * 4)
    assert before is not None
    for now, moved in (
        (stage_of(1.05, 1.95, 3.1, links={1: (0.0, 0.43)}), False),
        (stage_of(1.2, 2.0, 3.0, links={1: (0.0, 0.4)}), True),
        (stage_of(1.0, 2.0, 3.0, links={1: (0.0, 0.5)}), True),
        (stage_of(1.0, 2.0, 3.0, links={1: (0.0, 0.4), 2: (0.0, 0.4)}), True),
        (stage_of(1.0, 2.0, 3.0, links={1: (0.02, 0.4)}), False),  # from nothing to next to nothing
    ):
        figures = figures_of(SHAPE, [now] * 4)
        assert figures is not None
        assert figures.moved(before) is moved, now


def test_links_of_a_stage() -> None:
    links = {0: LinkEstimate(0.1, 1000.0, 0.0, 5), 3: LinkEstimate(0.2, 0.0, 0.0, 0)}
    assert measured_of({}, links, 100.0) == Measured({}, {0: (0.1, 0.1), 3: (0.2, 0.0)})
    assert measured_of({}, {}, 100.0) == Measured({})


def test_only_a_plan_that_is_worth_it_replaces_one() -> None:
    figures = figures_of(SHAPE, [stage_of(1.0, 1.0, 3.0, links={1: (0.0, 0.5)}, room=5.0)] * 4)
    assert figures is not None
    policy = policy_of(CONFIG)
    slow = Plan("slow", SHAPE, tuple(_serial()))
    found = better(slow, figures, policy)
    assert found is not None
    assert evaluate(found[0], figures.costs).makespan < 0.99 * evaluate(slow, figures.costs).makespan
    assert max(found[0].peaks()) <= 5.0
    assert "instead of" in found[1]
    assert better(found[0], figures, policy) is None


def _serial() -> list[tuple[Action, ...]]:
    row = tuple(Action(work, 0, m) for m in range(8) for work in (Work.F, Work.B, Work.W))
    return [row] * 4


def test_times_become_costs_once_all_are_known() -> None:
    times = Times()
    shape = Shape(2, 2, 4)
    for chunk in range(2):
        times.add(Action(Work.F, chunk, 0), 1.0)
        times.add(Action(Work.B, chunk, 0), 2.0)
    assert times.costs(shape) is None
    for chunk in range(2):
        times.add(Action(Work.W, chunk, 0), 3.0)
        times.add(Action(Work.W, chunk, 1), 7.0)
    costs = times.costs(shape)
    assert costs is not None
    assert costs.seconds(1, Action(Work.W, 1, 0)) == 4.0  # a running mean
    assert times.take()[Work.W, 0] == 5.0  # a plain one
    assert times.take() == {}
    whole = Times()
    for chunk in range(2):
        whole.add(Action(Work.F, chunk, 0), 1.0)
        whole.add(Action(Work.BW, chunk, 0), 5.0)
    costs = whole.costs(shape)
    assert costs is not None
    assert costs.seconds(0, Action(Work.BW, 0, 0)) == 5.0


class Rendezvous:
    """An all-gather between threads."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.said: dict[int, bytes] = {}
        self.rounds = 0

    def of(self, rank: int) -> Any:
        def exchange(mine: bytes) -> list[bytes]:
            self.said[rank] = mine
            self.barrier.wait(30.0)
            everybody = [self.said[number] for number in sorted(self.said)]
            self.barrier.wait(30.0)
            self.rounds += rank == 0
            return everybody

        return exchange


class Told:
    """A policy that tells others what it decides, as the leader of a group does."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.iterations = 0

    def chooser(self, stage: Stage) -> Chooser:
        self.iterations += 1
        return self.policy.chooser(stage)


def test_stages_change_their_plans_together_and_gradients_stay() -> None:
    """All say that W and messages take long. Looking for a plan, no leader tells anybody anything."""
    job = Job(PipelineConfig(policy="hint", order="zb-h2"), 2, steps=12, microbatches=6)
    parts, transports, meeting = job.parts(), local_transports(2), Rendezvous(2)
    inputs, targets = job.data()
    plans: list[list[Plan]] = [[], []]

    def stage(number: int) -> None:
        with Pipeline([parts[number]], job.loss, job.config, transport=transports[number], seed=SEED) as pipeline:
            schedule = Schedule(job.config, number, 2, 1, exchange=lying(meeting.of(number)))
            pipeline._schedule = schedule
            told = schedule.policy = Told(schedule.policy)
            for _ in range(job.steps):
                pipeline.step(inputs, targets)
            assert told.iterations == job.steps
            plans[number].append(schedule._better.get(6, schedule.plan(6)))

    def lying(exchange: Any) -> Any:
        def told(mine: bytes) -> list[bytes]:
            del mine
            return exchange(stage_of(1.0, 1.0, 4.0, links={0: (3.0, 0.0)}).pack())

        return told

    together([lambda number=number: stage(number) for number in range(2)])
    assert meeting.rounds == 1
    assert plans[0] == plans[1]
    assert plans[0][0].actions != plan_of(job.config, plans[0][0].shape).actions
    expected = alone(job)
    for mine, theirs in zip(gradients(parts), expected.gradients, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a is not None
            assert b is not None
            assert a.equal(b)


def test_memory_of_a_device_since_the_iteration_began() -> None:
    now = [100]
    memory = DeviceMemory(50.0, lambda: now[0])
    memory.iteration_begins(0, False)
    now[0] = 130
    assert memory() == (30.0, 50.0)
    now[0] = 90
    assert memory() == (0.0, 50.0)


class Stand:
    """An executor that has measured something."""

    def __init__(self) -> None:
        self.forward = 1.0

    def measured(self) -> Measured:
        return stage_of(self.forward, 1.0, 3.0, links={1: (0.0, 0.5)})


def test_looking_for_plans_takes_no_more_than_a_small_share_of_the_time() -> None:
    now, told, executor = [0.0], list[Measured](), Stand()

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    def exchange(mine: bytes) -> list[bytes]:
        told.append(Measured.unpack(mine))
        return [mine] * 4

    schedule = Schedule(CONFIG, 0, 4, 1, exchange=exchange, clock=clock)
    plan = schedule.plan(8)
    looked: list[bool] = []
    for later, forward in ((0.0, 1.0), (0.0, 2.0), (1000.0, 3.0), (0.0, 4.0), (0.0, 4.0)):
        now[0] += later
        executor.forward = forward
        before = schedule._figures.get(8)
        schedule._replan(executor, plan, 5.0)  # pyright: ignore[reportArgumentType]
        looked.append(schedule._figures.get(8) is not before)
    assert looked == [True, False, True, True, False]  # free; too soon; after a while; still within; nothing has moved
    assert [measured.spent > SPENT for measured in told] == [False, True, False, False, False]
