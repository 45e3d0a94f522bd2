"""One rank decides for a group: followers run what the leader runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from control_wires import LIMITS, SECRET, HandClock, running_hub
from execute_runs import Job, together

from trimtab.config import PipelineConfig
from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import NoReply
from trimtab.control.messages import Message
from trimtab.pipeline import Pipeline, positions
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.decisions import DecisionLog
from trimtab.pipeline.dispatch import Dispatcher, Wait
from trimtab.pipeline.execute.hooks import NoHooks
from trimtab.pipeline.execute.leader import Leading, Led, pack_decisions, unpack_decisions
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import Greedy, Hint, Policy, Replay, Static
from trimtab.transport.errors import TransportError
from trimtab.transport.local import local_transports

LEADER = "pipeline.s1.t0"
GROUP = "pipeline.s1"
PLAN = make_plan("zb-h1", (3, 1, 5))
STAGE = 1


class Wires:
    """Endpoints without a hub between them; some messages are lost."""

    def __init__(self, lost: Callable[[], bool] = lambda: False) -> None:
        self.lost = lost
        self.published = 0
        self.alive = True
        self.handlers: list[Callable[[Message], None]] = []
        self.answers: dict[str, Callable[[Message], bytes]] = {}

    def publish(self, subject: str, body: bytes) -> None:
        self.published += 1
        if not self.lost():
            for handler in self.handlers:
                handler(Message(subject, LEADER, body))

    def subscribe(self, subject: str, handler: Callable[[Message], None]) -> None:
        self.handlers.append(handler)

    def request(self, to: str, subject: str, body: bytes = b"", timeout: float = 5.0) -> Future[bytes]:
        assert to == LEADER
        asked: Future[bytes] = Future()
        if self.alive:
            asked.set_result(self.answers[subject](Message(subject, "follower", body)))
        else:
            asked.set_exception(NoReply("no such endpoint"))
        return asked

    def answer(self, subject: str, handler: Callable[[Message], bytes]) -> None:
        self.answers[subject] = handler


def arrivals(seed: int) -> list[Action]:
    """What comes from the neighbours of the middle stage, in some order."""
    coming = [Action(work, 0, m) for work in (Work.F, Work.B) for m in range(PLAN.shape.microbatches)]
    random.Random(seed).shuffle(coming)
    return coming


def run_through(dispatcher: Dispatcher, coming: Iterator[Action], tick: Callable[[], float]) -> None:
    """One iteration; inputs come when there is nothing else to do."""
    while (choice := dispatcher.next(tick())) is not None:
        if isinstance(choice, Wait):
            action = next(coming, None)
            if action is not None:
                dispatcher.arrived(action)
        else:
            dispatcher.finished(choice, tick())


def order_of(policy: Policy, coming: list[Action], tick: Callable[[], float] = lambda: 0.0) -> list[Action]:
    log = DecisionLog()
    run_through(Dispatcher(PLAN, STAGE, policy, log=log), iter(coming), tick)
    return log.orders[STAGE]


def ticking(clock: HandClock) -> Callable[[], float]:
    def tick() -> float:
        clock.now += 0.1
        return clock.now

    return tick


@pytest.mark.parametrize(
    "policy", [Static(), Hint(), Greedy(), Replay({STAGE: PLAN.actions[STAGE]})], ids=lambda p: p.name
)
@pytest.mark.parametrize("seed", range(3))
def test_followers_run_what_the_leader_runs_whatever_comes_first_to_them(policy: Policy, seed: int) -> None:
    wires = Wires()
    leading = Leading(policy, wires, GROUP)
    followers = [Led(wires, LEADER, GROUP) for _ in range(3)]
    for iteration in range(3):
        decided = order_of(leading, arrivals(seed + iteration))
        for number, follower in enumerate(followers):
            assert order_of(follower, arrivals(100 + 10 * number + iteration)) == decided


def test_a_planned_order_is_one_message() -> None:
    wires = Wires()
    order_of(Leading(Static(), wires, GROUP), arrivals(0))
    assert wires.published == 1
    order_of(Leading(Greedy(), wires, GROUP), arrivals(0))
    assert wires.published == 1 + len(PLAN.actions[STAGE])


@pytest.mark.parametrize("seed", range(5))
def test_lost_decisions_are_asked_for(seed: int) -> None:
    chance = random.Random(seed)
    wires = Wires(lambda: chance.random() < 0.6)
    leading = Leading(Greedy(), wires, GROUP)
    clock = HandClock()
    follower = Led(wires, LEADER, GROUP, clock=clock)
    for iteration in range(2):
        decided = order_of(leading, arrivals(seed))
        assert order_of(follower, arrivals(seed + iteration + 1), ticking(clock)) == decided


def test_a_follower_may_be_iterations_behind() -> None:
    wires = Wires()
    leading = Leading(Greedy(), wires, GROUP)
    clock = HandClock()
    follower = Led(wires, LEADER, GROUP, clock=clock)
    decided = [order_of(leading, arrivals(seed)) for seed in range(4)]
    assert [order_of(follower, arrivals(9), ticking(clock)) for _ in range(4)] == decided


def test_a_lost_leader_is_an_error_and_a_slow_one_is_not() -> None:
    wires = Wires(lambda: True)
    Leading(Greedy(), wires, GROUP)  # it answers, and decides nothing
    clock = HandClock()
    follower = Led(wires, LEADER, GROUP, lost_seconds=5.0, clock=clock)
    dispatcher = Dispatcher(PLAN, STAGE, follower)

    def look_for_a_while() -> None:
        for _ in range(200):
            clock.now += 0.5
            assert isinstance(dispatcher.next(clock.now), Wait)

    look_for_a_while()
    assert "decision 0 of pipeline.s1.t0" in follower.late
    wires.alive = False
    with pytest.raises(TransportError, match=r"leader pipeline\.s1\.t0 of group .* is lost \(no such endpoint\)"):
        look_for_a_while()


def test_a_follower_waits_for_a_decision_but_not_for_an_input() -> None:
    wires = Wires()
    follower = Led(wires, LEADER, GROUP)
    dispatcher = Dispatcher(PLAN, STAGE, follower)
    assert dispatcher.next(0.0) == Wait(None)
    assert follower.pause(0.0)
    wires.handlers[0](Message(f"{GROUP}.order", LEADER, pack_decisions(0, 0, [Action(Work.F, 0, 0)])))
    assert dispatcher.next(0.0) == Wait(None)
    assert not follower.pause(0.0)
    dispatcher.arrived(Action(Work.F, 0, 0))
    assert dispatcher.next(0.0) == Action(Work.F, 0, 0)


def test_decisions_of_others_and_nonsense() -> None:
    wires = Wires()
    follower = Led(wires, LEADER, GROUP)
    dispatcher = Dispatcher(PLAN, STAGE, follower)
    stranger = Message(f"{GROUP}.order", "rank.3", pack_decisions(0, 0, [Action(Work.F, 0, 0)]))
    wires.handlers[0](stranger)
    assert dispatcher.next(0.0) == Wait(None)
    wires.handlers[0](Message(f"{GROUP}.order", LEADER, pack_decisions(0, 0, [Action(Work.F, 3, 0)])))
    with pytest.raises(TransportError, match="which is not in this rank's plan"):
        dispatcher.next(0.0)
    good = pack_decisions(1, 2, [Action(Work.W, 1, 70_000)])
    assert unpack_decisions(good) == (1, 2, [Action(Work.W, 1, 70_000)])
    for bad in (b"", good[:-1], good + b"x", good[:10] + b"\x09" + good[11:]):
        with pytest.raises(ValueError, match="decisions"):
            unpack_decisions(bad)


@contextmanager
def clients(*names: str) -> Iterator[list[Client]]:
    with running_hub() as (hub, _):
        assert hub.address is not None
        offer = Offer(SECRET, (hub.address,))
        made = [Client(name, lambda: offer, limits=LIMITS) for name in names]
        try:
            for client in made:
                client.start()
                assert client.wait_connected(10.0)
            yield made
        finally:
            for client in made:
                client.close()


def test_over_a_hub() -> None:
    orders: dict[int, list[list[Action]]] = {0: [], 1: [], 2: []}

    def rank(number: int, policy: Policy, plan: Plan = PLAN) -> None:
        for iteration in range(3):
            orders[number].append(order_of(policy, arrivals(10 * number + iteration)))

    with clients(LEADER, "pipeline.s1.t1", "pipeline.s1.t2") as (first, second, third):
        policies = [Leading(Greedy(), first, GROUP), Led(second, LEADER, GROUP), Led(third, LEADER, GROUP)]
        together([lambda n=n, p=p: rank(n, p) for n, p in enumerate(policies)])
    assert orders[0] == orders[1] == orders[2]


def test_columns_of_a_pipeline_run_the_same_orders() -> None:
    """Two stages of two ranks: each has a leader, and messages pass within a column."""
    config = PipelineConfig(policy="greedy", order="interleaved")
    wires, columns = [Wires(), Wires()], [local_transports(2), local_transports(2)]
    orders: dict[tuple[int, int], list[str]] = {}
    ready = threading.Barrier(4)
    job = Job(config, 2, 2, microbatches=5)
    inputs, targets = job.data()

    class Noting(NoHooks):
        def __init__(self, stage: int, column: int) -> None:
            self.order = orders.setdefault((stage, column), [])

        def begin(self, action: Action) -> None:
            self.order.append(str(action))

    def rank(stage: int, column: int) -> None:
        parts = job.parts()

        def leading(policy: Policy) -> Policy:
            return Led(wires[stage], LEADER, GROUP) if column else Leading(policy, wires[stage], GROUP)

        more: Any = {"transport": columns[column][stage], "leading": leading, "hooks": Noting(stage, column)}
        own = [parts[position] for position in positions(stage, 2, 2, config)]
        with Pipeline(own, job.loss, config, **more) as pipeline:
            ready.wait(30.0)
            for _ in range(3):
                pipeline.step(inputs, targets)

    together([lambda s=s, c=c: rank(s, c) for s in range(2) for c in range(2)])
    for stage in range(2):
        assert len(orders[stage, 0]) == 3 * 2 * 5 * 3
        assert orders[stage, 0] == orders[stage, 1]
