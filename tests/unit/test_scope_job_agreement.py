"""The rank's side of agreeing on changes, and what a subscription may ask of a rank."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scope_job_fakes import FakePoint, make_rank  # noqa: E402

from trimtab.config import ScopeConfig  # noqa: E402
from trimtab.scope.job.agreement import FORGET_SECONDS, MOST_PREPARED, Agreement, Change  # noqa: E402
from trimtab.scope.job.limits import check_limits  # noqa: E402
from trimtab.scope.moment import Moment  # noqa: E402
from trimtab.scope.names import Tap  # noqa: E402
from trimtab.scope.subscription import Subscription  # noqa: E402

ONE = torch.ones(2, 3)


def two_points() -> tuple[FakePoint, FakePoint]:
    return FakePoint("layers.0.output", 0), FakePoint("layers.1.output", 1)


def agreement(seconds: list[float]) -> Agreement:
    return Agreement(lambda: seconds[0])


def test_a_commit_that_is_late_is_refused_and_the_change_never_applies() -> None:
    agreed = agreement([0.0])
    agreed.prepare(Change("c1", "subscribe", {}))
    agreed.begin(4)
    with pytest.raises(ValueError, match="late: step 4 has begun, change c1 was to apply at 4"):
        agreed.commit("c1", Moment(4))
    assert agreed.begin(5) == []
    assert agreed.commit("c1", Moment(6)) == Moment(6), "the next one is in time"
    assert [change.id for change in agreed.begin(6)] == ["c1"]


def test_changes_of_a_step_apply_in_the_same_order_everywhere() -> None:
    names = ["c9", "c10", "c2"]
    for committed in (names, names[::-1]):
        agreed = agreement([0.0])
        for name in names:
            agreed.prepare(Change(name, "subscribe", {}))
        for name in committed:
            agreed.commit(name, Moment(3))
        assert agreed.begin(2) == []
        assert [change.id for change in agreed.begin(3)] == ["c2", "c9", "c10"]


def test_a_commit_may_be_said_twice_but_not_for_another_step() -> None:
    agreed = agreement([0.0])
    agreed.prepare(Change("c1", "subscribe", {}))
    for _ in range(2):
        agreed.commit("c1", Moment(3, 1))
    with pytest.raises(ValueError, match="agreed on for step 3"):
        agreed.commit("c1", Moment(4))
    agreed.begin(3)
    assert agreed.commit("c1", Moment(3, 1)) == Moment(3, 1)
    with pytest.raises(ValueError, match="agreed on already"):
        agreed.prepare(Change("c1", "subscribe", {}))


def test_what_is_cancelled_does_not_apply_and_what_is_in_force_is_taken_back() -> None:
    agreed = agreement([0.0])
    for name in ("c1", "c2", "c3"):
        agreed.prepare(Change(name, "subscribe", {"id": f"s-{name}"}))
    agreed.commit("c2", Moment(1))
    agreed.commit("c3", Moment(1))
    assert agreed.cancel("c1") is None
    assert agreed.cancel("c2") is None
    with pytest.raises(ValueError, match="c1 is not prepared"):
        agreed.commit("c1", Moment(1))
    assert [change.id for change in agreed.begin(1)] == ["c3"]
    for _ in range(2):
        assert agreed.cancel("c3") is not None
    (undone,) = agreed.begin(2)
    assert (undone.kind, undone.body) == ("unsubscribe", {"id": "s-c3"})
    assert agreed.begin(3) == []


def test_commits_that_never_come_are_forgotten() -> None:
    seconds = [0.0]
    agreed = agreement(seconds)
    for number in range(MOST_PREPARED):
        agreed.prepare(Change(f"c{number}", "subscribe", {}))
    with pytest.raises(ValueError, match="wait for their commit"):
        agreed.prepare(Change("one-more", "subscribe", {}))
    seconds[0] = FORGET_SECONDS + 1
    agreed.prepare(Change("one-more", "subscribe", {}))
    assert [change.id for change in agreed.prepared] == ["one-more"]
    with pytest.raises(ValueError, match="c0 is not prepared"):
        agreed.commit("c0", Moment(1))


def test_a_commit_is_refused_or_applies_at_its_step_whenever_it_comes() -> None:
    """While steps begin on one thread, commits for the next step come on another."""
    agreed = Agreement(time.monotonic)
    accepted: dict[str, int] = {}
    applied: dict[str, tuple[int, int]] = {}
    over = threading.Event()

    def train() -> None:
        step = 0
        while not over.is_set() or agreed.open:
            step += 1
            for change in agreed.begin(step):
                applied[change.id] = (change.at.step, step)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for number in range(2000):
            name = f"c{number}"
            agreed.prepare(Change(name, "subscribe", {}))
            try:
                accepted[name] = agreed.commit(name, Moment(agreed.step + 1)).step
            except ValueError:
                agreed.cancel(name)
    finally:
        over.set()
        thread.join()
    assert applied
    assert {name: (at, at) for name, at in accepted.items()} == applied


def test_what_a_rank_sends_of_a_step_is_limited_and_counted() -> None:
    point, _ = two_points()
    rank = make_rank([point], frame_bytes=8)
    rank.subscribe("**", Moment(0))
    for step in range(2):
        rank.board.step_begin(step)
        for microbatch in range(5):
            point.deliver(ONE, Moment(step, microbatch))
    assert len(rank.samples()) == 4, "two sums of four bytes a step"
    assert rank.sampling.over_limit == 6


@pytest.mark.parametrize(
    ("what", "parameters", "taps", "said"),
    [
        ("raw", {"bytes": 1 << 20}, 9, "asks for 9.0 MB .* scope.frame_mb is 8"),
        ("raw", {"bytes": 1 << 10}, 9, ""),
        ("tiles", {"grid": [1024, 1024]}, 9, "asks for 9.0 MB"),
        ("statistics", {}, 5000, "means 5000 taps of this rank, more than 4096"),
        ("histogram", {}, 4000, "asks for 9.7 MB"),
        ("rows", {"rows": [0, 1]}, 9, ""),
    ],
)
def test_subscriptions_beyond_the_limits_are_refused(what: Any, parameters: Any, taps: int, said: str) -> None:
    subscription = Subscription("layers.*.output", what, parameters=parameters)
    offered = [Tap(f"layers.{n}.output", "activation", shape=(2048, 4096), dtype="bfloat16") for n in range(taps)]
    if said:
        with pytest.raises(ValueError, match=said):
            check_limits(subscription, offered, 0, ScopeConfig())
    else:
        check_limits(subscription, offered, 0, ScopeConfig())
    with pytest.raises(ValueError, match=r"scope\.subscriptions is 3"):
        check_limits(subscription, offered[:1], 3, ScopeConfig(subscriptions=3))
