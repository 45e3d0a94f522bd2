"""What the page is told of a running job by watch: alarms, how far each rank is off its peers, and where it stands."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from online_jobs import Job
from scope_server_parts import site

from trimtab.scan.online.summary import RankSummary
from trimtab.scope.server.answers import to_json
from trimtab.watch.plain import Watched, last_steps

RANKS, STEPS, ONSET = 8, 40, 30


def slow(rank: int, step: int, took: dict[str, float]) -> None:
    """Rank 3 computes 1.5 times as long from a step on."""
    took["compute"] *= 1.5 if rank == 3 and step >= ONSET else 1.0


@pytest.fixture(scope="module")
def watched() -> Watched:
    found, job = Watched(), Job(RANKS, stages=2, disturb=slow)
    for number in range(STEPS):
        found.take(job.step(number), float(number))
    return found


def test_nothing_heard_yet() -> None:
    state = Watched().state(0.0)
    assert (state["step"], state["world_size"], state["excess"], state["coordinates"]) == (-1, 0, [], [])
    assert last_steps(Watched().history(), 5)["excess"].shape == (0, 0)


def test_the_slow_rank_stands_out_and_its_place_is_known(watched: Watched) -> None:
    state = json.loads(to_json(watched.state(float(STEPS))))
    assert state["ready"]
    assert [alarm["ranks"] for alarm in state["alarms"]] == [[3]]
    assert int(np.argmax(state["excess"])) == 3
    assert state["excess"][3] == pytest.approx(np.log(1.5), abs=0.1)
    assert state["coordinates"][5] == {"tp": 0, "cp": 0, "ep": 0, "dp": 5, "pp": 1}


def test_its_last_steps_show_the_onset(watched: Watched) -> None:
    said = json.loads(to_json(last_steps(watched.history(), 20)))
    assert said["steps"] == list(range(said["steps"][-1] - 19, said["steps"][-1] + 1))
    row = dict(zip(said["steps"], said["excess"][3], strict=True))
    assert max(row[step] for step in said["steps"] if step < ONSET) < 0.2 < min(row[step] for step in (32, 35))
    assert len(said["excess"]) == RANKS
    assert len(said["seconds"]) == 20


def test_another_attempt_begins_anew(watched: Watched) -> None:
    found = Watched()
    first, again = Job(4).step(0), RankSummary("run", 1, 0, 2, "node", 0, ())
    found.take([*first, again], 0.0)
    assert found.state(0.0)["coordinates"] == [None, None]


def test_where_nobody_watches_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with site(tmp_path / "run") as shown:
        for path in ("/watch", "/watch/steps"):
            code, line = shown.refused(path)
            assert (code, "nobody watches" in line) == (503, True)
