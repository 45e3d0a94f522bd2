"""A job that is restarted, with another number of ranks, and killed in between: each attempt can be read."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks

import trimtab
from trimtab.traces.read import read

STEPS = 4


def train(rank: int, directory: str, first: int, killed: bool) -> dict[str, Any]:
    """``STEPS`` steps of an all-reduce each, from step ``first`` on; the second is not survived if ``killed``."""
    with trimtab.attach(engine={"name": "torch"}, record={"dir": directory, "flush_seconds": 0.01}) as session:
        dist.init_process_group("gloo")
        for step in range(first, first + STEPS):
            session.step(step)
            dist.all_reduce(torch.ones(4))
            if killed and step == first + 2:
                assert session.recorder is not None
                assert session.recorder.writer is not None
                session.recorder.writer.stop(10.0)  # what a flush would have written
                os.kill(os.getpid(), signal.SIGKILL)
        return {"run_id": session.identity.run_id, "attempt": session.identity.attempt}


def test_an_elastic_restart_with_fewer_ranks(tmp_path: Path) -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "job"}
    with pytest.raises(RankError, match=r"exit code -9"):
        run_ranks(3, train, str(tmp_path), 0, True, env=elastic)
    said = run_ranks(2, train, str(tmp_path), 100, False, env=elastic | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert said == [{"run_id": "job", "attempt": 1}] * 2

    trace = read(tmp_path)
    assert (trace.run_id, trace.attempt, trace.world_size, sorted(trace.ranks)) == ("job", 1, 2, [0, 1])
    assert trace.events["step"].drop_nulls().unique().sort().to_list() == [100, 101, 102, 103]
    assert trace.warnings == ("run 'job' was started with 3 ranks, too (attempt 0): what its 2 ranks recorded is read",)
    before = read(tmp_path, attempt=0)
    assert (before.world_size, sorted(before.ranks)) == (3, [0, 1, 2])
    assert {0, 1} <= set(before.events["step"].drop_nulls().to_list())


def test_a_plain_rerun_of_the_same_run_on_disks_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"TRIMTAB_RECORD_RUN_ID": "mine"}
    for first in (0, 50):
        run_ranks(2, train, str(tmp_path / "{host}"), first, False, env=env)
    (node,) = tmp_path.iterdir()
    other = tmp_path / "elsewhere"
    other.mkdir()
    for path in node.glob("rank00001-*"):
        path.rename(other / path.name)
    trace = read(node, other)
    assert (trace.run_id, trace.attempt, sorted(trace.ranks)) == ("mine", 1, [0, 1])
    assert trace.events["step"].drop_nulls().min() == 50
    assert trace.warnings == ("run 'mine' was started again: its last attempt is read, not earlier ones",)
    assert read(tmp_path, attempt=0).events["step"].drop_nulls().max() == STEPS - 1
