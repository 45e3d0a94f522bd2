"""Ranks that behave as those of a job, in this process: they have taps, take part in agreements and send frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.config import ControlConfig
from trimtab.control.client import Client
from trimtab.control.endpoint import Complaints, NoReply
from trimtab.control.messages import Message, from_json, to_json
from trimtab.control.opening import find_hub, limits_of
from trimtab.control.rendezvous import RENDEZVOUS_FILE
from trimtab.control.sockets import Backoff
from trimtab.scope.frame import Frame, encode
from trimtab.scope.messages import BEAT, CANCEL, COMMIT, FRAME, NOTICE, PREPARE, STATE, TAPS, rank_endpoint
from trimtab.scope.names import Pattern, Tap, closest
from trimtab.scope.subscription import Subscription
from trimtab.scope.vector import vector_of

CONFIG = ControlConfig(transport="tcp")


def taps_of(rank: int, world: int) -> list[Tap]:
    """Two layers on each rank, cut over two tensor-parallel ranks; a norm that all hold alike."""
    stage, part = divmod(rank, 2)
    shard = (("tp", part, 2),)
    layers = [stage * 2, stage * 2 + 1]
    named = [
        Tap(f"layers.{layer}.{name}", "activation", ("s", "b", "h"), (4, 1, 8), "float32", shard, layer=layer)
        for layer in layers
        for name in ("attention.output", "mlp.hidden")
    ]
    alike = [
        Tap(f"layers.{layer}.output", "activation", ("s", "b", "h"), (4, 1, 8), "float32", (), part, layer)
        for layer in layers
    ]
    return named + alike


@dataclass
class FakeRank:
    """One rank. It trains when told to."""

    rank: int
    world: int
    step: int = 10
    seconds_per_step: float = 0.01
    taps: list[Tap] = field(default_factory=list[Tap])
    started: int = 1
    late: int = 0
    """So many commits are refused as late."""
    refuses: str = ""
    """Why everything is refused."""
    knows_its_place: bool = True
    page: int = 2
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    prepared: dict[str, dict[str, Any]] = field(default_factory=dict[str, "dict[str, Any]"])
    due: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict[str, "tuple[int, dict[str, Any]]"])
    active: dict[str, dict[str, Any]] = field(default_factory=dict[str, "dict[str, Any]"])
    client: Client | None = None

    def __post_init__(self) -> None:
        self.taps = self.taps or taps_of(self.rank, self.world)
        self._lock = threading.RLock()

    def answer(self, subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """As the real one does; ValueError: a refusal."""
        with self._lock:
            self.asked.append((subject, dict(body)))
            if subject == TAPS:
                first = body["from"]
                following = first + self.page
                page = [tap.to_json() for tap in self.taps[first:following]]
                return {"taps": page, "next": following if following < len(self.taps) else None, "step": self.step}
            if subject == STATE:
                return {"step": self.step, **self._state()}
            if subject == PREPARE:
                return self._prepare(body)
            if subject == COMMIT:
                return self._commit(body)
            if subject == CANCEL:
                self.prepared.pop(body["change"], None)
                return {"applied": self.due.pop(body["change"], None) is None}
            raise ValueError(f"no answer to {subject}")

    def train(self, steps: int = 1) -> list[Frame]:
        """Some steps; the frames that were wanted."""
        frames: list[Frame] = []
        with self._lock:
            for _ in range(steps):
                self.step += 1
                for change, (step, body) in sorted(self.due.items(), key=lambda one: (len(one[0]), one[0])):
                    if step <= self.step:
                        del self.due[change]
                        self._apply(body)
                frames += self._frames()
        if self.client is not None:
            for frame in frames:
                self.client.publish(FRAME, encode(frame))
        return frames

    def beat(self, **more: Any) -> dict[str, Any]:
        """What it says of itself."""
        return {
            "rank": self.rank,
            "world_size": self.world,
            "coordinates": {"tp": self.rank % 2, "pp": self.rank // 2} if self.knows_its_place else {},
            "step": self.step,
            "microbatch": 0,
            "seconds_per_step": self.seconds_per_step,
            "overhead": 0.001,
            "dropped": 0,
            "subscriptions": dict.fromkeys((name for name, kept in self.active.items() if "what" in kept), "active"),
            "perturbations": [],
            "unix_ns": 1,
            "started": self.started,
            "taps": 1,
            **more,
        }

    def notice(self, kind: str, **more: Any) -> None:
        """Publish one."""
        assert self.client is not None
        self.client.publish(NOTICE, to_json({"kind": kind, "rank": self.rank, **more}))

    # ------------------------------------------------------------------ over the channel

    def connect(self, directory: Path, environment: Mapping[str, str]) -> None:
        """Join the hub, and speak."""
        wait(lambda: (directory / RENDEZVOUS_FILE).exists(), "there is a hub")
        quiet = Complaints(lambda _text: None)
        self.client = Client(
            rank_endpoint(self.rank),
            lambda: find_hub(CONFIG, directory, environment),
            limits=limits_of(CONFIG),
            periodic=self.say,
            backoff=Backoff(least=0.02, most=0.05),  # commands come and go
            complaints=quiet,
        )
        for subject in (TAPS, STATE, PREPARE, COMMIT, CANCEL):
            self.client.answer(subject, self._answered)
        self.client.start()
        wait(lambda: self.client is not None and self.client.connected, "the rank is connected")
        self.say()

    def say(self, **more: Any) -> None:
        """A beat."""
        if self.client is not None:
            self.client.publish(BEAT, to_json(self.beat(**more)))

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None

    def _answered(self, message: Message) -> bytes:
        return to_json(self.answer(message.subject, from_json(message.body) if message.body else {}))

    # --------------------------------------------------------------------------- inside

    def _state(self) -> dict[str, Any]:
        kept = [{**body, "since": 1, "state": "active"} for body in self.active.values()]
        return {
            "subscriptions": [body for body in kept if "what" in body],
            "perturbations": [body for body in kept if "what" not in body],
            "probes": [],
        }

    def _prepare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise ValueError(self.refuses)
        self.prepared[body["change"]] = dict(body)
        pattern = body["body"].get("pattern")
        names = [tap.name for tap in self.taps]
        matched = [name for name in names if pattern and Pattern(pattern).matches(name)]
        near = closest(pattern, names) if pattern and not matched else []
        said = {"step": self.step, "seconds_per_step": self.seconds_per_step}
        return {**said, "matched": matched, "closest": near}

    def _commit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.late > 0:
            self.late -= 1
            raise ValueError(f"late: step {body['step']} has begun")
        if body["step"] <= self.step:
            raise ValueError(f"late: step {body['step']} has begun")
        self.due[body["change"]] = (body["step"], self.prepared.pop(body["change"]))
        return {"step": body["step"]}

    def _apply(self, change: Mapping[str, Any]) -> None:
        body = change["body"]
        if change["kind"] in ("subscribe", "perturb"):
            self.active[body["id"]] = dict(body)
        else:
            self.active.pop(body["id"], None)
            if change["kind"] == "revert" and self.client is not None:
                self.notice("reverted", perturbation=body["id"], step=self.step, details={"elements": 1})

    def _frames(self) -> list[Frame]:
        frames: list[Frame] = []
        for body in self.active.values():
            if "what" not in body:
                continue
            known = {key: value for key, value in body.items() if key in Subscription.__dataclass_fields__}
            subscription = Subscription.from_dict(known)
            for tap in self.taps:
                if Pattern(subscription.pattern).matches(tap.name) and subscription.when.matches(self.step, 0):
                    frames.append(frame_of(tap, self.rank, self.step, subscription.id))
        return frames


def values_of(name: str, step: int, part: int = 0) -> np.ndarray:
    """What a tap holds at a step."""
    seed = sum(name.encode()) * 1000 + step * 10 + part
    return np.random.default_rng(seed).standard_normal((4, 8))


def frame_of(tap: Tap, rank: int, step: int, subscription: str = "s-1", *, shift: float = 0.0) -> Frame:
    """Statistics of what a tap holds."""
    part = tap.shard[0][1] if tap.shard else 0
    vector = vector_of(values_of(tap.name, step, part), shift)
    arrays = {"vector": vector, "shift": np.array([shift])}
    more = (tap.shard, tap.replica, arrays, {"dtype": "float32"}, 1_000_000 * step)
    return Frame(tap.name, "statistics", subscription, step, 0, rank, *more)


def future_of(call: Any) -> Future[bytes]:
    """What a request would give, at once."""
    future: Future[bytes] = Future()
    try:
        future.set_result(to_json(call()))
    except ValueError as error:
        future.set_exception(NoReply(str(error)))
    return future


def wait(ready: Any, what: str, seconds: float = 10.0) -> None:
    """Until something that happens on another thread has happened."""
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.002)


def connected(directory: Path, environment: Mapping[str, str], ranks: Iterable[FakeRank]) -> None:
    """All of them."""
    for rank in ranks:
        rank.connect(directory, environment)
