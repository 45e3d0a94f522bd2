"""A session against a real hub in this process and a scripted collector: requests, frames, presence, the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scope_job_fakes import Clock, FakePoint, SumMeasures  # noqa: E402

from trimtab.config import Config, ControlConfig, ScopeConfig  # noqa: E402
from trimtab.control.client import Client  # noqa: E402
from trimtab.control.endpoint import Inbox, NoReply  # noqa: E402
from trimtab.control.messages import from_json, to_json  # noqa: E402
from trimtab.control.opening import join, open_hub  # noqa: E402
from trimtab.record.run_identity import Identity  # noqa: E402
from trimtab.scope.frame import Frame, decode_all  # noqa: E402
from trimtab.scope.job.serving import ServerProcess  # noqa: E402
from trimtab.scope.job.session import ScopeSession  # noqa: E402
from trimtab.scope.messages import BEAT, CANCEL, COMMIT, FRAME, HERE, NOTICE, PREPARE, STATE, TAPS  # noqa: E402
from trimtab.scope.moment import Moment  # noqa: E402
from trimtab.scope.subscription import Subscription  # noqa: E402
from trimtab.scope.taps.points import ModelPoints  # noqa: E402

PATIENCE = 20.0
TCP = ControlConfig(transport="tcp")


class Collector:
    """A collector that does as the test says."""

    def __init__(self, run: Path, name: str = "scope") -> None:
        self.client: Client = join(name, TCP, run, {})
        self.seen: dict[str, list[Any]] = {}
        self.inboxes = {subject: Inbox() for subject in (FRAME, NOTICE, BEAT)}
        for subject, inbox in self.inboxes.items():
            self.client.subscribe(subject, inbox.put)
        assert self.client.wait_connected(PATIENCE)
        self.here()

    def here(self) -> None:
        self.client.publish(HERE, b"")

    def ask(self, subject: str, rank: int = 0, **body: Any) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return from_json(self.client.request(f"scope.{rank}", subject, to_json(body)).result(PATIENCE))
            except NoReply as reply:  # it has not found the hub yet
                if "is not connected" not in str(reply) or time.monotonic() > deadline:
                    raise

    def change(self, change: str, kind: str, body: dict[str, Any], step: int) -> Any:
        prepared = self.ask(PREPARE, change=change, kind=kind, body=body)
        self.ask(COMMIT, change=change, step=step, microbatch=0)
        return prepared

    def heard(self, subject: str, until: Callable[[Any], bool]) -> Any:
        """The first of all that have come that ``until`` is true of."""
        seen = self.seen.setdefault(subject, [])
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for message in self.inboxes[subject].take(0.02):
                seen += decode_all(message.body) if subject == FRAME else [from_json(message.body)]
            for said in seen:
                if until(said):
                    return said
            self.here()
        raise AssertionError(f"nothing of {subject} in {seen}")

    def close(self) -> None:
        self.client.close()


def eventually(session: ScopeSession, true: Callable[[], bool]) -> None:
    """Have the session's thread look until it has seen it."""
    deadline = time.monotonic() + PATIENCE
    nothing = threading.Event()
    while not true():
        assert time.monotonic() < deadline
        session.outbox.wake()
        nothing.wait(0.005)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    left = [thread.name for thread in threading.enumerate() if thread.name in ("trimtab-scope", "trimtab-control")]
    assert left == []


def make(run: Path, ahead: list[float] | None = None, **scope: Any) -> tuple[ScopeSession, FakePoint]:
    """``ahead``: by how many seconds the session's clock is."""
    config = Config(control=TCP, scope=replace(ScopeConfig(look_seconds=0.1, budget=1.0), **scope))
    more: dict[str, Any] = {} if ahead is None else {"clock": lambda: time.monotonic() + ahead[0]}
    session = ScopeSession(
        config, Identity(0, 1, "job", 0), run, environment={}, measures=SumMeasures(Clock()), speaks=False, **more
    )
    point = FakePoint("layers.0.output", 0)
    session.meet(0, ModelPoints([point]))
    session.start()
    return session, point


def test_a_collector_asks_subscribes_and_gets_frames_and_a_last_beat(run: Path) -> None:
    session, point = make(run)
    session.step_begin(0)
    with open_hub(TCP, run, {}):
        collector = Collector(run)
        try:
            taps = collector.ask(TAPS)
            assert ([tap["name"] for tap in taps["taps"]], taps["next"], taps["step"]) == (["layers.0.output"], None, 0)
            wish = Subscription("layers.*.output", id="s1").as_dict()
            assert collector.change("c1", "subscribe", wish, 2)["matched"] == ["layers.0.output"]
            for step in range(1, 4):
                session.step_begin(step)
                point.deliver(torch.ones(2), Moment(step))
            frame: Frame = collector.heard(FRAME, lambda frame: frame.step == 3)
            assert (frame.tap, frame.subscription, frame.rank, frame.arrays["sum"].tolist()) == (
                "layers.0.output",
                "s1",
                0,
                [2.0],
            )
            applied = collector.heard(NOTICE, lambda notice: notice["kind"] == "applied")
            assert (applied["change"], applied["step"], applied["subscription"]) == ("c1", 2, "s1")
            state = collector.ask(STATE)
            assert [one["id"] for one in state["subscriptions"]] == ["s1"]
            assert Subscription.from_dict({k: state["subscriptions"][0][k] for k in wish}) == Subscription.from_dict(
                wish
            )
            beat = collector.heard(BEAT, lambda beat: beat["subscriptions"] == {"s1": "active"})
            assert (beat["rank"], beat["world_size"], beat["step"]) == (0, 1, 3)
            threading.Thread(target=session.close).start()
            collector.heard(BEAT, lambda beat: beat.get("leaving"))
            (tap,) = session.board.registry.taps()
            assert (tap.shape, tap.dtype) == ((2,), "float32"), "known since it was seen"
            assert point.receive is None
        finally:
            session.close()
            collector.close()


def test_what_cannot_be_is_refused_with_the_reason(run: Path) -> None:
    session, _ = make(run, subscriptions=1)
    session.step_begin(7)
    with open_hub(TCP, run, {}):
        collector, stranger = Collector(run), Collector(run, "somebody")
        try:

            def refused(kind: str, body: dict[str, Any], by: Collector = collector) -> str:
                with pytest.raises(NoReply) as reply:
                    by.ask(PREPARE, change="c1", kind=kind, body=body)
                return str(reply.value)

            assert "only the collector may ask this" in refused("subscribe", {"pattern": "**"}, stranger)
            assert "start the job with scope.allow_perturb = true" in refused("perturb", {"pattern": "**"})
            assert "allow_perturb" in refused("pair", {})
            assert "one of" in refused("destroy", {})
            assert "what" in refused("subscribe", {"pattern": "**", "what": "everything"})
            prepared = collector.ask(PREPARE, change="c2", kind="subscribe", body={"pattern": "layers.*.outptu"})
            assert (prepared["matched"], prepared["closest"]) == ([], ["layers.0.output"])
            assert prepared["step"] == 7
            assert "scope.subscriptions is 1" in refused("subscribe", {"pattern": "**"})
            with pytest.raises(NoReply, match="late: step 7 has begun"):
                collector.ask(COMMIT, change="c2", step=7)
            assert collector.ask(CANCEL, change="c2")["applied"] is False
            with pytest.raises(NoReply, match="c2 is not prepared"):
                collector.ask(COMMIT, change="c2", step=9)
        finally:
            session.close()
            collector.close()
            stranger.close()


def test_before_there_is_a_model_nothing_can_be_subscribed_to(run: Path) -> None:
    session, _ = make(run)
    session.board.registry.points = {}
    with open_hub(TCP, run, {}):
        collector = Collector(run)
        try:
            with pytest.raises(NoReply, match="has not shown its model yet"):
                collector.ask(PREPARE, change="c1", kind="subscribe", body={"pattern": "**"})
        finally:
            session.close()
            collector.close()


def test_a_collector_that_dies_is_waited_for_and_its_successor_gets_what_was_kept(run: Path) -> None:
    ahead = [0.0]
    session, point = make(run, ahead, lease_seconds=30.0)
    step = 0

    def train() -> None:
        nonlocal step
        step += 1
        session.step_begin(step)
        point.deliver(torch.full((2,), float(step)), Moment(step))

    try:
        with open_hub(TCP, run, {}):
            collector = Collector(run)
            collector.change("c1", "subscribe", {"pattern": "**", "id": "s1"}, 1)
            train()
            collector.heard(FRAME, lambda frame: frame.step == 1)
            collector.close()
        ahead[0] += 10.0
        train()  # step 2: nobody is there
        with open_hub(TCP, run, {}):
            collector = Collector(run)
            assert [one["state"] for one in collector.ask(STATE)["subscriptions"]] == ["active"]
            collector.heard(FRAME, lambda frame: frame.step == 2)
            collector.close()
        ahead[0] += 31.0
        eventually(session, lambda: session.board.away)
        train()  # step 3: the lease is over
        assert point.receive is None
        with open_hub(TCP, run, {}):
            collector = Collector(run)
            assert [one["state"] for one in collector.ask(STATE)["subscriptions"]] == ["lease"]
            eventually(session, lambda: not session.board.away)
            train()  # step 4
            assert collector.heard(FRAME, lambda frame: True).step == 4
            kinds = ("paused", "resumed")
            said = [collector.heard(NOTICE, lambda notice, kind=kind: notice["kind"] == kind) for kind in kinds]
            assert [notice["details"]["why"] for notice in said] == ["lease", "lease"]
            collector.close()
    finally:
        session.close()


def test_what_is_dropped_is_said(run: Path) -> None:
    session, point = make(run)
    session.sampling._most = 4
    with open_hub(TCP, run, {}):
        collector = Collector(run)
        try:
            collector.change("c1", "subscribe", {"pattern": "**", "id": "s1"}, 1)
            session.step_begin(1)
            for microbatch in range(5):
                point.deliver(torch.ones(2), Moment(1, microbatch))
            told = collector.heard(NOTICE, lambda notice: notice["kind"] == "dropped")
            assert told["text"] == "samples: 4 over scope.frame_mb"
            assert collector.heard(BEAT, lambda beat: beat["dropped"] == 4)
        finally:
            session.close()
            collector.close()


def test_a_collector_that_only_says_that_it_is_there_is_told_how_the_rank_gets_on(run: Path) -> None:
    session, _ = make(run)
    session.step_begin(5)
    with open_hub(TCP, run, {}):
        stranger = Collector(run, "somebody")
        collector = Collector(run)
        try:
            assert collector.heard(BEAT, lambda beat: True)["step"] == 5
        finally:
            session.close()
            collector.close()
            stranger.close()


def test_without_a_collector_nothing_is_said_to_a_hub(run: Path) -> None:
    session, _ = make(run)
    heard = Inbox()
    try:
        with open_hub(TCP, run, {}) as hub:
            for subject in (FRAME, NOTICE, BEAT):
                hub.subscribe(subject, heard.put)
            eventually(session, lambda: "scope.0" in hub.names)
            hub.publish(HERE, b"")  # who is no collector is not believed
            session._notify("applied", "")
            assert heard.take(1.2) == []
    finally:
        session.close()


def test_a_failure_of_a_step_ends_scope_and_not_the_job(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    session, _ = make(run)
    session.board.step_begin = None  # type: ignore[method-assign,assignment]
    session.step_begin(0)
    session.step_begin(1)
    session.optimizer_begin()
    session.meet(1, ModelPoints())
    assert len(caplog.messages) == 1
    assert "scope: the begin of a step failed" in caplog.messages[0]
    with open_hub(TCP, run, {}):
        collector = Collector(run)
        try:
            with pytest.raises(NoReply, match="rank 0: scope has stepped aside: the begin of a step failed"):
                collector.ask(TAPS)
            session._notify("error", "odd", details=object())
            assert collector.heard(NOTICE, lambda notice: notice["text"] == "odd")["details"] == {}
        finally:
            session.close()
            collector.close()


def test_a_forked_child_has_no_part_in_it(run: Path) -> None:
    session, point = make(run)
    with open_hub(TCP, run, {}):
        collector = Collector(run)
        try:
            collector.change("c1", "subscribe", {"pattern": "**", "id": "s1"}, 1)
            session.step_begin(1)
            child = os.fork()
            if child == 0:
                session.step_begin(2)
                session.close()
                os._exit(session.agreement.step)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 1
            point.deliver(torch.ones(2), Moment(1))
            collector.heard(FRAME, lambda frame: frame.step == 1)
        finally:
            session.close()
            collector.close()


SERVER = """
import json, os, sys
open(sys.argv[1] + "/said.json", "w").write(json.dumps([sys.argv[1:], os.environ.get("TRIMTAB_CONTROL_TRANSPORT")]))
print("at http://127.0.0.1:1", file=sys.stderr, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_the_server_beside_the_job_ends_with_the_pipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    program = (sys.executable, "-S", str(script))
    scope = ScopeConfig(serve="127.0.0.1:0", allow_perturb=True)
    server = ServerProcess(scope, TCP, tmp_path, os.environ, program)
    child = os.fork()
    if child == 0:
        server.close()  # a forked child of the job has no part in it
        os._exit(0)
    os.waitpid(child, 0)
    assert server._process.poll() is None
    server.close()
    server.close()
    server.look()
    assert server._process.returncode == 0
    assert caplog.messages == []
    told = from_json((tmp_path / "said.json").read_bytes())
    assert told == [[str(tmp_path), "--bind", "127.0.0.1:0", "--parent-pipe", "--allow-perturb"], "tcp"]


def test_a_server_that_ends_by_itself_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = ServerProcess(
        ScopeConfig(serve=":0"), TCP, tmp_path, os.environ, (sys.executable, "-S", "-c", "raise SystemExit(2)")
    )
    server._process.wait()
    for _ in range(2):
        server.look()
    assert caplog.messages == [
        "trimtab: the scope server has ended (exit code 2); the job goes on without",
    ]
    server.close()
