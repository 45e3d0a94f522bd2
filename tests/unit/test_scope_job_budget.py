"""The overhead budget: shares, pauses, trials, and that nothing flaps. A clock that is set."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.scope.job.budget import Budget

MS = 1_000_000


@dataclass
class Job:
    """Steps of ``step_ms``; each subscription is due every ``every`` steps and costs ``cost_ms`` then."""

    budget: Budget
    seconds: list[float]
    step_ms: float = 100.0
    subscriptions: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    step: int = 0
    said: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    spent_ms: float = 0.0

    def add(self, name: str, every: int, cost_ms: float) -> None:
        self.subscriptions[name] = every, cost_ms
        self.budget.add(name, every)

    def run(self, steps: int, noise: random.Random | None = None) -> None:
        for _ in range(steps):
            due: list[str] = []
            for name, (every, cost) in self.subscriptions.items():
                if self.step % every or (self.budget.paused(name) and not self.budget.trial(name)):
                    continue
                cost *= 1 if noise is None else noise.uniform(0.7, 1.3)
                self.budget.spent(name, round(cost * MS))
                self.spent_ms += cost
                due.append(name)
            self.step += 1
            self.seconds[0] += self.step_ms / 1e3
            for decision in self.budget.step(round(self.step_ms * MS), due):
                self.said.append((self.seconds[0], decision.action, decision.id))

    @property
    def share(self) -> float:
        return self.spent_ms / (self.step * self.step_ms)


def job(share: float = 0.01, step_ms: float = 100.0) -> Job:
    seconds = [0.0]
    return Job(Budget(share, lambda: seconds[0]), seconds, step_ms)


def test_a_subscription_of_every_tenth_step_is_averaged_over_its_period() -> None:
    """9 ms of one step in ten of 100 ms are 0.9 %; of each step they are 9 %."""
    sparse, dense = job(), job()
    sparse.add("s", 10, 9.0)
    dense.add("s", 1, 9.0)
    for one in (sparse, dense):
        one.run(400)
    assert sparse.said == []
    assert sparse.budget.overhead == pytest.approx(0.009)
    assert [action for _, action, _ in dense.said] == ["pause"]
    assert dense.budget.share("s") == pytest.approx(0.09)
    assert dense.budget.overhead == 0.0
    assert dense.share < 0.011, "with its trials"


def test_the_most_expensive_pause_first_and_only_as_many_as_are_needed() -> None:
    one = job()
    one.add("small", 1, 0.3)
    one.add("large", 1, 0.9)
    one.add("middle", 1, 0.4)
    one.run(50)
    assert [(action, name) for _, action, name in one.said] == [("pause", "large")]
    assert one.budget.overhead == pytest.approx(0.007)


def test_it_resumes_when_it_fits_again_and_not_before() -> None:
    one = job()
    one.add("a", 1, 0.6)
    one.add("b", 1, 0.7)
    one.run(200)
    assert [(action, name) for _, action, name in one.said] == [("pause", "b")]
    del one.subscriptions["a"]
    one.budget.remove("a")
    one.run(3)
    assert [(action, name) for _, action, name in one.said] == [("pause", "b"), ("resume", "b")]
    one.run(200)
    assert len(one.said) == 2


def test_steps_that_become_longer_make_room() -> None:
    one = job(step_ms=50.0)
    one.add("a", 1, 0.7)
    one.run(100)
    assert one.budget.paused("a")
    one.step_ms = 200.0
    one.run(100)
    assert not one.budget.paused("a")


def test_the_first_step_does_not_count_as_things_are_compiled_in_it() -> None:
    one = job()
    one.add("a", 1, 5000.0)
    one.run(1)
    one.subscriptions["a"] = 1, 0.5
    one.run(100)
    assert one.said == []


def test_one_that_passes_the_budget_by_far_pauses_after_one_measured_step() -> None:
    one = job()
    one.add("a", 1, 200.0)
    one.run(2)
    assert one.budget.paused("a")


def test_a_cost_that_was_a_mistake_is_tried_again() -> None:
    one = job()
    one.add("a", 1, 0.5)
    one.run(10)
    one.subscriptions["a"] = 1, 50.0
    one.run(3)
    assert one.budget.paused("a")
    one.subscriptions["a"] = 1, 0.5
    one.run(290)
    assert one.budget.paused("a"), "not before its time"
    one.run(300)
    assert not one.budget.paused("a")


def test_trials_of_what_never_fits_take_a_tenth_of_the_budget_at_most() -> None:
    one = job()
    one.add("a", 1, 2000.0)
    one.run(3)
    before = one.spent_ms
    one.run(100_000)
    assert len(one.said) == 1
    assert before < one.spent_ms, "it was tried"
    assert (one.spent_ms - before) / (100_000 * one.step_ms) < 0.1 * 0.01 * 1.05


def test_what_may_not_pause_is_told_of_once_and_others_pause_for_it() -> None:
    one = job()
    one.add("kept", 1, 3.0)
    one.budget.keep("kept")
    one.add("other", 1, 0.2)
    one.run(100)
    assert sorted((action, name) for _, action, name in one.said) == [("over", "kept"), ("pause", "other")]
    assert not one.budget.paused("kept")


def test_costs_at_the_border_do_not_flap() -> None:
    """An hour of steps whose cost varies by 30 % around the budget: it changes its mind a few times."""
    one = job()
    one.add("a", 1, 1.0)
    one.run(36_000, random.Random(0))
    assert 1 <= len(one.said) < 30
    gaps = [later - earlier for (earlier, *_), (later, *_) in zip(one.said, one.said[2:], strict=False)]
    assert min(gaps, default=1e9) > 5.0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.floats(0.05, 20.0)), min_size=1, max_size=6))
def test_whatever_is_asked_for_the_budget_is_held(wishes: list[tuple[int, float]]) -> None:
    one = job()
    for number, (every, cost) in enumerate(wishes):
        one.add(f"s{number}", every, cost)
    one.run(150)  # each was measured often enough
    settled, begun = one.spent_ms, one.step
    one.run(1000)
    assert one.budget.overhead <= 0.01 + 1e-9
    assert (one.spent_ms - settled) / ((one.step - begun) * one.step_ms) < 0.01 + 0.0015 * len(wishes)
