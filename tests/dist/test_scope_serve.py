"""``trimtab scope serve`` as a process, over real sockets: how it begins, how it ends, and whom it drops."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from trimtab.scope.collector.interface import Notice, Received
from trimtab.scope.frame import Frame, decode_all, encode
from trimtab.scope.server import wire
from trimtab.scope.server.limits import Limits
from trimtab.scope.server.runs import Runs
from trimtab.scope.server.serve import Options, server_of
from trimtab.scope.server.service import Service
from trimtab.scope.server.sockets import listen

LINK = re.compile(r"scope: (http://127\.0\.0\.1:\d+/)\?token=(\S+)")
ENDS_WITHIN = 20.0


class Served:
    """A process that serves a run directory."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "trimtab", "scope", "serve", str(directory), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = LINK.match(line)
        assert found, line + self.process.stderr.read()
        self.url, self.token = found.groups()

    def end(self, how: Callable[[], None]) -> tuple[int, str]:
        """Exit code, and what else it said."""
        how()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDS_WITHIN)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"it does not end within {ENDS_WITHIN} s")
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            return self.process.returncode, stderr.read()


def hung_up(client: Any) -> int | None:
    """With which code the server ends a connection."""
    try:
        while True:
            client.recv(5)
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else None


def test_it_is_found_used_and_ends_with_its_parent(tmp_path: Path) -> None:
    served = Served(tmp_path, "--parent-pipe", "--allow-perturb")
    files = {name: tmp_path / "scope" / name for name in ("server.json", "server-token")}
    public, secret = (json.loads(path.read_text()) for path in files.values())
    assert public == {"url": served.url, "pid": served.process.pid}
    assert files["server-token"].stat().st_mode & 0o777 == 0o600
    assert secret["token"] == served.token
    assert secret["control"] != served.token
    with httpx2.Client(base_url=served.url) as browser:
        assert browser.get("/", params={"token": served.token}).status_code == 303
        assert browser.get("/api/v1/status").json()["state"] == "waiting"
        assert browser.get("/api/v1/runs", headers={"Host": "evil.example"}).status_code == 421
        assert browser.get("/").headers["content-type"] == "text/html; charset=utf-8"
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    live = served.url.replace("http", "ws") + "api/v1/live"
    with (
        pytest.raises(InvalidStatus) as refusal,
        connect(live, origin="http://evil.example", additional_headers={"Cookie": cookie}),
    ):
        pass
    assert refusal.value.response.status_code == 403
    with connect(live, origin=served.url.rstrip("/"), additional_headers={"Cookie": cookie}) as page:
        assert json.loads(page.recv(5))["type"] == "hello"
        with connect(live, additional_headers={"Authorization": f"Bearer {served.token}"}) as program:
            program.recv(5)
            program.send("x" * 100_000)
            assert hung_up(program) == 1009
        page.send('{"op": "ping"}')
        assert served.process.stdin is not None
        code, said = served.end(served.process.stdin.close)
        assert hung_up(page) == 1012, "the server restarts or ends"
    assert code == 0
    assert "control token" in said
    assert secret["control"] not in said
    assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "scope").iterdir()] == ["collector.lock"]
    assert not any(path.name.startswith((".trimtab", "trimtab-control")) for path in tmp_path.iterdir())


def test_sigterm_ends_it_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "scope").mkdir()
    served = Served(tmp_path, "--no-live", "--bind", "0.0.0.0:0")
    answer = httpx2.get(f"{served.url}api/v1/status", headers={"Authorization": f"Bearer {served.token}"})
    assert answer.json() == {"state": "recordings", "error": ""}
    code, said = served.end(lambda: served.process.send_signal(signal.SIGTERM))
    warning, last = said.splitlines()
    assert "not encrypted" in warning, "it listens on every network"
    assert (code, last) == (130, "trimtab: interrupted")
    assert list((tmp_path / "scope").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere: no such directory"),
        ([".", "--bind", "127.0.0.1:PORT"], "cannot listen there (Address already in use)"),
        ([".", "--bind", "127.0.0.1:x"], "expected host:port"),
        ([".", "--link-hours", "0"], "--link-hours 0"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    from typer.testing import CliRunner

    from trimtab.cli import app

    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["scope", "serve", *(one.replace("PORT", port) for one in arguments)])
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)


class Job:
    """A collector, as far as a server listens to one."""

    def __init__(self) -> None:
        self.callback: Callable[[Received | Notice], None] = lambda _: None

    def status(self) -> dict[str, Any]:
        return {"state": "waiting"}

    def listen(self, callback: Callable[[Received | Notice], None], *, frames: bool = True) -> Callable[[], None]:
        self.callback = callback
        return lambda: None


@contextlib.contextmanager
def serving(directory: Path, limits: Limits) -> Generator[tuple[Job, Service, str, Callable[[], int]]]:
    """A server in a thread; its address, and how many connections it has."""
    job: Any = Job()
    service = Service(Runs([directory]), job, limits=limits)
    with contextlib.closing(listen("127.0.0.1:0")) as listener:
        server = server_of(service, Options((directory,), limits=limits), listener)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            until = time.monotonic() + 10
            while not server.started and time.monotonic() < until:
                time.sleep(0.005)
            yield job, service, f"127.0.0.1:{listener.getsockname()[1]}", lambda: len(server.server_state.connections)
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


def test_slow_clients_are_dropped_and_others_hear_everything(tmp_path: Path) -> None:
    frame = Frame("layers.0.output", "raw", "s-1", 0, 0, 0, arrays={"values": np.zeros(500_000, np.uint8)})
    raw = memoryview(encode(frame))
    with serving(tmp_path, Limits(slow_seconds=0.5)) as (job, service, address, connections):
        headers = {"Authorization": f"Bearer {service.tokens.link}"}
        url = f"ws://{address}/api/v1/live"
        # The quick one reads all the time; the slow one asks for the same and never reads.
        with connect(url, additional_headers=headers) as quick, connect(url, additional_headers=headers) as slow:
            for client in (quick, slow):
                client.send('{"op": "subscribe", "id": "a", "pattern": "**"}')
            slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            until = time.monotonic() + 10
            sent = 0
            steps: list[int] = []
            while (service.slow == 0 or service.hub.clients > 1) and time.monotonic() < until:
                job.callback(Received(frame, raw))
                job.callback(Notice("applied", str(sent)))
                sent += 1
                steps += heard(quick, sent - 1)
            assert service.slow == 1, "the one that does not read was cut"
            assert service.hub.clients == 1
            while connections() > 1 and time.monotonic() < until:
                time.sleep(0.01)
            assert connections() == 1, "nothing waits for it to take what was sent"
            assert steps == list(range(sent)), "the other one heard every notice"


def test_clients_that_vanish_leave_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = memoryview(encode(Frame("logits", "raw", "s-1", 0, 0, 0, arrays={"values": np.zeros(300_000, np.uint8)})))
    with serving(tmp_path, Limits()) as (job, service, address, connections):
        headers = {"Authorization": f"Bearer {service.tokens.link}"}
        for _ in range(3):
            with connect(f"ws://{address}/api/v1/live", additional_headers=headers) as client:
                client.send('{"op": "subscribe", "id": "a", "pattern": "**"}')
                client.recv(5)
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                for _ in range(20):
                    job.callback(Received(decode_all(raw)[0], raw))
                client.socket.close()
        until = time.monotonic() + 10
        while (service.hub.clients or connections()) and time.monotonic() < until:
            time.sleep(0.005)
        assert (service.hub.clients, connections(), service.slow) == (0, 0, 0)
    assert caplog.records == []


def heard(client: Any, notice: int) -> list[int]:
    """Numbers of the notices that come up to this one; frames on the way are as they were sent."""
    found: list[int] = []
    while not found or found[-1] < notice:
        said = client.recv(5)
        if isinstance(said, bytes):
            assert all(one.tap == "layers.0.output" for one in decode_all(wire.unpack(said)[1]))
        elif (message := json.loads(said))["type"] == "notice":
            found.append(int(message["text"]))
    return found
