"""Agreeing on a step: all or none, late ones tried again, ranks that vanish; without a clock, a thread or a channel."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scope_job import FakeRank

from trimtab.scope.collector.agreement import Agreed, Agreement, Ask, Failed, Rules
from trimtab.scope.messages import CANCEL, COMMIT, PREPARE

BODY = {"pattern": "layers.*.output", "what": "statistics", "id": "s-1"}


def ranks_of(count: int = 2, **more) -> list[FakeRank]:
    return [FakeRank(rank, count, **more) for rank in range(count)]


def begun(ranks, rules=Rules(needs_match=True), body=BODY, kind="subscribe"):  # noqa: B008  (frozen)
    agreement = Agreement("c1", kind, body, [rank.rank for rank in ranks], rules)
    return agreement, agreement.begin(0.0)


def carry(agreement, asks, ranks, *, between=lambda ask: None) -> list[Ask]:
    """Answer all requests as the ranks do; those that were sent."""
    sent: list[Ask] = []
    waiting = list(asks)
    while waiting:
        ask = waiting.pop(0)
        sent.append(ask)
        between(ask)
        try:
            said = ranks[ask.rank].answer(ask.subject, ask.body)
        except ValueError as error:
            waiting += agreement.refused(ask, str(error), 0.0)
        else:
            if ask.subject != CANCEL:
                waiting += agreement.answered(ask, said, 0.0)
    return sent


def test_all_begin_at_a_step_that_none_has_begun():
    ranks = ranks_of(4)
    ranks[2].step = 17
    agreement, asks = begun(ranks)
    sent = carry(agreement, asks, ranks)
    assert [ask.subject for ask in sent] == [PREPARE] * 4 + [COMMIT] * 4
    outcome = agreement.outcome
    assert isinstance(outcome, Agreed)
    assert outcome.step == 17 + 1 + 25  # a quarter of a second in steps of ten milliseconds
    assert {rank.due["c1.1"][0] for rank in ranks} == {outcome.step}
    assert outcome.matched[0] == ("layers.0.output", "layers.1.output")


@pytest.mark.parametrize(
    ("seconds", "fewest", "step"), [(10.0, 0, 12), (10.0, 2, 13), (0.0, 0, 11), (0.0, 2, 13), (0.1, 2, 14)]
)
def test_the_news_gets_as_much_time_as_it_needs(seconds, fewest, step):
    ranks = ranks_of(seconds_per_step=seconds)
    agreement, asks = begun(ranks, Rules(lead_seconds=0.25, fewest_steps=fewest))
    carry(agreement, asks, ranks)
    assert agreement.outcome.step == step


def test_one_that_was_told_too_late_is_told_again_and_nobody_begins_before():
    ranks = ranks_of(3)
    ranks[1].late = 2
    agreement, asks = begun(ranks)
    sent = carry(agreement, asks, ranks)
    steps = [ask.body["step"] for ask in sent if ask.subject == COMMIT and ask.rank == 0]
    assert len(steps) == 3
    assert steps == sorted(set(steps))
    assert [list(rank.due) for rank in ranks] == [["c1.3"]] * 3  # what was cancelled is gone
    assert {rank.due["c1.3"][0] for rank in ranks} == {agreement.outcome.step}


def test_it_is_given_up_where_one_is_always_late():
    ranks = ranks_of()
    ranks[1].late = 99
    agreement, asks = begun(ranks)
    carry(agreement, asks, ranks)
    assert isinstance(agreement.outcome, Failed)
    assert "rank 1 began each step before it could be told (late" in agreement.outcome.reason
    assert not any(rank.due for rank in ranks)


def test_a_refusal_of_one_is_a_refusal_of_all():
    ranks = ranks_of(3)
    ranks[2].refuses = "rank 2 may not be disturbed; start the job with scope.allow_perturb = true"
    agreement, asks = begun(ranks, kind="perturb")
    sent = carry(agreement, asks, ranks)
    assert agreement.outcome == Failed(f"rank 2: {ranks[2].refuses}")
    assert [ask.rank for ask in sent if ask.subject == CANCEL] == [0, 1, 2]
    assert not any(rank.prepared for rank in ranks)


def test_what_matches_nowhere_is_refused_with_what_is_close():
    ranks = ranks_of()
    agreement, asks = begun(ranks, body=BODY | {"pattern": "layers.*.outputs"})
    carry(agreement, asks, ranks)
    assert "no tap matches; close to it: layers.0-1.output" in agreement.outcome.reason


def test_a_rank_without_a_match_holds_nobody_up():
    ranks = ranks_of(4)
    agreement, asks = begun(ranks, body=BODY | {"pattern": "layers.3.output"})
    carry(agreement, asks, ranks)
    assert agreement.outcome.matched == {0: (), 1: (), 2: ("layers.3.output",), 3: ("layers.3.output",)}


def test_a_step_that_was_asked_for_is_kept_or_refused():
    for first, agreed in ((12, None), (13, 13), (14, 14), (1000, 13)):
        ranks = ranks_of(seconds_per_step=10.0)
        agreement, asks = begun(ranks, Rules(fewest_steps=2, not_after=first))
        carry(agreement, asks, ranks)
        if agreed is None:
            assert "step 12 is over or too near: the job is at step 10, give 13 or later" in agreement.outcome.reason
        else:
            assert agreement.outcome.step == min(agreed, 13)


def test_a_rank_that_has_vanished():
    for partial in (True, False):
        agreement, asks = begun(ranks_of(3), Rules(partial=partial))
        said = {"step": 4, "seconds_per_step": 1.0, "matched": ["x"]}
        commits = agreement.refused(asks[2], "scope.2 is not connected", 0.0, gone=True)
        if not partial:
            assert agreement.outcome == Failed("rank 2: scope.2 is not connected")
            continue
        commits += agreement.answered(asks[0], said, 0.0)
        commits += agreement.answered(asks[1], said, 0.0)
        for ask in commits:
            agreement.answered(ask, {"step": 4}, 0.0)
        assert (agreement.outcome.ranks, agreement.outcome.missing) == ((0, 1), (2,))


def test_a_rank_that_says_nothing():
    agreement, asks = begun(ranks_of(2), Rules(patience=5.0))
    agreement.answered(asks[0], {"step": 4}, 1.0)
    assert not agreement.expired(4.9)
    assert agreement.outcome is None
    assert [ask.subject for ask in agreement.expired(5.0)] == [CANCEL, CANCEL]
    assert agreement.outcome == Failed("rank 1 did not answer within 5 s")

    agreement, asks = begun(ranks_of(2), Rules(patience=5.0, partial=True))
    agreement.answered(asks[0], {"step": 4}, 1.0)
    commit = agreement.expired(5.0)
    agreement.answered(commit[0], {}, 5.0)
    assert agreement.outcome.missing == (1,)
    agreement, asks = begun(ranks_of(2), Rules(partial=True))
    agreement.expired(100.0)
    assert "ranks 0, 1 are not there any more" in agreement.outcome.reason


def test_nobody_to_ask():
    assert "no rank" in begun([])[0].outcome.reason


def test_answers_that_come_late_or_twice_or_of_others_change_nothing():
    ranks = ranks_of(2)
    agreement, asks = begun(ranks)
    said = {"step": 4, "seconds_per_step": 0.0, "matched": ["x"]}
    assert not agreement.answered(asks[0], said, 0.0)
    assert not agreement.answered(asks[0], said | {"step": 999}, 0.0)
    assert not agreement.answered(Ask(7, PREPARE, {}, 1), said, 0.0)
    assert not agreement.answered(Ask(1, PREPARE, {}, 9), said, 0.0)
    commits = agreement.answered(asks[1], said, 0.0)
    assert [ask.body["step"] for ask in commits] == [5, 5]
    assert not agreement.refused(asks[1], "rubbish", 0.0)
    assert agreement.outcome is None


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_happens_the_ranks_do_the_same_or_nothing(data):
    """Ranks train on between requests, as fast as they like; commits are late where they are."""
    ranks = ranks_of(3, seconds_per_step=data.draw(st.sampled_from((0.0, 0.01, 1.0))))

    def train(_ask):
        for rank in ranks:
            rank.step += data.draw(st.integers(0, 3))

    agreement, asks = begun(ranks, Rules(fewest_steps=2))
    carry(agreement, asks, ranks, between=train)
    due = [{(change, step) for change, (step, _) in rank.due.items()} for rank in ranks]
    if isinstance(agreement.outcome, Agreed):
        assert due == [due[0]] * 3
        assert len(due[0]) == 1
    else:
        assert due == [set()] * 3
