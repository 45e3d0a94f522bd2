"""Perturbations, paired runs and who listens beside them, on a rank without a hub."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scope_job_fakes import FakePoint, make_rank  # noqa: E402

from trimtab.scope.moment import Moment  # noqa: E402

ONE = torch.ones(2, 3)


def two_points() -> tuple[FakePoint, FakePoint]:
    return FakePoint("layers.0.output", 0), FakePoint("layers.1.output", 1)


class _Disturbance:
    """Adds a number as long as it is in force."""

    def __init__(self, name: str, number: float, last: int) -> None:
        from trimtab.scope.perturbation import Perturbation

        self.perturbation = Perturbation("layers.0.output", "offset", 0, last, id=name)
        self.matched = ["layers.0.output"]
        self.calls: list[Any] = []
        self._number, self._last = number, last

    def receivers(self) -> dict[str, Any]:
        def receive(x: Any, moment: Moment) -> Any:
            if self._number != self._number:
                raise RuntimeError("broken")
            return x + self._number

        return {"layers.0.output": receive}

    def step_begin(self, step: int) -> None:
        self.calls.append(step)

    def over(self, step: int) -> bool:
        return step > self._last

    def revert(self) -> dict[str, Any]:
        self.calls.append("revert")
        return {"elements": 3}

    def end(self, why: str) -> None:
        self.calls.append(why)


def test_perturbations_come_first_and_samples_see_what_goes_on() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.subscribe("layers.0.output", Moment(0))
    one, two = _Disturbance("p1", 1.0, 1), _Disturbance("p2", 2.0, 2)
    rank.change("c1", "perturb", {"id": "p1"}, Moment(1), one)
    rank.change("c2", "perturb", {"id": "p2"}, Moment(1), two)
    sums = []
    for step in range(4):
        rank.board.step_begin(step)
        with rank.board.mute():
            assert point.deliver(ONE, Moment(step)) is ONE
        sums.append(float(point.deliver(ONE, Moment(step)).sum()))
    assert sums == [6.0, 24.0, 18.0, 6.0]
    assert [value for *_, value in rank.samples()] == sums
    assert (one.calls, two.calls) == ([1, 2, "expired"], [1, 2, 3, "expired"])
    rank.change("c3", "revert", {"id": "p1"}, Moment(4))
    rank.board.step_begin(4)
    assert one.calls[-1] == "revert"
    assert next(notice for notice in rank.notices if notice["kind"] == "reverted")["elements"] == 3
    assert list(rank.board.disturbing.ended) == ["p2"]


def test_what_is_disturbed_has_been_seen() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    registry = rank.board.registry
    before = registry.shown
    rank.change("c1", "perturb", {"id": "p1"}, Moment(0), _Disturbance("p1", 1.0, 1))
    rank.board.step_begin(0)
    point.deliver(ONE, Moment(0))
    (tap,) = registry.taps()
    assert (tap.shape, tap.dtype) == ((2, 3), "float32")
    assert registry.shown > before  # so that collectors ask again


def test_a_perturbation_that_fails_ends_and_the_tensor_goes_on() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    broken = _Disturbance("p1", float("nan"), 9)
    rank.change("c1", "perturb", {"id": "p1"}, Moment(0), broken)
    rank.board.step_begin(0)
    assert point.deliver(ONE, Moment(0)) is ONE
    rank.board.step_begin(1)
    assert point.receive is None
    assert rank.kinds() == ["applied", "error"]
    assert broken.calls[-1] == "expired"


def test_closing_takes_everything_out() -> None:
    point, _ = two_points()
    rank = make_rank([point])
    rank.subscribe("**", Moment(0))
    lasting = _Disturbance("p1", 1.0, 9)
    rank.change("c1", "perturb", {"id": "p1"}, Moment(0), lasting)
    rank.board.step_begin(0)
    heard: list[float] = []
    rank.board.listen("layers.0.output", lambda x, moment: heard.append(float(x.sum())))
    with rank.board.mute():
        point.deliver(ONE, Moment(0))
    assert heard == [6.0], "who listens aside is not muted"
    rank.board.close()
    assert point.receive is None
    assert lasting.calls[-1] == "detached"
    assert point.deliver(ONE, Moment(0)) is ONE


def test_something_done_at_an_agreed_step_is_done_after_the_changes_of_that_step() -> None:
    point, _ = two_points()
    rank = make_rank([point])

    class Aside:
        id = "p1"

        def __init__(self) -> None:
            self.steps: list[tuple[int, bool]] = []

        def at_step(self, step: int) -> bool:
            self.steps.append((step, point.receive is not None))
            rank.clock.ns += 10**9
            if step == 4:
                raise RuntimeError("no more")
            return True

    aside = Aside()
    rank.change("c1", "pair", {}, Moment(2), aside)
    rank.subscribe("**", Moment(3))
    for step in range(6):
        rank.clock.ns += 10**7
        rank.board.step_begin(step)
    assert aside.steps == [(2, False), (3, True), (4, True)]
    assert rank.board.seconds_per_step == pytest.approx(0.01), "its time is not the training's"
    assert rank.kinds() == ["applied", "applied", "error"]
