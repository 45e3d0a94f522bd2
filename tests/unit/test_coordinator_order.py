"""An order that replicas agree on: the same on all, as soon as all are ready, without an end that waits for ever."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import Barrier

from trimtab.coordinator.memberships import Memberships
from trimtab.coordinator.model import search
from trimtab.coordinator.order import AgreedOrder
from trimtab.coordinator.rounds import Pace
from trimtab.pipeline.actions import Work
from trimtab.pipeline.execute.replicas import ChunkReductions, completion_order
from trimtab.pipeline.orders import make_plan

pytestmark = pytest.mark.timeout(60)
SOON = 20.0
QUICK = Pace(shortest=0.0, longest=0.001)


def run_all(functions):
    """Each in a thread; what they return, or raise."""
    found = [None] * len(functions)

    def run(place, function):
        try:
            found[place] = function()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(functions)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(SOON)
        assert not one.is_alive()
    return found


def opened(replicas, things, patience=SOON):
    barrier = Barrier(replicas)
    return barrier, [AgreedOrder(things, one, replicas, barrier.of(one), patience, QUICK) for one in range(replicas)]


def close_all(orders):
    return run_all([one.close for one in orders])


@settings(max_examples=20)
@given(st.integers(2, 3), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_all_begin_all_of_them_in_one_order(replicas, things, times, chance):
    _, orders = opened(replicas, things)
    reached = [[chance.sample(range(things), things) for _ in range(times)] for _ in range(replicas)]

    def replica(number):
        begun = []
        for iteration in reached[number]:
            for thing in iteration:
                orders[number].reached(thing)
                begun += orders[number].ready()
            begun += orders[number].rest()
        return begun

    found = run_all([lambda number=number: replica(number) for number in range(replicas)])
    assert close_all(orders) == [None] * replicas
    assert all(one == found[0] for one in found)
    for number in range(times):  # an iteration ends with all that it has reached
        assert sorted(found[0][number * things : (number + 1) * things]) == list(range(things))


def test_what_one_has_not_reached_is_not_begun_and_what_all_have_is_whatever_else_waits():
    _, orders = opened(2, 3)
    orders[0].reached(0)
    orders[0].reached(2)
    orders[1].reached(2)
    assert [next(one.rest()) for one in orders] == [2, 2]
    assert [one.ready() for one in orders] == [[], []]
    orders[1].reached(0)
    assert [list(one.rest()) for one in orders] == [[0], [0]]
    close_all(orders)


def test_who_waits_for_a_replica_that_does_not_come_is_told():
    _, orders = opened(2, 1, patience=0.05)
    orders[0].reached(0)
    with pytest.raises(RuntimeError, match="another replica has not reached what this one has"):
        list(orders[0].rest())
    for one in orders:
        one.abandon()


def test_who_waits_for_a_replica_that_is_gone_is_told():
    barrier, orders = opened(2, 1)
    orders[0].reached(0)
    barrier.break_down()
    with pytest.raises(RuntimeError, match="a process is gone"):
        list(orders[0].rest())
    for one in orders:
        one.abandon()


def test_who_waits_for_a_replica_that_has_given_up_is_told_at_once():
    _, orders = opened(2, 1)
    orders[0].reached(0)
    orders[1].abandon()
    with pytest.raises(RuntimeError, match="a process has given up"):
        list(orders[0].rest())
    with pytest.raises(RuntimeError, match="has ended"):
        orders[1].reached(0)
    assert close_all(orders) == [None, None]


@pytest.mark.parametrize("times", [1, 2])
def test_launched_as_they_are_complete_reductions_deadlock_and_as_agreed_they_do_not(times):
    """Of two replicas on a device each; a chunk of a replica is a virtual rank, complete at any time."""
    chunks = 2
    host = {replica * chunks + chunk: replica for replica in range(2) for chunk in range(chunks)}
    groups = tuple((chunk, chunks + chunk) for chunk in range(chunks))
    programs = {rank: [rank % chunks] * times for rank in host}
    memberships = Memberships(groups, host)
    assert search(memberships, programs, coordinated=False).deadlock is not None
    assert search(memberships, programs, coordinated=True).deadlock is None


@pytest.mark.parametrize("seed", range(3))
def test_replicas_that_run_different_orders_reduce_in_the_same(seed):
    """Actions of weights in any order; tied weights come last."""
    plan = make_plan("zb-v", (2, 2, 3)) if seed == 0 else make_plan("interleaved", (2, 4, 3))
    chunks = plan.shape.chunks
    _, orders = opened(2, chunks + 1)
    begun = [[], []]
    complete = [[], []]

    def replica(number):
        reductions = ChunkReductions(begun[number].append, orders[number])
        chance = random.Random(10 * seed + number)
        for _ in range(3):
            reductions.expect(plan, 0)
            left = [action for action in plan.actions[0] if action.work in (Work.W, Work.BW)]
            chance.shuffle(left)
            while left:
                action = left.pop()
                reductions.begin(action)
                reductions.end(action)
                if all(one.chunk != action.chunk for one in left):
                    complete[number].append(action.chunk)
            reductions.complete(chunks)
        reductions.forget()
        reductions.begin(plan.actions[0][0])

    assert run_all([lambda number=number: replica(number) for number in range(2)]) == [None, None]
    close_all(orders)
    assert begun[0] == begun[1]
    assert complete[0] != complete[1]
    assert len(begun[0]) == 3 * (chunks + 1)
    for end in range(chunks, len(begun[0]), chunks + 1):
        assert begun[0][end] == chunks
    assert set(completion_order(plan, 0)) == set(range(chunks))
