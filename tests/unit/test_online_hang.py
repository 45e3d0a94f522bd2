"""Hangs: who waits where, who is missing, and where it begins, from heartbeats."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.scan.online.graph import terminal_circles, without_successors
from trimtab.scan.online.hang import Place, diagnose
from trimtab.scan.online.hang_words import lines
from trimtab.scan.online.progress import SILENCE, Progress
from trimtab.scan.online.summary import GroupProgress, Heartbeat, OpenCommunication, decode, encode, runs_of

NOW = 1_790_000_000_000_000_000


def collective(group, seq, members, op="all_reduce", nbytes=4096, since=30, blocking=True):
    return OpenCommunication(group, op, seq, nbytes, NOW - since * 10**9, members=runs_of(members), blocking=blocking)


def message(op, src, dst, seq=0, since=30):
    return OpenCommunication("pp", op, seq, 1024, NOW - since * 10**9, src=src, dst=dst, tag=0)


def beats(world, open_by_rank, groups=None, phases=None, step=7):
    """A heartbeat of every rank in ``open_by_rank``, the way it takes over a channel."""
    said = {}
    for rank, opened in open_by_rank.items():
        beat = Heartbeat(
            *("run", 0, rank, world, "node", NOW, step, NOW - 40 * 10**9),
            phase=(phases or {}).get(rank, ""),
            open=tuple(opened),
            groups=tuple((groups or {}).get(rank, ())),
        )
        received = decode(encode(beat))
        assert received == beat
        said[rank] = received
    return said


def test_the_rank_that_does_not_come_is_missing():
    waits = collective("dp", 5, range(4))
    found = diagnose(beats(4, {0: [waits], 1: [waits], 2: [], 3: [waits]}, phases={2: "data"}), 4)
    (one,) = found.waiting
    assert (one.place, one.arrived, one.missing, one.seconds) == (Place("dp", 5), (0, 1, 3), (2,), pytest.approx(30))
    assert [(root.rank, root.silent, root.phase) for root in found.roots] == [(2, False, "data")]
    assert found.suspects == (2,)
    assert lines(found) == [
        "Rank 2 is missing: it is in data (step 7), and waits for nobody.",
        "Ranks 0-1, 3 wait for 30 s in all_reduce 5 (4.1 kB) in group dp; rank 2 missing.",
    ]


def test_a_rank_that_was_killed_is_missing_everywhere():
    found = diagnose(beats(4, {r: [collective("dp", 5, range(4))] for r in (0, 1, 3)}), 4)
    assert [(root.rank, root.silent) for root in found.roots] == [(2, True)]
    assert found.silent == (2,)
    assert lines(found)[0] == "Rank 2 is missing: nothing is heard of it."


def test_a_rank_that_fell_silent_does_not_count_as_arrived():
    waits = collective("dp", 5, range(3))
    found = diagnose(beats(3, {r: [waits] for r in range(3)}), 3, silent=[1])
    assert found.waiting[0].missing == (1,)
    assert "it was in step 7" in lines(found)[0]


def test_waiting_is_followed_from_group_to_group():
    """TP2 x DP2: rank 3 is stuck; rank 2 waits for it in tp, ranks 0 and 1 for 2 and 3 in dp."""
    tp, dp0, dp1 = collective("tp", 9, [2, 3]), collective("dp0", 4, [0, 2]), collective("dp1", 4, [1, 3])
    found = diagnose(beats(4, {0: [dp0], 1: [dp1], 2: [tp], 3: []}), 4)
    assert [root.rank for root in found.roots] == [3]
    assert found.deadlocks == ()


def test_a_chain_of_receives_leads_to_the_first_stage():
    found = diagnose(
        beats(
            4,
            {0: [], 1: [message("recv", 0, 1)], 2: [message("recv", 1, 2)], 3: [message("recv", 2, 3)]},
            phases={0: "forward"},
        ),
        4,
    )
    assert [root.rank for root in found.roots] == [0]
    assert found.suspects == (0,)
    assert any("from rank 0 to 1" in line for line in lines(found))


def test_a_long_chain_does_not_exhaust_the_stack():
    world = 5000
    found = diagnose(beats(world, {0: []} | {r: [message("recv", r - 1, r)] for r in range(1, world)}), world)
    assert [root.rank for root in found.roots] == [0]


def test_sends_in_a_circle_are_a_deadlock():
    found = diagnose(beats(3, {r: [message("send", r, (r + 1) % 3)] for r in range(3)}), 3)
    (circle,) = found.deadlocks
    assert sorted(circle) == [0, 1, 2]
    assert found.roots == ()
    assert "wait for each other" in lines(found)[0]


def test_collectives_in_another_order_are_a_deadlock():
    a, b = collective("a", 1, [0, 1]), collective("b", 1, [0, 1], op="all_gather")
    found = diagnose(beats(2, {0: [a], 1: [b]}), 2)
    assert [sorted(circle) for circle in found.deadlocks] == [[0, 1]]
    assert found.suspects == (0, 1)


def test_ranks_outside_of_the_circle_are_no_suspects():
    a, b, world = collective("a", 1, [0, 1]), collective("b", 1, [0, 1]), collective("w", 1, range(4))
    found = diagnose(beats(4, {0: [a], 1: [b], 2: [world], 3: [world]}), 4)
    assert found.suspects == (0, 1)


@pytest.mark.parametrize("other", [("broadcast", 4096), ("all_reduce", 8192)])
def test_different_operations_at_one_place_are_a_mismatch(other):
    op, nbytes = other
    mine, its = collective("dp", 3, [0, 1]), collective("dp", 3, [0, 1], op=op, nbytes=nbytes)
    found = diagnose(beats(2, {0: [mine], 1: [its]}), 2)
    assert [one.place for one in found.mismatches] == [Place("dp", 3)]
    assert lines(found)[0].startswith("Mismatch in group dp: ranks 0-1 came with different operations: all_reduce of")


def test_sizes_may_differ_where_that_is_allowed():
    mine, its = (collective("ep", 3, [0, 1], op="all_to_all", nbytes=n) for n in (100, 200))
    assert diagnose(beats(2, {0: [mine], 1: [its]}), 2).mismatches == ()


def test_where_all_have_come_the_network_is_to_blame():
    found = diagnose(beats(2, {r: [collective("dp", 3, [0, 1])] for r in (0, 1)}), 2)
    assert [one.place for one in found.stuck] == [Place("dp", 3)]
    assert found.roots == ()
    assert found.deadlocks == ()
    assert "All have come" in lines(found)[0]


def test_who_is_past_a_collective_is_not_missing():
    waits = collective("dp", 3, [0, 1, 2], op="broadcast")
    groups = {0: [GroupProgress("dp", 4, 4)], 1: [GroupProgress("dp", 2, 2)]}
    found = diagnose(beats(3, {0: [], 1: [], 2: [waits]}, groups), 3)
    assert found.waiting[0].missing == (1,)


def test_a_collective_that_others_are_past_is_over():
    """Rank 2 reads data, and has not noticed yet that its last all-reduce is complete."""
    old, new = collective("dp", 44, range(4)), collective("dp", 45, range(4))
    groups = {rank: [GroupProgress("dp", 45, 44)] for rank in (0, 1, 3)} | {2: [GroupProgress("dp", 44, 43)]}
    found = diagnose(beats(4, {0: [new], 1: [new], 2: [old], 3: [new]}, groups, phases={2: "data"}), 4)
    assert [one.place for one in found.waiting] == [Place("dp", 45)]
    assert [(root.rank, root.phase) for root in found.roots] == [(2, "data")]


def test_what_runs_beside_the_compute_holds_nobody_up():
    beside = collective("dp", 8, [0, 1, 2], blocking=False)
    waits = collective("tp", 3, [0, 1])
    found = diagnose(beats(3, {0: [beside, waits], 1: [beside], 2: []}), 3)
    assert [one.place for one in found.waiting] == [Place("tp", 3)]
    assert [root.rank for root in found.roots] == [1]


def test_where_nothing_else_is_open_what_runs_beside_holds_up():
    beside = collective("dp", 8, [0, 1, 2], blocking=False)
    found = diagnose(beats(3, {0: [beside], 1: [beside], 2: []}), 3)
    assert found.waiting[0].missing == (2,)


def test_nobody_waits():
    found = diagnose(beats(2, {0: [], 1: []}), 2)
    assert (found.waiting, found.roots, found.suspects) == ((), (), ())
    assert lines(found) == ["No rank waits in a communication."]


def test_names_do_nothing_to_the_terminal():
    evil = collective("\x1b]0;evil\x07", 3, [0, 1], op="\x1b[2J")
    text = "\n".join(lines(diagnose(beats(2, {0: [evil], 1: []}, phases={1: "\x1b[31m\u202e"}), 2)))
    assert "\x1b" not in text
    assert "\u202e" not in text


@given(st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 7), max_size=3), max_size=8))
def test_everybody_who_waits_is_led_to_a_root_or_a_circle(edges):
    roots, circles = set(without_successors(edges)), terminal_circles(edges)
    for circle in circles:
        assert all(after in edges[node] for node, after in zip(circle, circle[1:] + circle[:1], strict=True))
    ends = roots | {node for circle in circles for node in circle}
    for node, successors in edges.items():
        reached, left = {node}, list(successors)
        while left:
            target = left.pop()
            if target not in reached:
                reached.add(target)
                left += edges.get(target, [])
        assert not successors or reached & ends


def test_a_job_stands_when_no_rank_gets_on():
    progress = Progress(2)
    waits = collective("dp", 5, [0, 1])
    progress.add(beats(2, {0: [waits]})[0], 10.0)
    progress.add(beats(2, {1: []})[1], 11.0)
    assert progress.standing(20.0) == 9.0
    progress.add(beats(2, {0: [waits]})[0], 20.0)  # still there
    assert progress.standing(20.0) == 9.0
    progress.add(beats(2, {1: []}, step=8)[1], 21.0)
    assert progress.standing(21.0) == 0.0
    assert progress.silent(21.0 + SILENCE) == (0,)
    assert progress.patience(None, float("nan")) == 60
    assert progress.patience(None, 20.0) == 200
    assert progress.patience(5.0, 20.0) == 5


def test_a_job_that_ended_does_not_hang():
    progress = Progress(2)
    for rank in (0, 1):
        progress.add(beats(2, {rank: []})[rank], 1.0)
        assert not progress.over
        progress.left(rank)
    assert progress.over


def test_a_large_job_is_diagnosed_at_once():
    world, order = 1024, list(range(1024))
    random.Random(0).shuffle(order)
    waits = collective("dp", 5, range(world))
    found = diagnose(beats(world, {rank: [waits] for rank in order[10:]} | {rank: [] for rank in order[:9]}), world)
    assert set(found.waiting[0].missing) == set(order[:10])
    assert found.silent == (order[9],)
