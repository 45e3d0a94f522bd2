"""When a command has what it wanted, and when nothing will come of it."""

from __future__ import annotations

import pytest

from trimtab.scope.collector.interface import Notice, Offered
from trimtab.scope.collector.offers import fitting
from trimtab.scope.collector.ranks import Beat
from trimtab.scope.commands.waiting import Hopes
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription, When


def beat(step: int, state: str = "active") -> Beat:
    return Beat.from_dict({"rank": 0, "world_size": 1, "step": step, "subscriptions": {"s-1": state}})


def hopes(wish: Subscription, step: int = 10, ranks: tuple[int, ...] = (0,)) -> Hopes:
    found = Hopes()
    found.expect("s-1", wish, {"ranks": list(ranks), "step": step})
    return found


def said(found: Hopes, step: int, now: float, state: str = "active", **more: bool) -> list[str]:
    return list(found.disappointed({0: beat(step, state)}, step, now, **more))


def test_it_takes_three_steps_and_five_seconds_and_is_said_once():
    found = hopes(Subscription("x", "rows", when=When(every=2, first=3, microbatches=(90,)), parameters={"rows": [9]}))
    assert said(found, 11, 0.0) == []  # 11 is the first that is due, and not over yet
    assert said(found, 14, 1.0) == []
    assert said(found, 15, 9.0) == []  # two steps
    assert said(found, 16, 5.9) == []  # three, but not for so long
    expected = "s-1: steps 11-15 were due, and nothing came of rows of x; is there no such row or microbatch?"
    assert said(found, 16, 6.0) == [expected]
    assert said(found, 99, 99.0) == []


def test_nothing_is_said_of_what_has_come_or_pauses():
    found = hopes(Subscription("x"))
    assert said(found, 90, 0.0) == said(found, 90, 9.0, "budget") == said(found, 91, 10.0) == []
    assert said(found, 92, 15.0) != []
    found = hopes(Subscription("x"))
    found.came("s-1")
    assert said(found, 90, 0.0) == said(found, 90, 9.0) == []


def test_where_no_more_can_be_due_it_is_said_at_once():
    found = hopes(Subscription("x", when=When(first=10, last=10)))
    assert said(found, 11, 0.0) == []
    assert said(found, 12, 0.1, over=True) == [
        "s-1: step 10 was due, and nothing came of statistics of x; does nothing pass there?"
    ]


def test_failures_of_some_ranks_are_said_those_of_all_are_the_end():
    found = hopes(Subscription("x"), ranks=(0, 1))
    assert not found.failed(Notice("error", "else", 0, subscription="s-2"))
    assert not found.failed(Notice("paused", "else", 0, subscription="s-1"))
    first, second = (Notice("error", "no\nsuch row", rank, subscription="s-1") for rank in (0, 1))
    assert found.failed(first)
    assert list(found.failures(1.0)) == list(found.failures(1.9)) == []
    assert list(found.failures(2.0)) == [first]
    assert list(found.failures(9.0)) == []
    assert found.failed(second)
    with pytest.raises(ValueError, match=r"^s-1: no such row$"):
        list(found.failures(10.0))


def test_what_ends_everywhere_is_the_end_though_one_rank_says_it():
    found = hopes(Subscription("x"), ranks=(0, 1))
    found.expect("s-2", Subscription("y"), {"ranks": [1], "step": 3})
    assert found.failed(Notice("error", "over budget", 1, subscription="s-1", details={"end": True}))
    assert list(found.failures(1.0)) == []  # the other one goes on
    assert found.failed(Notice("error", "gone", 1, subscription="s-2"))
    with pytest.raises(ValueError, match=r"^s-1: over budget$"):
        list(found.failures(1.1))


def test_kinds_that_do_not_fit_say_what_does():
    one, plain, sent = (
        Offered(name, ((0, Tap(name, kind)),))
        for name, kind in (("a.map", "attention"), ("a.q", "activation"), ("collectives.tp.all", "communication"))
    )
    assert fitting([one, plain], "statistics") == [plain]
    assert fitting([one, plain], "attention") == [one]
    for offered, what, says in (
        ([one], "rows", "a.map has only --what attention, not rows"),
        ([one, one], "rows", r"a.map has only --what attention \(as of 1 more that match\), not rows"),
        ([plain], "attention", "a.q has no attention map; --what statistics, histogram, .* can be had of it"),
        ([sent], "statistics", "can be disturbed, and not be measured"),
    ):
        with pytest.raises(ValueError, match=says):
            fitting(offered, what)
