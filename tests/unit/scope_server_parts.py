"""A server without a socket: recordings with known contents, and a client that holds the link's token."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from trimtab.scope.collector.interface import Scope
from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.recording.recorder import Recorder
from trimtab.scope.server.application import Application
from trimtab.scope.server.limits import Limits
from trimtab.scope.server.runs import Runs
from trimtab.scope.server.service import Service
from trimtab.scope.server.tokens import Tokens
from trimtab.scope.vector import exponents_of, vector_of

BASE = "http://127.0.0.1:8000"
COOKIE = "trimtab-scope"
CSRF = {"X-Trimtab": "1"}
RANKS = 4
STEPS = 24


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def values(tap: str, step: int, rank: int, microbatch: int = 0) -> np.ndarray:
    """What a rank holds of a tensor; step 5 of layer 1 has a NaN on rank 2."""
    seed = [sum(tap.encode()), step, rank % 2, microbatch]
    x = np.random.default_rng(seed).normal(1.0, 1.0 + step, 32)
    if tap == "layers.1.output" and step == 5 and rank == 2:
        x[3] = np.nan
    return x


def frames(steps: int = STEPS, *, noise: float = 0.0) -> Generator[Frame]:
    """Two layers on four ranks: cut over tp, the data over dp. ``noise`` is added to layer 1 from step 10 on."""
    for step in range(steps):
        for rank in range(RANKS):
            shard = (("tp", rank % 2, 2), ("dp", rank // 2, 2))
            for layer in range(2):
                tap = f"layers.{layer}.output"
                for microbatch in range(2):
                    x = values(tap, step, rank, microbatch) + (noise if layer == 1 and step >= 10 else 0.0)
                    arrays = {"vector": vector_of(x, 0.5), "shift": np.array([0.5])}
                    yield Frame(
                        tap, "statistics", "s-1", step, microbatch, rank, shard, 0, arrays, {"dtype": "float32"}
                    )
            x = values("layers.0.output", step, rank)
            arrays = {"vector": vector_of(x), "shift": np.zeros(1), "exponents": exponents_of(x)}
            yield Frame("layers.0.mlp.output", "histogram", "s-2", step, 0, rank, shard, 0, arrays, {})
            if step % 4 == 0:
                arrays = {"values": x[:4].astype(np.float32).reshape(2, 2)}
                yield Frame("layers.0.output", "rows", "s-3", step, 0, rank, shard, 0, arrays, {"rows": [0]})


def record(
    directory: Path, label: str = "", *, steps: int = STEPS, noise: float = 0.0, others: Iterable[Frame] | None = None
) -> None:
    """A recording of these frames, or of ``others``."""
    folder = directory / "scope"
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, label, 0, lambda notice: None)
    for frame in frames(steps, noise=noise) if others is None else others:
        recorder.frame(split(encode(frame))[0])
    recorder.note("notice", {"kind": "applied", "text": "<b>step</b>", "rank": 1, "step": 3, "unix_ns": 5})
    recorder.close()


@dataclass
class Site:
    """A server and its client."""

    client: TestClient
    service: Service
    clock: Clock
    app: Application
    headers: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **query: Any) -> Any:
        """JSON of an endpoint that is expected to answer."""
        response = self.client.get(f"/api/v1{path}", params=query, headers=self.headers)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, **query: Any) -> tuple[int, str]:
        """Status and line of one that is expected to refuse."""
        response = self.client.get(f"/api/v1{path}", params=query, headers=self.headers)
        assert response.status_code >= 400, response.text
        return response.status_code, response.json()["error"]

    def post(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Any:
        """The response of an endpoint that changes something."""
        sent = {**self.headers, **CSRF, **headers}
        return self.client.request(method, f"/api/v1{path}", json=body, headers=sent)


@contextlib.contextmanager
def site(
    *directories: Path,
    scope: Scope | None = None,
    limits: Limits | None = None,
    allow_perturb: bool = False,
    bearer: bool = True,
    hosts: tuple[str, ...] = (),
    **more: Any,
) -> Generator[Site]:
    """A running server. ``bearer``: its client shows the link's token with each request."""
    clock = Clock()
    limits = limits or Limits()
    runs = Runs(directories, live=directories[0] if scope is not None else None, clock=clock)
    tokens = Tokens(clock=clock, sessions=limits.sessions)
    service = Service(runs, scope, limits=limits, tokens=tokens, allow_perturb=allow_perturb, clock=clock, **more)
    app = Application(service, hosts=hosts, cookie=COOKIE, clock=clock)
    with TestClient(app, base_url=BASE, follow_redirects=False) as client:
        headers = {"Authorization": f"Bearer {tokens.link}"} if bearer else {}
        yield Site(client, service, clock, app, headers)
