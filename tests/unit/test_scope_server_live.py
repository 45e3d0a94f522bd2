"""The WebSocket, and what is asked of a running job: over a real collector and ranks that behave as real ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from scope_job import CONFIG, FakeRank, connected, values_of, wait
from scope_server_parts import Clock, Site, site
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from trimtab.scope.collector.interface import Notice, Received
from trimtab.scope.collector.opening import open_scope
from trimtab.scope.fields import Fields
from trimtab.scope.frame import Frame, decode_all, encode
from trimtab.scope.server import wire
from trimtab.scope.server.background import tidy
from trimtab.scope.server.client import Client, Filter
from trimtab.scope.server.hub import Hub
from trimtab.scope.server.limits import Limits, Rate
from trimtab.scope.server.memory import WISHES, Memory
from trimtab.scope.server.runs import Runs
from trimtab.scope.server.service import Service, Wish
from trimtab.scope.server.tokens import Session
from trimtab.scope.subscription import Subscription
from trimtab.scope.vector import derive, vector_of

LIVE = "ws://127.0.0.1:8000/api/v1/live"


def frame(
    tap: str = "layers.0.output", step: int = 0, rank: int = 0, size: int = 4, what: str = "statistics"
) -> Received:
    made = Frame(tap, what, "s-1", step, 0, rank, arrays={"values": np.zeros(size, np.uint8)})
    return Received(made, memoryview(encode(made)))


def wanted(**said: Any) -> Filter:
    return Filter.from_json(Fields({"id": "a", "pattern": "**", **said}, "message"))


def taken(client: Client) -> list[tuple[str, int]]:
    """(tap, step) of all frames that wait."""
    found: list[tuple[str, int]] = []
    while (said := client.take()) is not None:
        if isinstance(said, bytes):
            numbers, raw = wire.unpack(said)
            decoded = decode_all(raw)
            assert len(numbers) == len(decoded)
            found += [(one.tap, one.step) for one in decoded]
    return found


def joined(hub: Hub, **said: Any) -> Client:
    client = hub.join("session-1", lambda: None)
    client.want(wanted(**said))
    return client


def told(hub: Hub, *received: Received | Notice) -> None:
    for one in received:
        hub.hear(one)
    hub.turn()


# ------------------------------------------------------------------------- values


def test_filters_choose() -> None:
    hub = Hub(Limits(), "e")
    client = joined(hub, pattern="layers.0-1.*", what=["statistics"], ranks=[0, 2], every=2)
    told(hub, *(frame(f"layers.{n}.output", step, rank) for n in range(3) for step in range(3) for rank in range(3)))
    assert taken(client) == [(f"layers.{n}.output", 2) for n in (0, 0, 1, 1)], "the newest of each tensor and rank"
    told(hub, frame("layers.0.output", 4, what="tiles"), frame("layers.0.output.grad", 4), frame("layers.1.output", 4))
    assert taken(client) == [("layers.1.output", 4)]
    client.unwant("a")
    told(hub, frame("layers.1.output", 6))
    assert taken(client) == []


def test_of_frames_the_newest_wait_and_of_notices_all() -> None:
    limits = Limits(waiting_frames=3, waiting_notices=5)
    hub = Hub(limits, "e")
    client = joined(hub)
    told(hub, *(frame(f"layers.{n}.output", step) for step in range(4) for n in range(4)))
    assert client.dropped == 13
    assert taken(client) == [(f"layers.{n}.output", 3) for n in (1, 2, 3)]
    for number in range(5):
        told(hub, Notice("applied", str(number)))
    assert not client.overrun
    texts = [json.loads(client.take() or "")["text"] for _ in range(5)]
    assert texts == ["0", "1", "2", "3", "4"]
    for number in range(6):
        told(hub, Notice("applied", str(number)))
    assert client.overrun, "rather the client goes than a notice"


def test_waiting_frames_are_bounded_in_bytes() -> None:
    hub = Hub(Limits(waiting_bytes=50_000), "e")
    client = joined(hub)
    told(hub, *(frame(f"layers.{n}.output", size=20_000) for n in range(5)))
    assert taken(client) == [("layers.3.output", 0), ("layers.4.output", 0)]


def test_a_window_bounds_what_is_under_way() -> None:
    hub = Hub(Limits(), "e")
    client = joined(hub)
    client.set_window(2)
    told(hub, *(frame(f"layers.{n}.output") for n in range(5)))
    assert len(taken(client)) == 2
    client.acknowledge(1)
    assert taken(client) == [("layers.2.output", 0)]
    client.acknowledge(3)
    assert len(taken(client)) == 2


def test_who_comes_back_gets_what_was_said_meanwhile() -> None:
    hub = Hub(Limits(kept_messages=6), "epoch")
    told(hub, frame("layers.0.output"), Notice("applied", "one"))
    seen = hub.number
    told(hub, frame("layers.1.output"), Notice("applied", "two"), frame("logits"))
    client = joined(hub, pattern="layers.**")
    assert hub.resume(client, "epoch", seen) == {"from": 3, "to": 5, "complete": True}
    assert json.loads(client.take() or "")["text"] == "two"
    assert taken(client) == [("layers.1.output", 0)]
    told(hub, *(frame(f"layers.{n}.output") for n in range(4)))
    taken(client)
    assert hub.resume(client, "epoch", seen) == {"from": 4, "to": 9, "complete": False}
    for epoch, number in (("another", 3), ("epoch", 99)):
        assert not hub.resume(client, epoch, number)["complete"]


def test_what_is_kept_is_bounded_in_bytes() -> None:
    hub = Hub(Limits(kept_bytes=50_000), "e")
    told(hub, *(frame(f"layers.{n}.output", size=9_000) for n in range(20)))
    client = joined(hub)
    found = hub.resume(client, "e", 0)
    assert (found["to"], found["complete"]) == (20, False)
    assert 3 <= len(taken(client)) <= 5


def test_live_messages_have_numbered_frames_at_multiples_of_eight() -> None:
    frames = [(number, encode(frame(step=number).frame)) for number in (7, 9, 10)]
    message = wire.pack(frames)
    numbers, raw = wire.unpack(message)
    assert numbers == [7, 9, 10]
    assert [one.step for one in decode_all(raw)] == numbers
    assert (len(message) - len(raw)) % 8 == 0
    for wrong in (b"", b"tsl1", message[:12], b"x" + message[1:]):
        with pytest.raises(ValueError, match="live message"):
            wire.unpack(wrong)


@pytest.mark.parametrize(
    "said",
    [{"what": ["nothing"]}, {"pattern": "a{"}, {"every": 0}, {"ranks": ["0"]}, {"what": [[]]}, {"id": 3}, {"what": {}}],
)
def test_filters_that_make_no_sense_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(message|subscribe|the )"):
        wanted(**said)


# ---------------------------------------------------------------------- over a job


class Job:
    """A server with the collector of a job of four ranks."""

    def __init__(self, door: Site, ranks: list[FakeRank]) -> None:
        self.door = door
        self.ranks = ranks

    def train(self, steps: int = 1) -> None:
        for rank in self.ranks:
            rank.train(steps)
            rank.say()

    def settle(self, path: str, body: Any) -> Any:
        """Ask for something, and train until the ranks have applied it."""
        answer = self.door.post(path, body, **{"X-Trimtab-Control": self.door.service.tokens.control})
        assert answer.status_code in (200, 201), answer.text
        wait(lambda: all(rank.due for rank in self.ranks if rank.prepared or rank.due), "the ranks have agreed")
        self.train(400)
        return answer.json()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Generator[Job]:
    directory = tmp_path_factory.mktemp("job")
    with open_scope(directory, CONFIG, {}) as scope:
        ranks = [FakeRank(rank, 4) for rank in range(4)]
        try:
            with site(directory, scope=scope, allow_perturb=True, record=True) as door:
                connected(directory, {}, ranks)
                wait(lambda: door.service.state().get("recording"), "all ranks are there, and are recorded")
                yield Job(door, ranks)
        finally:
            for rank in ranks:
                rank.close()


def test_the_job_is_shown_and_its_answers_are_as_described(job: Job) -> None:
    door = job.door
    document = door.get("/openapi.json")
    for path in ("/status", "/taps", "/subscriptions", "/perturbations", "/audit"):
        operation = document["paths"][f"/api/v1{path}"]["get"]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        Draft202012Validator(schema).validate(door.get(path))
    status = door.get("/status")
    assert (status["state"], status["world_size"]) == ("live", 4)
    found = door.get("/taps", pattern="layers.*.mlp.hidden")["taps"]
    assert [one["name"] for one in found] == [f"layers.{n}.mlp.hidden" for n in range(4)]
    assert found[2]["ranks"] == [2, 3]
    assert door.get("/taps", pattern="layers.0.output", full="true")["taps"][0]["on"]["1"]["replica"] == 1
    assert "close to it" in door.refused("/taps", pattern="layer.0.mlp")[1]


def test_frames_that_were_asked_for_come_over_the_socket_and_are_recorded(job: Job) -> None:
    door = job.door
    with door.client.websocket_connect(LIVE, headers=door.headers) as socket:
        hello = socket.receive_json()
        assert (hello["type"], hello["epoch"]) == ("hello", door.service.hub.epoch)
        socket.send_json({"op": "subscribe", "id": "a", "pattern": "layers.*.mlp.hidden", "ranks": [0, 3]})
        while socket.receive_json()["type"] != "subscribed":
            pass
        name = job.settle("/subscriptions", {"pattern": "layers.*.mlp.hidden"})["id"]
        job.train()
        last = job.ranks[0].step
        seen: dict[str, Frame] = {}
        notices: list[str] = []
        while len([one for one in seen.values() if one.step == last]) < 4:
            said = socket.receive()
            if said.get("bytes"):
                seen |= {f"{one.tap} {one.rank}": one for one in decode_all(wire.unpack(said["bytes"])[1])}
            else:
                message = json.loads(said["text"])
                notices += [message["kind"]] if message["type"] == "notice" else []
        assert {one.rank for one in seen.values()} == {0, 3}
        assert "agreed" in notices
        mine = seen["layers.2.mlp.hidden 3"]
        np.testing.assert_array_equal(mine.arrays["vector"], vector_of(values_of("layers.2.mlp.hidden", last, 1)))
    (listed,) = door.get("/subscriptions")["subscriptions"]
    assert (listed["id"], listed["mine"], listed["keep"]) == (name, True, False)

    def grid() -> Any:
        door.clock.now += 1
        query = {"tap": "layers.0.mlp.hidden", "statistic": "mean"}
        return door.client.get("/api/v1/runs/live/grid", params=query, headers=door.headers).json()

    wait(lambda: [cell.get("step", last) for cell in grid().get("ranks", ())] == [last] * 2, "both are recorded")
    wait(lambda: grid().get("step") == last, "the last step is recorded")
    cells = grid()["ranks"]
    assert [cell["coordinates"] for cell in cells] == [{"tp": 0, "pp": 0}, {"tp": 1, "pp": 0}]
    expected = derive(vector_of(values_of("layers.0.mlp.hidden", last, 1))).mean
    assert cells[1]["value"] == pytest.approx(expected)
    assert door.post(f"/subscriptions/{name}", method="DELETE").json() == {"id": name}
    job.train(400)
    assert door.get("/subscriptions")["subscriptions"] == []


def test_subscriptions_are_limited_and_end_with_their_session(job: Job) -> None:
    limits = Limits(subscriptions_each=2, subscriptions=3)
    service = job.door.service
    with site(service.runs.directories()[0], scope=service.job(), limits=limits) as limited:
        body = {"pattern": "layers.0.output"}
        made = [limited.post("/subscriptions", {**body, "keep": keep}).json()["id"] for keep in (False, True)]
        refused = limited.post("/subscriptions", body)
        assert (refused.status_code, "no more are taken" in refused.json()["error"]) == (429, True)
        job.train(400)
        assert limited.service.abandoned() == []
        limited.clock.now += 61
        assert limited.service.abandoned() == made[:1], "the other one was to be kept"
        assert limited.client.portal is not None
        limited.client.portal.call(tidy, limited.service)
        assert limited.service.abandoned() == []
        assert limited.service.wish(made[0]) is None
        limited.service.job().unsubscribe(made[1])
        limited.service.refresh()
        assert limited.service.wish(made[1]) is None, "others may end it, too"
        job.train(400)
        for body, status in (
            ({"pattern": "layer.0"}, 409),
            ({"pattern": "layers.0.output", "what": "nothing"}, 400),
            ({"patern": "layers.0.output"}, 400),
            ([], 400),
        ):
            assert limited.post("/subscriptions", body).status_code == status
        assert limited.post("/subscriptions/s-99", method="DELETE").status_code == 409


def test_a_server_that_ends_takes_with_it_what_was_not_to_be_kept(job: Job) -> None:
    service = job.door.service
    with site(service.runs.directories()[0], scope=service.job()) as other:
        body = {"pattern": "layers.0.output"}
        gone, kept = (other.post("/subscriptions", {**body, "keep": keep}).json()["id"] for keep in (False, True))
        job.train(400)
        assert {gone, kept} <= set(job.ranks[0].active)
        other.service.close()
        wait(lambda: job.ranks[0].due, "it is told")
        job.train(400)
        assert gone not in job.ranks[0].active
        assert kept in job.ranks[0].active
        service.job().unsubscribe(kept)
        job.train(400)


class NewCollector:
    """One that has not heard of all ranks yet."""

    settled = False

    def status(self) -> dict[str, Any]:
        return {"state": "live", "subscriptions": {}, "settled": self.settled}

    def subscribe(self, subscription: Subscription) -> str:
        del subscription
        return "s-1"

    def unsubscribe(self, subscription: str) -> None:
        raise AssertionError(f"{subscription} is not to be ended yet")

    def listen(self, callback: Any) -> Any:
        del callback
        return lambda: None


def test_a_new_collector_that_does_not_know_a_subscription_yet_makes_nobody_forget_it(tmp_path: Path) -> None:
    scope = NewCollector()
    service = Service(Runs((tmp_path,), live=tmp_path), cast("Any", scope))
    name = service.subscribe(Session("session-1", 0.0), Subscription("layers.0.output"), keep=False)
    service.refresh()
    assert service.wish(name) is not None
    scope.settled = True
    service.refresh()
    assert service.wish(name) is None
    service.close()  # and so it has nothing to end


def test_a_session_is_gone_a_minute_after_its_last_sign_of_life(tmp_path: Path) -> None:
    clock = Clock()
    service = Service(Runs((tmp_path,), live=tmp_path), cast("Any", NewCollector()), clock=clock)
    session = Session("session-1", 0.0)
    service.opened(session)
    name = service.subscribe(session, Subscription("layers.0.output"), keep=False)
    clock.now += 600
    assert service.abandoned() == [], "its WebSocket is open"
    service.closed(session)
    clock.now += 59
    assert service.abandoned() == []
    service.seen(session)
    clock.now += 59
    assert service.abandoned() == [], "it has asked for something since"
    clock.now += 1
    assert service.abandoned() == [name]


def test_ranks_that_do_not_answer_hold_the_end_of_a_server_up_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    scope = NewCollector()
    monkeypatch.setattr(scope, "unsubscribe", lambda _name: hangs.wait(20))
    service = Service(Runs((tmp_path,), live=tmp_path), cast("Any", scope))
    service.subscribe(Session("session-1", 0.0), Subscription("layers.0.output"), keep=False)
    before = time.monotonic()
    service.close(0.05)
    assert time.monotonic() - before < 5
    hangs.set()


def test_a_perturbation_is_previewed_begun_listed_and_put_back(job: Job) -> None:
    door = job.door
    control = {"X-Trimtab-Control": door.service.tokens.control}
    body = {"pattern": "layers.1.output", "kind": "zero", "first": -1, "last": 50}
    preview = door.post("/perturbations/preview", body, **control)
    assert preview.status_code == 200
    assert (preview.json()["taps"], preview.json()["ranks"]) == (["layers.1.output"], [0, 1])
    assert door.post("/perturbations", {**body, "kind": "sero"}, **control).status_code == 400
    assert door.post("/perturbations", {**body, "pattern": "layers.9.output"}, **control).status_code == 409
    name = job.settle("/perturbations", body)["id"]
    assert [one["id"] for one in door.get("/perturbations")["perturbations"]] == [name]
    assert all(name in rank.active for rank in job.ranks[:2])
    document = door.get("/openapi.json")
    assert door.post(f"/perturbations/{name}/expire", **control).json() == {"id": name}
    job.train(400)
    assert not job.ranks[0].active
    assert door.post("/perturbations/p-99/revert", **control).status_code == 409
    schema = document["paths"]["/api/v1/perturbations/preview"]["post"]["responses"]["200"]["content"][
        "application/json"
    ]
    Draft202012Validator(schema["schema"]).validate(preview.json())


def test_a_collector_that_does_not_answer_is_a_state(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    service = job.door.service

    def gone() -> Any:
        raise ValueError("the collector is gone")

    monkeypatch.setattr(service.job(), "status", gone)
    assert service.state() == {"state": "away", "error": "the collector is gone"}
    assert job.door.get("/status")["state"] == "away"
    assert job.door.get("/subscriptions") == {"subscriptions": []}
    service.refresh()
    monkeypatch.undo()
    assert job.door.get("/status")["state"] == "away", "until it is looked at again"
    service.refresh()
    assert job.door.get("/status")["state"] == "live"


# ------------------------------------------------------------ messages of a client


def talk(door: Site, *messages: Any) -> list[dict[str, Any]]:
    """What a server answers to some messages."""
    with door.client.websocket_connect(LIVE, headers=door.headers) as socket:
        assert socket.receive_json()["type"] == "hello"
        for message in messages:
            socket.send_text(message if isinstance(message, str) else json.dumps(message))
        return [socket.receive_json() for _ in messages]


def test_messages_that_make_no_sense_are_answered_with_a_line(tmp_path: Path) -> None:
    with site(tmp_path, limits=Limits(filters=1, message_bytes=500)) as door:
        answers = talk(
            door,
            "{",
            "[" * 60,
            '"text"',
            {"op": "unknown"},
            {"op": "subscribe", "id": "a", "pattern": "x" * 600},
            {"op": "subscribe", "id": "a", "pattern": "layers.**", "more": 1},
            {"op": "subscribe", "id": "a", "pattern": "layers.**"},
            {"op": "subscribe", "id": "b", "pattern": "layers.**"},
            {"op": "unsubscribe", "id": "b"},
            {"op": "window", "frames": -1},
            {"op": "ping", "id": 3},
        )
        kinds = [answer["type"] for answer in answers]
        assert kinds == ["error"] * 6 + ["subscribed"] + ["error"] * 3 + ["pong"]
        assert all("\n" not in answer.get("error", "") for answer in answers)


def code_after(door: Site, *messages: str | bytes) -> int:
    """With which code a server hangs up after these."""

    def listen(socket: Any) -> None:
        for _ in range(len(messages) + 1):  # with the greeting
            socket.receive_json()

    with door.client.websocket_connect(LIVE, headers=door.headers) as socket:
        for message in messages:
            socket.send_bytes(message) if isinstance(message, bytes) else socket.send_text(message)
        with pytest.raises(WebSocketDisconnect) as end:
            listen(socket)
    return end.value.code


def test_clients_that_talk_too_much_or_nonsense_are_hung_up_on(tmp_path: Path) -> None:
    with site(tmp_path, limits=Limits(messages=Rate(0.1, 5))) as door:
        assert code_after(door, *['{"op": "ping"}'] * 9) == 1008
    with site(tmp_path) as door:
        assert code_after(door, *[b"nonsense"] * 20) == 1008


def test_a_socket_ends_with_its_session(tmp_path: Path) -> None:
    with site(tmp_path, limits=Limits(heartbeat_seconds=0.01), bearer=False) as door:
        door.client.get("/", params={"token": door.service.tokens.link})
        with door.client.websocket_connect(LIVE, headers={"Origin": "http://127.0.0.1:8000"}) as socket:
            assert socket.receive_json()["type"] == "hello"
            beat = socket.receive_json()
            assert (beat["type"], beat["session_seconds"]) == ("heartbeat", 12 * 3600)
            door.clock.now += 12 * 3600 + 1
            with pytest.raises(WebSocketDisconnect) as end:
                until_closed(socket)
            assert end.value.code == 4401


def until_closed(socket: Any) -> None:
    for _ in range(1000):
        socket.receive_json()


def test_sockets_are_limited(tmp_path: Path) -> None:
    with site(tmp_path, limits=Limits(live_clients_each=2)) as door:

        def connect() -> Any:
            return door.client.websocket_connect(LIVE, headers=door.headers)

        with connect(), connect() as second:
            with pytest.raises(WebSocketDenialResponse) as refusal, connect():
                pass
            assert refusal.value.status_code == 429
            second.close()
        wait(lambda: door.service.hub.clients == 0, "both have left")
        with connect() as third:
            assert third.receive_json()["type"] == "hello"


def test_what_a_killed_server_had_asked_for_ends_with_the_next_one(tmp_path: Path) -> None:
    class Counting(NewCollector):
        def subscribe(self, subscription: Subscription) -> str:
            self.made = getattr(self, "made", 0) + 1
            return f"s-{self.made}"

        def unsubscribe(self, subscription: str) -> None:
            assert subscription == "s-1"

    clock, memory = Clock(), Memory(tmp_path)
    scope = cast("Any", Counting())
    service = Service(Runs((tmp_path,), live=tmp_path), scope, memory=memory, clock=clock)
    session = Session("session-1", 0.0)
    passing, kept = (service.subscribe(session, Subscription("layers.0.output"), keep=keep) for keep in (False, True))
    assert passing != kept
    later = Service(Runs((tmp_path,), live=tmp_path), scope, memory=Memory(tmp_path), clock=clock)
    assert (later.wish(passing), later.wish(kept)) == (Wish("", keep=False), None)
    assert later.abandoned() == [], "whoever asked may come back"
    clock.now += 61
    assert later.abandoned() == [passing]
    later.unsubscribe(passing)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", ["{", "[]", '{"subscriptions": 3}', '{"subscriptions": [3]}', "x" * 70_000])
def test_a_memory_that_makes_no_sense_is_none(tmp_path: Path, said: str) -> None:
    (tmp_path / WISHES).write_text(said)
    assert Memory(tmp_path).read() == ()
