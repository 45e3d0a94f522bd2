"""The coordinator: one order everywhere, no deadlock in any interleaving, and what becomes of those who never come."""

import threading
from concurrent.futures import wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import Barrier

from trimtab.coordinator.launcher import Coordinator
from trimtab.coordinator.memberships import Memberships
from trimtab.coordinator.model import search
from trimtab.coordinator.rounds import Pace, Rounds

pytestmark = pytest.mark.timeout(60)
SOON = 20.0
QUICK = Pace(shortest=0.0, longest=0.001)


# Two processes, each with a forward (0, 1) and a backward (2, 3) virtual rank; a group of each kind, and one of all.
PAIR = Memberships(((0, 1), (2, 3), (0, 1, 2, 3)), {0: 0, 2: 0, 1: 1, 3: 1})


def test_launched_as_they_are_reached_collectives_deadlock():
    found = search(PAIR, {0: [0], 1: [0], 2: [1], 3: [1]}, coordinated=False)
    assert found.deadlock is not None
    assert {queue[0][0] for queue in found.deadlock.queues} == {0, 1}


@pytest.mark.parametrize(
    "programs",
    [
        {0: [0], 1: [0], 2: [1], 3: [1]},
        {0: [0, 0, 2], 1: [0, 0, 2], 2: [1, 2], 3: [1, 2]},
        {0: [0, 2, 0], 1: [0, 2, 0], 2: [2, 1, 1], 3: [2, 1, 1]},
    ],
)
def test_in_rounds_no_interleaving_deadlocks(programs):
    found = search(PAIR, programs, coordinated=True)
    assert found.deadlock is None
    assert found.states > 20


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_in_rounds_no_small_system_deadlocks(data):
    """Programs that can end by themselves: every virtual rank follows one global order, each in its own part of it."""
    ranks = data.draw(st.integers(2, 4))
    host = {rank: data.draw(st.integers(0, 1)) for rank in range(ranks)}
    members = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True).map(tuple)
    groups = tuple(data.draw(st.lists(members, min_size=1, max_size=3)))
    order = data.draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=4))
    memberships = Memberships(groups, host)
    programs = {rank: [group for group in order if rank in groups[group]] for rank in range(ranks)}
    assert search(memberships, programs, coordinated=True).deadlock is None


def test_a_circle_of_programs_is_found_even_in_rounds():
    """The search can find one: here each waits for what the other does later."""
    programs = {0: [0, 2], 1: [2, 0], 2: [2], 3: [2]}
    assert search(PAIR, programs, coordinated=True).deadlock is not None


def test_programs_that_do_not_fit_each_other_are_refused():
    with pytest.raises(ValueError, match=r"group 0: its members call it \[1, 2\] times"):
        search(PAIR, {0: [0], 1: [0, 0], 2: [], 3: []}, coordinated=True)
    with pytest.raises(ValueError, match="no member of group 1"):
        search(PAIR, {0: [1], 1: [], 2: [1], 3: [1]}, coordinated=True)


def test_a_round_launches_what_all_have_reached_in_ascending_order():
    said = []
    rounds = Rounds(PAIR, 0)
    rounds.post(2, 1, lambda: said.append("backward"))
    rounds.post(0, 0, lambda: said.append("forward"))
    rounds.post(0, 0, lambda: said.append("forward again"))
    assert rounds.vector() == [1, 0, 1, 0, 0, 0, 0, 0]
    for launch in rounds.agreed([1, 1, 1, 1, 1, 0, 0, 0]):
        launch()
    assert said == ["forward", "backward"]
    assert rounds.left() == [(0, 0, 1)]
    assert rounds.launched == [1, 1, 0]


def test_rounds_become_rarer_while_nothing_happens():
    pace = Pace(shortest=1e-4, longest=1e-2, patience=2)
    assert [pace.after(idle) for idle in (0, 2, 3, 4, 20)] == pytest.approx([1e-4, 1e-4, 2e-4, 4e-4, 1e-2])
    rounds = Rounds(PAIR, 0, pace)
    for _ in range(20):
        rounds.agreed([0] * PAIR.bits)
    assert rounds.pause == pytest.approx(1e-2)
    rounds.agreed([1, 1, 0, 0, 0, 0, 0, 0])
    assert rounds.pause == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Memberships(((),), {}), "group 0"),
        (lambda: Memberships(((0, 0),), {0: 0}), "each once"),
        (lambda: Memberships(((0, 7),), {0: 0}), "no process has virtual rank 7"),
        (lambda: Rounds(PAIR, 0).post(1, 0, print), "not of this process"),
        (lambda: Rounds(PAIR, 0).post(0, 1, print), "no member of group 1"),
        (lambda: Pace(shortest=2.0, longest=1.0), "longest is not below"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_processes_launch_in_the_same_order_whatever_their_threads_do():
    processes, groups, times = 3, 4, 12
    host = {rank: rank % processes for rank in range(2 * processes)}
    memberships = Memberships(tuple(tuple(host) for _ in range(groups)), host)
    barrier = Barrier(processes)
    order = {process: [] for process in range(processes)}
    coordinators = [Coordinator(memberships, process, barrier.of(process), QUICK) for process in range(processes)]

    def virtual_rank(rank):
        coordinator = coordinators[host[rank]]
        begins = [(step + rank) % groups for step in range(groups)]  # each its own order
        tickets = [
            coordinator.post(rank, group, lambda group=group: order[host[rank]].append((rank // processes, group)))
            for _ in range(times)
            for group in begins
        ]
        wait(tickets, SOON)
        assert all(ticket.exception(0) is None for ticket in tickets)

    threads = [threading.Thread(target=virtual_rank, args=(rank,)) for rank in host]
    opened = [coordinator.__enter__() for coordinator in coordinators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    close_all(opened)
    assert order[0] == order[1] == order[2]
    assert len(order[0]) == 2 * groups * times
    assert [coordinator.counts.launched for coordinator in opened] == [2 * groups * times] * processes


def close_all(coordinators):
    """At the same time, as processes do; what they raise."""
    raised = []

    def close(coordinator):
        try:
            coordinator.close()
        except RuntimeError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=close, args=(one,)) for one in coordinators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()
    return raised


def opened_pair():
    barrier = Barrier(2)
    return barrier, [Coordinator(PAIR, process, barrier.of(process), QUICK).__enter__() for process in range(2)]


def test_who_waits_for_a_member_that_never_comes_is_told_at_the_end():
    _, pair = opened_pair()
    ticket = pair[0].post(0, 0, lambda: None)
    raised = close_all(pair)
    assert raised == ["virtual rank 0 waits for a collective of group 0 that others never reached"]
    assert isinstance(ticket.exception(0), RuntimeError)


def test_a_process_that_is_gone_fails_what_waits():
    barrier, pair = opened_pair()
    ticket = pair[0].post(0, 0, lambda: None)
    barrier.break_down()
    assert "a process is gone" in str(ticket.exception(SOON))
    close_all(pair)
    with pytest.raises(RuntimeError, match="has ended"):
        pair[0].post(0, 0, lambda: None)


def test_what_a_launch_raises_is_told_to_who_posted_it():
    _, pair = opened_pair()

    def fails():
        raise OSError("no device")

    tickets = [pair[0].post(0, 0, fails), pair[1].post(1, 0, lambda: None)]
    assert str(tickets[0].exception(SOON)) == "no device"
    assert tickets[1].exception(SOON) is None
    assert close_all(pair) == []
