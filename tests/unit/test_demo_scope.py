"""What the demo records for the browser, and how it ends where that cannot be shown."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scope_job import FakeRank, connected, wait
from scope_server_parts import record

from trimtab import demo_scope
from trimtab.scope.recording.reader import open_recording

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def test_ranks_are_asked_once_they_train_and_what_they_send_is_recorded(tmp_path: Path) -> None:
    said: list[str] = []
    ranks = [FakeRank(rank, 4, step=0) for rank in range(4)]
    run = tmp_path / "run"
    try:
        with demo_scope.recording(run, 20, os.environ, said.append):
            connected(run, os.environ, ranks)
            assert all(not rank.prepared and not rank.active for rank in ranks), "the model is not there before a step"
            for rank in ranks:
                rank.train()
                rank.say()

            def asked() -> bool:
                for rank in ranks:
                    rank.train()
                    rank.say()
                kinds = {body["what"] for body in ranks[0].active.values()}
                return kinds == {"statistics", "histogram", "tiles", "pca"}

            wait(asked, "the ranks have begun", 30)
    finally:
        for rank in ranks:
            rank.close()
    recording = open_recording(run)
    assert recording.label == "demo"
    assert recording.warnings == []
    assert ("layers.3.output", "statistics") in recording.taps()
    (line,) = said
    assert line.startswith("trimtab: attention of layers.*.attention.map: "), "what is not offered is said"


def test_it_is_served_until_ctrl_c_and_that_is_no_error(tmp_path: Path) -> None:
    record(tmp_path / "run", steps=2)
    source = "import sys; from pathlib import Path; from trimtab.demo_scope import show; show(Path(sys.argv[1]))"
    words = [sys.executable, "-c", source, str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name not in DISPLAYS}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        link = process.stderr.readline().removeprefix("In the browser: ").strip()
        assert process.stderr.readline() == "Ctrl-C ends the server.\n"
        with httpx2.Client() as browser:
            assert browser.get(link, follow_redirects=True).status_code == 200
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(30) == 0, said
    assert "Traceback" not in said
    assert [path.suffix for path in (tmp_path / "run" / "scope").iterdir()] == [".ttscope"]


def test_without_a_job_it_ends_in_silence(tmp_path: Path) -> None:
    said: list[str] = []
    with demo_scope.recording(tmp_path / "run", 20, os.environ, said.append):
        pass
    assert said == []
    assert not list((tmp_path / "run").rglob("*.ttscope"))


def test_without_a_server_to_be_had_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "uvicorn" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    line = demo_scope.leave_open(tmp_path, tmp_path / "log")
    assert line == f"In the browser: pip install 'trimtab[scope]', and then trimtab scope open {tmp_path}"
    with pytest.raises(ModuleNotFoundError):
        demo_scope.check_installed()


def test_a_server_that_does_not_begin_is_said_with_what_to_do(tmp_path: Path) -> None:
    said = demo_scope.leave_open(tmp_path / "nowhere", tmp_path / "log").splitlines()
    assert "no such directory" in said[0]
    assert said[1] == f"In the browser: trimtab scope open {tmp_path / 'nowhere'}"
