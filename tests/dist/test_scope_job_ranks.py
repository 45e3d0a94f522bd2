"""Two real ranks over gloo, a hub in this process, and a collector that does as the test says: changes become visible
at the agreed step on both ranks, the job's numbers stay the same bit for bit, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.optim.optimizer import _global_optimizer_pre_hooks

import trimtab
from trimtab.config import ControlConfig
from trimtab.control.endpoint import Inbox, NoReply
from trimtab.control.messages import from_json, to_json
from trimtab.control.opening import join, open_hub
from trimtab.scope.frame import Frame, decode_all
from trimtab.scope.messages import BEAT, CANCEL, COMMIT, FRAME, HERE, NOTICE, PREPARE, STATE, TAPS

# From Python 3.12 on it is warned of forks beside threads; the ranks use none of this process's.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
WORLD = 2
STEPS = 8
AHEAD_SECONDS = 0.25
"""That leave a commit its time."""
PATIENCE = 30.0
CONTROL = {"transport": "tcp"}
TCP = ControlConfig(transport="tcp")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _train(session: Any, until: Path | None = None) -> list[float]:
    """At least ``STEPS`` steps of two microbatches, and on until there is the file ``until``; losses of the first, and
    of the last."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses: list[float] = []
    more = torch.ones(1)
    while len(losses) < STEPS or more.item():
        if session is not None:
            session.step()
        optimizer.zero_grad()
        for microbatch in range(2):
            loss = model(torch.full((4, 16, 32), 0.1 * (dist.get_rank() + microbatch + len(losses) % STEPS)))
            loss = loss.square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        more.fill_(0.0 if until is None or until.exists() else 1.0)
        dist.broadcast(more, 0)
    return losses


def _started(done: str, rank: int) -> Path:
    return Path(done).with_name(f"started-{rank}")


def _job(rank: int, folder: str, done: str, scope: dict[str, Any]) -> dict[str, Any]:
    _started(done, rank).touch()
    dist.init_process_group("gloo")
    scope = {"look_seconds": 0.1, "budget": 1.0} | scope
    with trimtab.attach(
        engine={"name": "torch"}, record={"dir": folder, "enabled": False}, control=CONTROL, scope=scope
    ) as session:
        attached = _train(session, Path(done))
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("trimtab")]
    hooks = len(_global_optimizer_pre_hooks)
    return {"attached": attached, "expected": _again(len(attached)), "left": left, "hooks": hooks}


def _again(steps: int) -> list[float]:
    """The same job without trimtab, as many steps."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(2):
            loss = model(torch.full((4, 16, 32), 0.1 * (dist.get_rank() + microbatch + step % STEPS)))
            loss = loss.square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Collector:
    """Asks and listens."""

    def __init__(self, run: Path) -> None:
        self.client = join("scope", TCP, run, {})
        self.frames: dict[tuple[str, int], list[Frame]] = defaultdict(list)
        """By subscription and rank."""
        self.notices: list[dict[str, Any]] = []
        self.beats: dict[int, dict[str, Any]] = {}
        self._inbox = Inbox()
        for subject in (FRAME, NOTICE, BEAT):
            self.client.subscribe(subject, self._inbox.put)
        assert self.client.wait_connected(PATIENCE)

    def until(self, true: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := true()):
            assert time.monotonic() < deadline, (self.beats, self.notices)
            self.client.publish(HERE, b"")
            for message in self._inbox.take(0.05):
                if message.subject == FRAME:
                    for frame in decode_all(message.body):
                        self.frames[frame.subscription, frame.rank].append(frame)
                elif message.subject == NOTICE:
                    self.notices.append(from_json(message.body))
                else:
                    beat = from_json(message.body)
                    self.beats[beat["rank"]] = beat
        return found

    def ask(self, subject: str, rank: int, **body: Any) -> Any:
        def answer() -> Any:
            try:
                return from_json(self.client.request(f"scope.{rank}", subject, to_json(body)).result(PATIENCE)) or True
            except NoReply as reply:
                if "is not connected" in str(reply) or "has not shown its model" in str(reply):
                    return None
                raise

        return self.until(answer)

    def change(self, change: str, kind: str, body: dict[str, Any]) -> int:
        """On all ranks; the step."""
        prepared = [self.ask(PREPARE, rank, change=change, kind=kind, body=body) for rank in range(WORLD)]
        assert all(answer["matched"] for answer in prepared) or kind != "subscribe"
        shortest = min(answer["seconds_per_step"] for answer in prepared)
        step = max(answer["step"] for answer in prepared) + 3 + int(AHEAD_SECONDS / max(shortest, 1e-3))
        for rank in range(WORLD):
            self.ask(COMMIT, rank, change=change, step=step)
        return step

    def applied(self, change: str) -> list[dict[str, Any]]:
        found = [notice for notice in self.notices if notice.get("change") == change]
        return found if len(found) == WORLD else []

    def close(self) -> None:
        self.client.close()


def _in_background(
    folder: str, done: str, scope: dict[str, Any], allow_warnings: bool = False
) -> tuple[threading.Thread, list[Any]]:
    """The job, whose ranks have been forked: from a process with threads that may hold locks, they must not be."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.extend(run_ranks(WORLD, _job, folder, done, scope, allow_warnings=allow_warnings))
        except AssertionError as error:
            results.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while thread.is_alive() and not all(_started(done, rank).exists() for rank in range(WORLD)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return thread, results


def _check(results: list[Any]) -> None:
    assert len(results) == WORLD, results
    for result in results:
        assert result["attached"] == result["expected"]
        assert (result["left"], result["hooks"]) == ([], 0)


def _subscription(pattern: str, name: str, every: int = 1) -> dict[str, Any]:
    return {"pattern": pattern, "what": "statistics", "when": {"every": every}, "id": name}


def test_changes_are_visible_at_the_agreed_step_on_all_ranks_and_the_numbers_stay_the_same(tmp_path: Path) -> None:
    done, run = tmp_path / "done", tmp_path / "run"
    run.mkdir()
    job, results = _in_background(str(run), str(done), {})
    try:
        with open_hub(TCP, run, {}):
            collector = Collector(run)
            for rank in range(WORLD):  # both have shown their model
                collector.until(lambda rank=rank: collector.ask(TAPS, rank)["taps"])
            names = {tap["name"] for tap in collector.ask(TAPS, 1)["taps"]}
            assert {"layers.0.output", "layers.1.output", "layers.1.output.grad"} <= names

            asked = time.monotonic()
            begin = collector.change("c1", "subscribe", _subscription("layers.*.output", "s1"))
            collector.until(lambda: collector.applied("c1"))
            collector.until(lambda: all(len(collector.frames["s1", rank]) >= 40 for rank in range(WORLD)))
            assert time.monotonic() - asked < 10
            end = collector.change("c2", "unsubscribe", {"id": "s1"})
            collector.until(lambda: collector.applied("c2"))
            collector.until(lambda: all(beat["subscriptions"] == {} for beat in collector.beats.values()))
            many = (end - begin) * 2 * 2  # the last of them may come behind the beat
            collector.until(lambda: all(len(collector.frames["s1", rank]) >= many for rank in range(WORLD)))
            assert {notice["step"] for notice in collector.applied("c1")} == {begin}
            assert {notice["step"] for notice in collector.applied("c2")} == {end}
            for rank in range(WORLD):
                frames = collector.frames["s1", rank]
                dropped = collector.beats[rank]["dropped"]
                moments = [(frame.tap, frame.step, frame.microbatch) for frame in frames]
                assert min(frame.step for frame in frames) == begin
                assert begin < max(frame.step for frame in frames) < end
                assert len(set(moments)) == len(moments), "each once"
                assert dropped == 0
                assert len(moments) == many, "two layers, two microbatches"
                assert frames[0].arrays["vector"][0] == 4 * 16 * 32

            late = collector.ask(PREPARE, 0, change="c3", kind="subscribe", body=_subscription("**.grad", "s2"))["step"]
            with pytest.raises(NoReply, match="late: step"):
                collector.ask(COMMIT, 0, change="c3", step=late)
            body = _subscription("{parameters,optimizer}.**", "s3", every=5)
            collector.ask(PREPARE, 1, change="c4", kind="subscribe", body=body)
            collector.ask(COMMIT, 1, change="c4", step=10**6)
            assert collector.ask(CANCEL, 1, change="c4")["applied"] is False
            assert [collector.ask(STATE, rank)["open"] for rank in range(WORLD)] == [["c3"], []]

            collector.change("c5", "subscribe", body)
            state = ("parameters.layers.0.mlp.0.weight", "optimizer.layers.1.mlp.2.weight.exp_avg")
            for rank in range(WORLD):
                frames = collector.frames["s3", rank]
                collector.until(lambda frames=frames: {frame.tap for frame in frames} >= set(state))
                assert all(frame.step % 5 == 0 and frame.microbatch == -1 for frame in frames)
            done.write_text("")  # with a subscription in force
            job.join()
            collector.close()
    finally:
        done.write_text("")
        job.join()
    _check(results)


def _hub_alone(folder: str, ready: Any) -> None:
    """A hub in a process of its own."""
    _opened = open_hub(TCP, Path(folder), {})
    ready.set()
    threading.Event().wait()


def test_a_collector_is_killed_and_its_successor_adopts_what_the_ranks_have_kept(tmp_path: Path) -> None:
    done, run = tmp_path / "done", tmp_path / "run"
    run.mkdir()
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    hub = context.Process(target=_hub_alone, args=(str(run), ready), daemon=True)
    hub.start()
    try:
        assert ready.wait(PATIENCE)
        job, results = _in_background(str(run), str(done), {"lease_seconds": 0.5, "budget": 1e-9}, allow_warnings=True)
        collector = Collector(run)
        collector.change("c1", "subscribe", _subscription("layers.*.output", "s1", every=3))
        collector.until(lambda: collector.applied("c1"))
        paused = collector.until(lambda: [notice for notice in collector.notices if notice["kind"] == "paused"])
        assert paused[0]["details"]["why"] == "budget"
        assert hub.pid is not None
        os.kill(hub.pid, signal.SIGKILL)
        hub.join()
        collector.close()
        with open_hub(TCP, run, {}):  # its place and its secret lie there yet
            collector = Collector(run)
            for rank in range(WORLD):
                kept = collector.ask(STATE, rank)["subscriptions"]
                assert [one["id"] for one in kept] == ["s1"]
            collector.until(lambda: len(collector.beats) == WORLD)
            assert {state for beat in collector.beats.values() for state in beat["subscriptions"].values()} <= {
                "budget",
                "lease",
            }
            collector.change("c2", "unsubscribe", {"id": "s1"})
            collector.until(lambda: collector.applied("c2"))
            done.write_text("")
            job.join()
            collector.close()
    finally:
        done.write_text("")
        hub.kill()
        hub.join()
    job.join()
    _check(results)
