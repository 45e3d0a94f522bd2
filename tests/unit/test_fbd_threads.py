"""Threads as virtual ranks: turns, what changes hands with them, whose message is whose, and what becomes of errors."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.fbd.ranks import Layout, Placement, Role
from trimtab.fbd.threads.routes import Routes
from trimtab.fbd.threads.together import together
from trimtab.fbd.threads.turns import OwnRandom, Turns
from trimtab.transport.errors import LEFT, PeerLost, TransportError
from trimtab.transport.interface import Announcement, Departure, Label, Message
from trimtab.transport.local import local_transports

pytestmark = pytest.mark.timeout(60)
SOON = 20.0


class Held:
    """A global of the process: whose it is now, and how often it has changed hands."""

    def __init__(self):
        self.value, self.swaps = "the process's", 0

    def fresh(self, member):
        return f"that of {member}"

    def swap(self, state):
        before, self.value = self.value, state
        self.swaps += 1
        return before


def test_one_computes_at_a_time_and_has_what_is_the_process_s_for_itself():
    held = Held()
    turns = Turns(3, [held])
    computing = []
    met = []

    def rank(number):
        for round_ in range(4):
            computing.append(number)
            assert held.value == (f"that of {number}" if round_ == 0 else f"{number} in round {round_ - 1}")
            held.value = f"{number} in round {round_}"
            assert computing == [number]
            computing.remove(number)
            met.append((round_, number))
            assert turns.until(lambda round_=round_: len([one for one in met if one[0] == round_]) == 3, SOON)
        return held.value

    assert together(range(3), rank, turns) == [f"{number} in round 3" for number in range(3)]
    assert held.value == "the process's"


def test_who_goes_on_at_once_finds_his_own_without_a_swap():
    held = Held()
    turns = Turns(1, [held])
    assert together([0], lambda _: [turns.until(lambda: True) for _ in range(5)], turns) == [[True] * 5]
    assert held.swaps == 2  # in, and out at the end


def draws(number, turns):
    """As a rank that seeds its generators, and waits after each draw."""
    torch.manual_seed(number)
    random.seed(number)
    found = []
    for _ in range(6):
        found.append((float(torch.rand(1)), random.random()))
        turns.until(lambda: True)
    return found


def test_each_draws_as_if_it_were_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    turns = Turns(3, [OwnRandom()])
    found = together(range(3), lambda number: draws(number, turns), turns)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng([]):
        assert found == [draws(number, Turns(1)) for number in range(3)]


def test_a_wait_ends_at_its_time():
    turns = Turns(1)
    assert together([0], lambda _: turns.until(lambda: False, 0.01), turns) == [False]


def test_the_first_error_ends_all_and_is_what_is_raised():
    turns = Turns(3)
    left = []

    def rank(number):
        turns.on_failure(lambda: left.append(number))
        if number == 1:
            turns.until(lambda: False, 0.01)
            raise KeyError("the cause")
        turns.until(lambda: False, SOON)
        raise AssertionError("it has gone on")

    with pytest.raises(KeyError, match="the cause") as raised:
        together(["first", "second", "third"], lambda name: rank(["first", "second", "third"].index(name)), turns)
    assert raised.value.__notes__ == ["trimtab: in the thread of second"]
    assert sorted(left) == [0, 1, 2]


def test_turns_of_nobody_are_refused():
    with pytest.raises(ValueError, match="at least 1 thread"):
        Turns(0)
    turns = Turns(2)
    with pytest.raises(ValueError, match="no such member"), turns.taken(2):
        pass
    with turns.taken(0):
        with pytest.raises(ValueError, match="or this thread is one"), turns.taken(1):
            pass
        with pytest.raises(RuntimeError, match="still has its turn"):
            turns.end()


# --- routes


@st.composite
def placements(draw):
    layout = Layout(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    count = layout.count(Role.FORWARD)
    return Placement(layout, draw(st.sampled_from([one for one in range(1, count + 1) if count % one == 0])))


def opened(placement):
    """Routes of all processes of a job, and the transport of each virtual rank."""
    routes = [
        Routes(one, placement, Turns(len(placement.hosted(one.rank)))) for one in local_transports(placement.world)
    ]
    own = {rank: routes[process].of(rank) for process in range(placement.world) for rank in placement.hosted(process)}
    return routes, own


def close_all(routes):
    for one in routes:
        one.close()


def received(transport, count):
    found = []
    while len(found) < count:
        assert transport.wait(SOON)
        found += transport.poll()
    return found


@settings(max_examples=15)
@given(placements(), st.data())
def test_every_message_comes_to_the_virtual_rank_that_it_is_for(placement, data):
    routes, own = opened(placement)
    try:
        send_and_compare(placement.layout, own, data)
    finally:  # also where the search gives an example up
        close_all(routes)


def send_and_compare(layout, own, data):
    address = {rank: Placement(layout).process(rank) for rank in own}
    assert sorted(address.values()) == list(range(len(own)))
    assert all(own[rank].rank == address[rank] for rank in own)
    sent = {rank: set() for rank in own}
    for number in range(data.draw(st.integers(1, 30))):
        source, to = data.draw(st.permutations(list(own)).map(lambda some: some[:2]))
        label = Label(data.draw(st.booleans()), data.draw(st.integers(0, 3)), number, data.draw(st.integers(0, 9)))
        own[source].send(address[to], label, [torch.tensor([number])])
        sent[to].add((address[source], label, number))
    for rank in own:
        found = received(own[rank], len(sent[rank]))
        assert {(one.source, one.label, int(one.take()[0])) for one in found} == sent[rank]
        for one in found:
            one.release()


def pair():
    """A job of one stage and two forward instances, these in one process."""
    placement = Placement(Layout(1, forwards=2), 2)
    routes, own = opened(placement)
    backward, first, second = (own[one] for one in (*placement.hosted(0), *placement.hosted(1)))
    return routes, backward, first, second


def test_what_is_handed_over_within_a_process_is_a_copy():
    routes, _, first, second = pair()
    tensor = torch.ones(3)
    assert first.send(second.rank, Label(False, 0, 0), [tensor]).done()
    tensor.zero_()
    (message,) = received(second, 1)
    assert message.source == first.rank
    assert message.take()[0].tolist() == [1.0] * 3
    first.announce(second.rank, Label(False, 0, 1), 0.5)
    (soon,) = received(second, 1)
    assert isinstance(soon, Announcement)
    assert soon.source == first.rank
    close_all(routes)


def test_threads_have_credits_of_their_own():
    """One that takes nothing keeps nothing from the other."""
    routes, backward, first, second = pair()
    for number in range(8):
        backward.send(first.rank, Label(False, 1, number), [torch.tensor(number)])
    backward.send(second.rank, Label(False, 1, 0), [torch.tensor(7)])
    (message,) = received(second, 1)
    assert int(message.take()[0]) == 7
    taken = []
    while len(taken) < 8:
        taken += [int(one.take()[0]) for one in received(first, 1)]
    assert taken == list(range(8))
    close_all(routes)


def test_announcements_and_links_are_of_virtual_ranks():
    routes, backward, first, second = pair()
    second.announce(backward.rank, Label(True, 3, 2), 0.25)
    (soon,) = received(backward, 1)
    assert (soon.source, soon.label) == (second.rank, Label(True, 3, 2))
    backward.send(first.rank, Label(False, 0, 0), [torch.ones(1)])
    received(first, 1)
    assert set(backward.links()) == {first.rank, second.rank}
    backward.drain(SOON)
    close_all(routes)


def test_a_process_that_leaves_is_the_loss_of_its_virtual_ranks():
    routes, backward, first, _ = pair()
    routes[1].close()

    def goes_on():
        backward.send(first.rank, Label(False, 0, 0), [torch.ones(1)])
        backward.wait(SOON)
        backward.poll()

    with pytest.raises(PeerLost, match=rf"stage {first.rank} is lost: {LEFT}"):
        goes_on()
    with pytest.raises(TransportError, match="closed"):
        first.send(backward.rank, Label(True, 0, 0), [])
    close_all(routes)


def test_who_has_let_them_go_is_told_of_each():
    routes, backward, first, second = pair()
    backward.let_go([first.rank, second.rank])
    routes[1].close()
    found = received(backward, 2)
    assert [type(one) for one in found] == [Departure] * 2
    assert {one.source for one in found} == {first.rank, second.rank}
    close_all(routes)


def test_one_of_two_threads_is_told_of_the_process_that_it_let_go_and_the_other_fails():
    routes, backward, first, second = pair()
    first.let_go([backward.rank])
    routes[0].close()
    (told,) = received(first, 1)
    assert isinstance(told, Departure)
    assert told.source == backward.rank
    with pytest.raises(PeerLost):
        second.wait(SOON)
    close_all(routes)


def test_a_thread_that_waits_for_a_message_lets_its_sibling_send_it():
    placement = Placement(Layout(1, forwards=2), 2)
    turns = Turns(2)
    transports = local_transports(placement.world)
    other = Routes(transports[0], placement)
    with Routes(transports[1], placement, turns) as routes:
        ranks = placement.hosted(1)

        def run(rank):
            own = routes.of(rank)
            if rank is ranks[0]:
                assert own.wait(SOON)
                (message,) = own.poll()
                assert isinstance(message, Message)
                return int(message.take()[0])
            own.send(routes.of(ranks[0]).rank, Label(False, 0, 0), [torch.tensor(5)])
            return None

        assert together(ranks, run, turns) == [5, None]
    other.close()


@settings(max_examples=15)
@given(placements(), st.data())
def test_programs_that_processes_end_threads_end_too(placement, data):
    """Messages in one global order, of which each rank sends and waits for its own: whoever waits lets others on."""
    ranks = [rank for process in range(placement.world) for rank in placement.hosted(process)]
    order = data.draw(st.lists(st.permutations(ranks).map(lambda some: some[:2]), min_size=1, max_size=20))
    turns = [Turns(len(placement.hosted(process)), []) for process in range(placement.world)]
    transports = local_transports(placement.world)
    routes = [Routes(one, placement, turn) for one, turn in zip(transports, turns, strict=True)]
    address = Placement(placement.layout).process

    def program(process, rank):
        own, found, waiting = routes[process].of(rank), [], {}
        for number, (source, to) in enumerate(order):
            if rank == source:
                own.send(address(to), Label(False, 0, number), [torch.tensor(number)])
            elif rank == to:
                while (address(source), number) not in waiting:
                    assert own.wait(SOON)
                    waiting |= {(one.source, one.label.microbatch): one.take() for one in own.poll()}
                found.append(number)
        return found

    def process_of(process):
        hosted = placement.hosted(process)
        return together(hosted, lambda rank: program(process, rank), turns[process])

    with ThreadPoolExecutor(placement.world) as processes:
        found = list(processes.map(process_of, range(placement.world)))
    close_all(routes)
    expected = [[n for n, (_, to) in enumerate(order) if to == rank] for rank in ranks]
    assert [one for process in found for one in process] == expected


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda own: Routes(local_transports(2)[1], Placement(Layout(1, forwards=2), 2)), "give Routes their Turns"),
        (lambda own: Routes(local_transports(3)[1], Placement(Layout(1, forwards=2), 2)), "the job has 3"),
        (lambda own: own.send(0, Label(False, 128, 0), []), "no such label"),
        (lambda own: own.send(0, Label(False, 0, 0, 1 << 40), []), "no such label"),
        (lambda own: own.send(own.rank, Label(False, 0, 0), []), "cannot send to stage"),
    ],
)
def test_what_cannot_be_routed_is_refused(make, said):
    routes, _, first, _ = pair()
    with pytest.raises(ValueError, match=said):
        make(first)
    with pytest.raises(ValueError, match="is on process 0, not on 1"):
        routes[1].of(Placement(Layout(1, forwards=2), 2).hosted(0)[0])
    close_all(routes)
    assert not [one for one in threading.enumerate() if one.name == "trimtab-routes"]
