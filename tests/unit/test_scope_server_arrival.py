"""Which step of a job that runs is shown: the last one of which everything has come."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from scope_server_parts import Site, record, site

from trimtab.scope.frame import Frame
from trimtab.scope.vector import vector_of

pytestmark = pytest.mark.timeout(30)
TAP = "layers.0.output"
Sent = tuple[int, int, int]
"""Step, rank, microbatch."""


class Training:
    """A collector of which only the beats are looked at."""

    def __init__(self, *steps: int, state: str = "live") -> None:
        self.steps, self.state = list(steps), state

    def status(self) -> dict[str, Any]:
        ranks = {str(rank): {"step": step} for rank, step in enumerate(self.steps)}
        return {"state": self.state, "subscriptions": {}, "seconds_per_step": 0.5, "ranks": ranks}

    def listen(self, callback: object, **which: object) -> Any:
        return lambda: None


def frame(sent: Sent, seconds_ago: float, tap: str = TAP) -> Frame:
    step, rank, microbatch = sent
    arrays = {"vector": vector_of(np.full(4, 1.0 + microbatch)), "shift": np.zeros(1)}
    came = time.time_ns() - int(seconds_ago * 1e9)
    return Frame(tap, "statistics", "s-1", step, microbatch, rank, (("dp", rank, 2),), 0, arrays, {}, came)


def whole(*steps: int) -> list[Sent]:
    return [(step, rank, microbatch) for step in steps for rank in range(2) for microbatch in range(3)]


@contextlib.contextmanager
def training(tmp_path: Path, sent: Iterable[Frame], *steps: int, state: str = "live") -> Generator[Site]:
    """A server of a job whose ranks are at these steps, and have sent this."""
    record(tmp_path, others=sent)
    with site(tmp_path, scope=cast("Any", Training(*steps, state=state))) as opened:
        for _ in range(2):  # what a rank said a second ago is what counts
            opened.service.refresh()
        yield opened


def shown(tmp_path: Path, sent: Iterable[Sent], *steps: int, ago: float = 0.0, state: str = "live") -> tuple[int, bool]:
    """The step of the grid, and is it said to be complete?"""
    with training(tmp_path, [frame(one, ago) for one in sent], *steps, state=state) as opened:
        found = opened.get("/runs/live/grid", tap=TAP)
    return found["step"], found["complete"]


def test_a_step_with_as_many_microbatches_as_before_is_shown_at_once(tmp_path: Path) -> None:
    assert shown(tmp_path, whole(1, 2), 2, 2) == (2, True)


@pytest.mark.parametrize(
    "coming",
    [[(3, 0, 0), (3, 1, 0)], [(3, 0, 0), (3, 0, 1), (3, 0, 2)], whole(3)[:-1]],
    ids=["few microbatches", "one rank", "all but the last"],
)
def test_a_step_that_is_still_coming_is_not(tmp_path: Path, coming: list[Sent]) -> None:
    assert shown(tmp_path, [*whole(1, 2), *coming], 3, 3) == (2, True)


def test_what_has_not_come_for_long_is_shown_as_incomplete(tmp_path: Path) -> None:
    assert shown(tmp_path, [*whole(1, 2), (3, 0, 0)], 3, 3, ago=6.0) == (3, False)


def test_a_rank_that_has_gone_on_is_not_waited_for(tmp_path: Path) -> None:
    """It was over its budget, and dropped the rest."""
    assert shown(tmp_path, [*whole(1, 2), *whole(3)[:-1]], 4, 4) == (3, True)


@pytest.mark.parametrize("state", ["ended", "waiting"])
def test_where_nothing_more_comes_the_last_step_is_shown_whatever_came_of_it(tmp_path: Path, state: str) -> None:
    assert shown(tmp_path, [*whole(1, 2), (3, 0, 0)], state=state) == (3, False)


@pytest.mark.parametrize(("steps", "there"), [((1, 1), False), ((2, 2), True)])
def test_the_first_step_is_complete_when_all_ranks_have_begun_the_next(
    tmp_path: Path, steps: tuple[int, int], there: bool
) -> None:
    with training(tmp_path, [frame(one, 0.0) for one in whole(1)], *steps) as opened:
        for path in ("grid", "frames"):
            query = {"what": "statistics", "format": "json"} if path == "frames" else {}
            response = opened.client.get(
                f"/api/v1/runs/live/{path}", params={"tap": TAP, **query}, headers=opened.headers
            )
            assert response.status_code == 200, response.text
            assert response.json()["step"] == 1
            assert response.json().get("complete", there) is there
            assert response.headers.get("Retry-After") == (None if there else "1")
        (series,) = opened.get("/runs/live/series", tap=TAP)["series"]
        assert series["step"] == ([1] if there else [])


def test_nothing_that_is_answered_has_the_step_that_is_coming(tmp_path: Path) -> None:
    with training(tmp_path, [frame(one, 0.0) for one in [*whole(1, 2), (3, 0, 0)]], 3, 3) as opened:
        ask = {"tap": TAP, "statistic": "n"}
        (series,) = opened.get("/runs/live/series", **ask)["series"]
        assert (series["step"], series["mean"]) == ([1, 2], [24.0, 24.0])
        assert opened.get("/runs/live/steps", tap=TAP)["steps"] == [1, 2]
        for rows in ("taps", "ranks"):
            matrix = opened.get("/runs/live/matrix", pattern=TAP, statistic="n", rows=rows)
            assert matrix["last"] == 3
            assert all(row[2] is None and row[1] is not None for row in matrix["values"])
        table = opened.client.get("/api/v1/runs/live/export", params={"pattern": TAP}, headers=opened.headers)
        assert [line.partition(",")[0] for line in table.text.split()[1:]] == ["1", "2"]


@pytest.mark.parametrize(("step", "again"), [(None, "1"), (3, "1"), (2, None)])
def test_an_answer_says_when_there_will_be_more_to_it(tmp_path: Path, step: int | None, again: str | None) -> None:
    with training(tmp_path, [frame(one, 0.0) for one in [*whole(1, 2), (3, 0, 0)]], 3, 3) as opened:
        asked = {"tap": TAP} if step is None else {"tap": TAP, "step": str(step)}
        response = opened.client.get("/api/v1/runs/live/grid", params=asked, headers=opened.headers)
        assert response.json()["step"] == 2
        assert response.headers.get("Retry-After") == again


def test_layers_have_their_last_column_together(tmp_path: Path) -> None:
    other = "layers.1.output"
    sent = [frame(one, 0.0, tap) for step in (1, 2) for tap in (TAP, other) for one in whole(step)]
    with training(tmp_path, [*sent, *(frame(one, 0.0) for one in whole(3))], 3, 3) as opened:
        matrix = opened.get("/runs/live/matrix", pattern="layers.*.output")
        assert [[value is not None for value in row] for row in matrix["values"]] == [[True, True, False]] * 2
        assert opened.get("/runs/live/grid", tap=TAP)["step"] == 3


def test_the_step_that_a_run_was_stopped_in_is_not_compared(tmp_path: Path) -> None:
    for name, sent in (("a", whole(1, 2, 3)), ("b", [*whole(1, 2), (3, 0, 0)])):
        record(tmp_path / name, name, others=[frame(one, 60.0) for one in sent])
    with site(tmp_path / "a", tmp_path / "b") as opened:
        runs = dict(zip("ab", (one["name"] for one in opened.get("/runs")["runs"]), strict=True))
        found = opened.get("/compare", tap=TAP, **runs)
        assert (found["steps"], found["parts_at"]) == (2, None)
        assert opened.get("/compare/taps", **runs)["parts_at"] is None
        (series,) = opened.get(f"/runs/{runs['b']}/series", tap=TAP)["series"]
        assert series["step"] == [1, 2, 3]
