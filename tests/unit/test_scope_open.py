"""``trimtab scope open`` and ``close``: what is there to be shown, the link, the browser, and the server's end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from scope_server_parts import Clock, record, site
from typer.testing import CliRunner

from trimtab.cli import app
from trimtab.scope.commands.open import VIEWS
from trimtab.scope.server import visiting

WEB = Path(__file__).parents[2] / "web"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    record(directory, steps=2)
    return directory


@pytest.fixture
def served(run: Path, tmp_path: Path) -> Iterator[visiting.Server]:
    server = visiting.start(run, ["--no-live"], tmp_path / "log")
    yield server
    visiting.close(run)


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["scope", *map(str, arguments)])


def test_a_server_outlives_who_started_it_and_is_found_opened_and_closed(run: Path, tmp_path: Path) -> None:
    source = (
        "import sys; from pathlib import Path; from trimtab.scope.server.visiting import start;"
        "print(start(Path(sys.argv[1]), ['--no-live'], Path(sys.argv[2])).pid)"
    )
    words = [sys.executable, "-c", source, str(run), str(tmp_path / "log")]
    # All that the pipe's other ends wait for is over when the child is: the server holds none of them.
    pid = int(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)
    server = visiting.running(run)
    assert server is not None
    assert server.pid == pid
    assert os.getsid(pid) == pid, "Ctrl-C at the terminal does not reach it"
    opened = invoke("open", run, "--no-browser", "--view", "layers", "--step", "3", "--tap", "a b&c", "--run", "run.x")
    assert opened.exit_code == 0, opened.output
    link = opened.stdout.strip()
    assert link.startswith(server.link)
    asked = parse_qs(urlsplit(link).query)
    assert {name: asked[name] for name in ("view", "step", "tap", "run")} == {
        "view": ["layers"], "step": ["3"], "tap": ["a b&c"], "run": ["run.x"],
    }  # fmt: skip
    with httpx2.Client() as browser:
        assert browser.get(link, follow_redirects=True).status_code == 200
    assert "has ended" in invoke("close", run).output
    assert visiting.running(run) is None
    assert sorted(path.suffix for path in (run / "scope").iterdir()) == [".ttscope"]
    assert "no server" in invoke("close", run).output


def test_it_serves_where_nobody_does(run: Path) -> None:
    words = [sys.executable, "-m", "trimtab", "scope", "open", str(run), "--idle-minutes", "0.02", "--step", "1"]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    }
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, "it ends when nobody looks"
    (link,) = done.stdout.splitlines()
    port = urlsplit(link).port
    assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/\?token=\S+&step=1", link)
    assert f"ssh -L {port}:127.0.0.1:{port} " in done.stderr
    assert "nobody has looked for 0.02 minutes" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere: no such directory"),
        (["file"], "file: not a directory; give record.dir of a job"),
        (["."], "nothing is recorded there"),
        ([".", "--view", "layer"], "--view layer: there is no such view; one of ranks, layers"),
        (["run", "--run", "nope"], "--run nope: no run 'nope'; known are run"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text("{}")
    result = invoke("open", *arguments)
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert "\n" not in str(result.exception)


def test_views_are_those_of_the_page() -> None:
    source = (WEB / "src" / "app" / "views.ts").read_text(encoding="utf-8")
    assert re.findall(r"^    id: '([a-z]+)',$", source, re.MULTILINE) == list(VIEWS)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("", "empty"),
        ("[]", "of another kind"),
        (
            '{"url": "http://127.0.0.1:1/", "link": "http://127.0.0.1:1/?token=x", "pid": 1, "token": "x"}',
            "nobody there",
        ),
        ('{"url": "nonsense", "link": "", "pid": 1, "token": "x"}', "no address"),
    ],
)
def test_what_a_server_left_behind_is_no_server(run: Path, said: str, what: str) -> None:
    (run / "scope" / "server-token").write_text(said)
    assert visiting.running(run) is None, what
    assert not visiting.close(run)


def test_another_servers_address_is_not_taken_for_ones_own(run: Path, served: visiting.Server) -> None:
    file = run / "scope" / "server-token"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"token": "guessed"}))
    assert visiting.running(run) is None
    file.write_text(json.dumps(said))
    assert visiting.running(run) == served


def test_a_browser_is_started_only_where_one_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    opened: list[str] = []
    said: list[str] = []

    def start(link: str) -> bool:
        opened.append(link)
        return True

    assert not visiting.browse("http://127.0.0.1:8080/?token=x", {}, said.append, start)
    assert not opened
    assert "ssh -L 8080:127.0.0.1:8080 " in said[0]
    assert visiting.browse("http://127.0.0.1:8080/?token=x", {"DISPLAY": ":0"}, said.append, start)
    assert opened == ["http://127.0.0.1:8080/?token=x"]
    assert len(said) == 1
    assert not visiting.browse("http://127.0.0.1:8080/?token=x", {"DISPLAY": ":0"}, said.append, lambda _: False)
    assert len(said) == 2


def test_a_server_that_cannot_begin_says_why(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        visiting.start(run, ["--bind", "127.0.0.1:x"], tmp_path / "log")


def test_idle_is_who_has_not_asked_and_has_no_socket_open(run: Path) -> None:
    with site(run) as one:
        clock: Clock = one.clock
        clock.now += 100.0
        assert one.service.idle_seconds() == 100.0
        one.client.get("/api/v1/health")
        one.client.get("/api/v1/runs", headers={"Authorization": "Bearer wrong"})
        assert one.service.idle_seconds() == 100.0, "strangers keep nothing alive"
        one.get("/runs")
        assert one.service.idle_seconds() == 0.0
        with one.client.websocket_connect("ws://127.0.0.1:8000/api/v1/live", headers=one.headers) as live:
            live.receive_json()
            clock.now += 100.0
            assert one.service.idle_seconds() == 0.0
        until = time.monotonic() + 10
        while one.service.hub.clients:
            assert time.monotonic() < until
        clock.now += 5.0
        assert one.service.idle_seconds() == 5.0
