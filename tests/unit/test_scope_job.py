"""A rank's side of scope without a hub: which points are connected when, what is sampled, what fails alone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from scope_job_fakes import FakePoint, FakeState, make_rank  # noqa: E402

from trimtab.scope.moment import Moment  # noqa: E402
from trimtab.scope.names import Tap  # noqa: E402
from trimtab.scope.subscription import When  # noqa: E402
from trimtab.scope.taps.points import ModelPoints  # noqa: E402

ONE = torch.ones(2, 3)


def two_points() -> tuple[FakePoint, FakePoint]:
    return FakePoint("layers.0.output", 0), FakePoint("layers.1.output", 1)


def test_a_change_is_visible_at_exactly_its_step_and_microbatch() -> None:
    point, other = two_points()
    rank = make_rank([point, other])
    rank.subscribe("layers.0.*", Moment(2, 1))
    for step in range(4):
        rank.board.step_begin(step)
        for microbatch in range(3):
            point.deliver(ONE, Moment(step, microbatch))
            other.deliver(ONE, Moment(step, microbatch))
        if step == 2:
            rank.change("c-off", "unsubscribe", {"id": "s1"}, Moment(3, 2))
    seen = [(2, 1), (2, 2), (3, 0), (3, 1)]
    assert rank.samples() == [("layers.0.output", moment, 6.0) for moment in seen]
    rank.board.step_begin(4)
    assert point.receive is None
    assert not rank.board.subscriptions
    assert (point.connections, other.connections) == (1, 0)
    assert rank.kinds() == ["applied", "applied"]


def test_a_point_is_connected_once_for_all_and_only_in_steps_in_which_something_is_due() -> None:
    point, other = two_points()
    rank = make_rank([point, other])
    rank.subscribe("layers.*.output", Moment(0), "a", When(every=4))
    rank.subscribe("layers.0.output", Moment(0), "b", When(every=2))
    connected = []
    for step in range(8):
        rank.board.step_begin(step)
        connected.append((point.receive is not None, other.receive is not None))
        point.deliver(ONE, Moment(step))
    both, first, none = (True, True), (True, False), (False, False)
    assert connected == [both, none, first, none, both, none, first, none]
    assert len(rank.samples()) == 6
    assert point.connections == 4


def test_what_is_recomputed_is_not_seen_twice() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.subscribe("**", Moment(0))
    rank.board.step_begin(0)
    point.deliver(ONE, Moment(0, 0))
    point.deliver(ONE, Moment(0, 0, recompute=True))
    assert len(rank.samples()) == 1


def test_which_microbatches_layers_and_ranks() -> None:
    point, other = two_points()
    rank = make_rank([point, other])
    rank.subscribe("layers.*.output", Moment(0), "a", When(microbatches=(1,)), layers=(1,))
    rank.subscribe("layers.*.output", Moment(0), "b", ranks=(3, 4))
    rank.board.step_begin(0)
    for microbatch in range(3):
        for one in (point, other):
            one.deliver(ONE, Moment(0, microbatch))
    assert [(tap, moment) for tap, moment, _ in rank.samples()] == [("layers.1.output", (0, 1))]


def test_a_subscription_ends_by_itself_after_its_last_step() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.subscribe("**", Moment(0), when=When(first=1, last=2))
    for step in range(5):
        rank.board.step_begin(step)
        point.deliver(ONE, Moment(step))
    assert [moment for _, moment, _ in rank.samples()] == [(1, 0), (2, 0)]
    assert rank.kinds() == ["applied", "expired"]
    assert not rank.board.subscriptions


def test_state_is_read_when_the_optimizer_is_about_to_step() -> None:
    weight, nothing = FakeState("parameters.weight", torch.ones(4)), FakeState("optimizer.weight.exp_avg", None)
    rank = make_rank([], [weight, nothing])
    rank.subscribe("{parameters,optimizer}.**", Moment(1))
    for step in range(3):
        rank.board.step_begin(step)
        assert weight.value is not None
        weight.value += 1
        rank.board.optimizer_begin()
        rank.board.optimizer_begin()
    assert rank.samples() == [("parameters.weight", (1, -1), 12.0), ("parameters.weight", (2, -1), 16.0)]


def test_above_the_budget_it_pauses_is_tried_and_resumes() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.subscribe("**", Moment(0))
    rank.measures.cost_ns = 5_000_000
    connected: list[int] = []
    for step in range(700):
        rank.clock.ns += 100_000_000
        rank.board.step_begin(step)
        if point.receive is not None:
            connected.append(step)
        point.deliver(ONE, Moment(step))
        if step == 100:
            rank.measures.cost_ns = 100_000
    assert rank.kinds() == ["applied", "paused", "resumed"]
    paused, resumed = (notice["step"] for notice in rank.notices[1:])
    assert paused < 5
    assert "takes 4.76% of the training time" in rank.notices[1]["text"]
    pauses = [step for step in range(paused, resumed) if step in connected]
    assert len(pauses) == 1, "a trial"
    assert connected[-1] == 699


def test_a_job_that_jumps_over_the_step_applies_the_change_at_the_next_and_says_so() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.board.step_begin(10)
    rank.subscribe("**", Moment(12), "a")
    rank.subscribe("**", Moment(30), "b")
    rank.board.step_begin(20)  # told by session.step(20)
    point.deliver(ONE, Moment(20))
    rank.board.step_begin(5)  # back to a checkpoint
    point.deliver(ONE, Moment(5))
    assert "passed over step 12" in rank.notices[0]["text"]
    assert [moment for _, moment, _ in rank.samples()] == [(20, 0), (5, 0)]
    assert list(rank.board.subscriptions) == ["a"], "the other waits for its step"
    rank.board.step_begin(30)
    assert list(rank.board.subscriptions) == ["a", "b"]


def test_a_subscription_that_fails_is_told_of_and_the_others_go_on() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.subscribe("**", Moment(0))
    rank.measures.fails = True
    for step in range(3):
        rank.board.step_begin(step)
        assert point.deliver(ONE, Moment(step)) is ONE
    assert rank.kinds() == ["applied", "error"]
    assert rank.notices[1]["text"] == "RuntimeError: out of something"
    assert rank.board.subscriptions["s1"].state == "error"
    assert point.receive is None, "nothing is hooked for it any more"


def test_models_that_come_later_are_looked_through_and_a_model_built_anew_is_connected_again() -> None:
    point, later = two_points()
    rank = make_rank([point])
    rank.subscribe("layers.*.output", Moment(0))
    rank.board.step_begin(0)
    again = FakePoint("layers.0.output", 0)
    rank.board.meet(ModelPoints([later, again]))
    assert point.receive is None
    rank.board.step_begin(1)
    for one in (again, later):
        one.deliver(ONE, Moment(1))
    assert [tap for tap, *_ in rank.samples()] == ["layers.0.output", "layers.1.output"]


def test_a_model_that_the_job_drops_is_not_kept_alive() -> None:
    class Model:
        pass

    point, other = two_points()
    rank = make_rank()
    model = Model()
    gone = weakref.ref(model)
    rank.board.meet(ModelPoints([point]), model)
    del model
    gc.collect()
    assert gone() is None
    assert rank.board.registry.names() == []
    second = Model()
    weight = FakeState("parameters.w", ONE)
    rank.board.meet(ModelPoints([other], (), [weight]), second)
    rank.board.add_state([FakeState("optimizer.w.exp_avg", ONE), FakeState("optimizer.w2.exp_avg", ONE)])
    assert len(rank.board.registry.names()) == 4
    del second
    gc.collect()
    assert rank.board.registry.names() == ["optimizer.w2.exp_avg"]


def test_what_cannot_be_connected_or_read_ends_alone() -> None:
    point, other = two_points()

    def no(*_: Any) -> Any:
        raise RuntimeError("not here")

    point.connect = no  # type: ignore[method-assign]
    broken = FakeState("parameters.w", ONE)
    broken.tensor = no  # type: ignore[method-assign]
    rank = make_rank([point, other], [broken])
    for name, pattern in (("a", "layers.0.output"), ("b", "layers.1.output"), ("c", "parameters.*")):
        rank.subscribe(pattern, Moment(0), name)
    for step in range(2):
        rank.board.step_begin(step)
        other.deliver(ONE, Moment(step))
        rank.board.optimizer_begin()
    assert {name: active.state for name, active in rank.board.subscriptions.items()} == {
        "a": "error",
        "b": "active",
        "c": "error",
    }
    assert len(rank.samples()) == 2
    assert rank.kinds().count("error") == 2


def test_the_lease_pauses_and_a_collector_that_is_back_resumes() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.subscribe("**", Moment(0))
    rank.board.step_begin(0)
    rank.board.away = True
    rank.board.step_begin(1)
    assert point.receive is None
    assert rank.board.subscriptions["s1"].state == "lease"
    rank.board.away = False
    rank.board.step_begin(2)
    point.deliver(ONE, Moment(2))
    assert len(rank.samples()) == 1
    assert rank.kinds() == ["applied", "paused", "resumed"]


def test_what_takes_several_ranks_together_never_stops_on_one_alone() -> None:
    point = FakePoint("layers.0.attention.map", 0)
    point.tap = Tap(point.tap.name, "attention", shard=(("cp", 1, 2),))
    rank = make_rank([point], frame_bytes=1)
    rank.subscribe("**", Moment(0), what="attention")
    rank.board.away = True
    for step in range(5):
        rank.clock.ns += 1000
        rank.board.step_begin(step)
        rank.measures.cost_ns = 500
        point.deliver(ONE, Moment(step, 0))
        point.deliver(ONE, Moment(step, 1))
    assert len(rank.samples()) == 10
    (told,) = (notice for notice in rank.notices if notice["kind"] == "error")
    assert (told["why"], told["end"]) == ("budget", True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_what_is_sampled_is_what_was_asked_for(wishes: list[tuple[int, int, int, int]]) -> None:
    point, other = two_points()
    rank = make_rank([point, other])
    expected: list[tuple[str, tuple[int, int]]] = []
    for number, (step, microbatch, every, length) in enumerate(wishes):
        when = When(every, step, step + length)
        rank.subscribe("layers.0.output", Moment(step, microbatch), f"s{number}", when)
        expected += [
            ("layers.0.output", (at, m))
            for at in range(step, step + length + 1, every)
            for m in range(3)
            if at < 12 and (at, m) >= (step, microbatch)
        ]
    for step in range(12):
        rank.board.step_begin(step)
        for microbatch in range(3):
            point.deliver(ONE, Moment(step, microbatch))
            other.deliver(ONE, Moment(step, microbatch))
    assert sorted((tap, moment) for tap, moment, _ in rank.samples()) == sorted(expected)
    assert other.connections == 0
