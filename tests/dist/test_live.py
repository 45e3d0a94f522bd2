"""Real ranks over gloo and a hub in this process: it hears of them, can ask them, and may die without harm."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import trimtab
from trimtab.config import ControlConfig
from trimtab.control.endpoint import Inbox
from trimtab.control.messages import from_json, to_json
from trimtab.control.opening import open_hub
from trimtab.scan.online.summary import Heartbeat, RankSummary, decode

# From Python 3.12 on it is warned of forks beside threads; the ranks use none of this process's.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
STEPS = 6
PATIENCE = 30.0
CONTROL = {"transport": "tcp"}
LIVE = {"look_seconds": 0.1, "heartbeat_seconds": 0.5}


def _train(session: Any, until: Path | None = None) -> list[float]:
    """Steps of a small model, at least ``STEPS``, and on until there is the file ``until``; losses of the first."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    more = torch.ones(1)
    while len(losses) < STEPS or more.item():
        if session is not None:
            session.step()
        loss = model(torch.full((2, 16), float(dist.get_rank() + len(losses) % STEPS))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        more.fill_(0.0 if until is None or until.exists() else 1.0)
        dist.broadcast(more, 0)
    return losses[:STEPS]


def _job(rank: int, folder: str, done: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    expected = _train(None)
    record = {"dir": folder, "run_id": "job", "flush_seconds": 0.1}
    with trimtab.attach(engine={"name": "torch"}, record=record, control=CONTROL, live=LIVE) as session:
        attached = _train(session, Path(done))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("trimtab")]
    return {"expected": expected, "attached": attached, "detached": _train(None), "left": left}


def _in_background(world: int, *args: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(run_ranks(world, _job, *args)))
    thread.start()
    return thread, results


def _check(results: list[Any], world: int) -> None:
    assert len(results) == world
    for result in results:
        assert result["attached"] == result["expected"] == result["detached"]
        assert result["left"] == []


def test_a_hub_hears_of_all_ranks_and_may_ask_them(tmp_path: Path) -> None:
    done, run = tmp_path / "done", tmp_path / "run"
    run.mkdir()
    summaries, heartbeats = Inbox(), Inbox()
    with open_hub(ControlConfig(transport="tcp"), run, {}) as hub:
        hub.subscribe("summary", summaries.put)
        hub.subscribe("heartbeat", heartbeats.put)
        job, results = _in_background(2, str(run), str(done))
        try:
            steps: dict[int, list[int]] = {0: [], 1: []}
            beats: dict[int, Heartbeat] = {}
            deadline = time.monotonic() + PATIENCE
            while (min(map(len, steps.values())) < 3 or len(beats) < 2) and time.monotonic() < deadline:
                for message in summaries.take(0.1):
                    summary = decode(from_json(message.body))
                    assert isinstance(summary, RankSummary)
                    assert message.sender == f"rank.{summary.rank}"
                    steps[summary.rank] += [step.step for step in summary.steps]
                    assert all(step.duration_ns > 0 for step in summary.steps)
                for message in heartbeats.take():
                    beat = decode(from_json(message.body))
                    assert isinstance(beat, Heartbeat)
                    beats[beat.rank] = beat
            dump = json.loads(hub.request("rank.1", "dump").result(PATIENCE))
            window = from_json(hub.request("rank.0", "window", to_json({"steps": 1})).result(PATIENCE))
            while not list(run.glob("*window*.gz")) and time.monotonic() < deadline + PATIENCE:
                summaries.take(0.1)
        finally:
            done.write_text("")
            job.join()
    _check(results, 2)
    assert steps[0]
    for told in steps.values():
        assert told == list(range(told[0], told[0] + len(told))), "each step once, in order"
    assert {group.group for group in beats[0].groups} == {group.group for group in beats[1].groups}
    assert max(group.issued for group in beats[0].groups) > 0
    assert dump["stack"]
    assert window["steps"] == 1
    assert len(list(run.glob("rank00000-*window*.gz"))) == 1
    assert [path.name for path in run.iterdir() if "control" in path.name] == []


def _hub_alone(folder: str, ready: Any, heard: Any) -> None:
    """A hub in a process of its own."""
    opened = open_hub(ControlConfig(transport="tcp"), Path(folder), {})
    opened.hub.subscribe("summary", lambda _: heard.set())
    ready.set()
    threading.Event().wait()


def test_the_hub_is_killed_while_the_job_runs(tmp_path: Path) -> None:
    done, run = tmp_path / "done", tmp_path / "run"
    run.mkdir()
    context = multiprocessing.get_context("fork")
    ready, heard = context.Event(), context.Event()
    hub = context.Process(target=_hub_alone, args=(str(run), ready, heard), daemon=True)
    hub.start()
    try:
        assert ready.wait(PATIENCE)
        job, results = _in_background(2, str(run), str(done))
        try:
            assert heard.wait(PATIENCE)
            assert hub.pid is not None
            os.kill(hub.pid, signal.SIGKILL)
            hub.join()
            inbox = Inbox()
            with open_hub(ControlConfig(transport="tcp"), run, {}) as second:  # its place and its secret lie there yet
                second.subscribe("summary", inbox.put)
                assert inbox.take(PATIENCE), "the ranks have found the next one"
                done.write_text("")
                job.join()
        finally:
            done.write_text("")
            job.join()
    finally:
        hub.kill()
        hub.join()
    _check(results, 2)


def _hanging(rank: int, folder: str, done: str) -> int:
    """Rank 1 comes to the second all-reduce only when ``done`` is there; one runs beside, too."""
    dist.init_process_group("gloo")
    record = {"dir": folder, "run_id": "job", "flush_seconds": 0.1}
    with trimtab.attach(engine={"name": "torch"}, record=record, control=CONTROL, live=LIVE) as session:
        session.step()
        dist.all_reduce(torch.ones(4))
        work = dist.all_reduce(torch.ones(8), async_op=True) if rank == 0 else None
        if rank == 1:
            while not Path(done).exists():
                time.sleep(0.01)
            work = dist.all_reduce(torch.ones(8), async_op=True)
        assert work is not None
        dist.broadcast(torch.ones(16), 0)
        work.wait()
    return session.rank


def test_a_rank_that_waits_says_for_what_and_the_missing_one_how_far_it_came(tmp_path: Path) -> None:
    done, run = tmp_path / "done", tmp_path / "run"
    run.mkdir()
    inbox = Inbox()
    seen: dict[int, Heartbeat] = {}
    with open_hub(ControlConfig(transport="tcp"), run, {}) as hub:
        hub.subscribe("heartbeat", inbox.put)
        job = threading.Thread(target=lambda: run_ranks(2, _hanging, str(run), str(done)))
        job.start()
        try:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and not (len(seen) == 2 and len(seen[0].open) == 2):
                for message in inbox.take(0.1):
                    beat = decode(from_json(message.body))
                    assert isinstance(beat, Heartbeat)
                    seen[beat.rank] = beat
        finally:
            done.write_text("")
            job.join()
    waiting = [(one.op, one.seq, one.bytes, one.blocking) for one in seen[0].open]
    assert waiting == [("all_reduce", 1, 32, False), ("broadcast", 2, 64, True)]
    assert seen[0].open[0].members == ((0, 1, 1),)
    assert seen[1].open == ()
    progress = {rank: [(one.issued, one.completed) for one in beat.groups] for rank, beat in seen.items()}
    assert progress == {0: [(2, 0)], 1: [(0, 0)]}
    assert seen[0].groups[0].group == seen[1].groups[0].group
