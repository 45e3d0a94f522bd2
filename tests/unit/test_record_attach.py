"""Attaching to one process: configuration, what a session does, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import python
from spool_files import files_of, header

import trimtab
from trimtab.config import Config, EngineConfig, RecordConfig
from trimtab.traces.read import read

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("TRIMTAB_", "RANK", "WORLD_SIZE", "TORCHELASTIC")):
            monkeypatch.delenv(name)
    from trimtab.attach import _Current

    yield
    if _Current.session is not None:
        _Current.session.detach()


def plain(directory: Path, **record: Any) -> trimtab.attach.Session:  # pyright: ignore[reportFunctionMemberAccess]
    return trimtab.attach(engine={"name": "torch"}, record={"dir": directory, **record})


def train(steps: int, session: Any = None) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        if session is not None:
            session.step()
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_plain_pytorch_steps_and_optimizer_are_recorded(tmp_path: Path) -> None:
    expected = train(3)
    with plain(tmp_path) as session:
        with trimtab.span("setup"):
            pass
        assert train(3, session) == expected
    (file,) = files_of(tmp_path)
    assert file.merged["closed"] is True
    assert file.header["device"] == "cpu"
    named = {(row["name"], row["step"]): row for row in file.rows}
    assert {("setup", None), *(("step", n) for n in range(3)), *(("Adam", n) for n in range(3))} <= set(named)
    for step in range(3):
        whole, optimizer = named["step", step], named["Adam", step]
        assert whole["start"] <= optimizer["ready"] <= optimizer["start"] < optimizer["end"] <= whole["end"]
        assert (optimizer["kind"], optimizer["stream"]) == ("optimizer", "compute")


def test_detaching_leaves_nothing_behind(tmp_path: Path) -> None:
    from torch.distributed import Work
    from torch.optim import optimizer

    def state() -> dict[str, Any]:
        return {
            "gc": list(gc.callbacks),
            "meta": list(sys.meta_path),
            "before": list(optimizer._global_optimizer_pre_hooks),
            "after": list(optimizer._global_optimizer_post_hooks),
            "wait": Work.wait,
            "threads": [t.name for t in threading.enumerate() if t.name.startswith("trimtab")],
            "hook": sys.excepthook,
        }

    before = state()
    session = trimtab.attach(record={"dir": tmp_path})
    assert state() != before
    session.detach()
    session.detach()
    assert state() == before
    session.step()


def test_a_resumed_job_says_the_number_of_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with plain(tmp_path) as session:
        for number in (5_000, 5_001, -1, 2**31, None):
            session.step(number)
    (file,) = files_of(tmp_path)
    assert [row["step"] for row in file.rows if row["name"] == "step"] == [5_000, 5_001, 5_002]
    (said,) = caplog.messages
    assert "step -1 is not a number from 0 to 2147483647" in said


def test_targets_overrun_in_the_last_step_are_counted(tmp_path: Path) -> None:
    emulate = {"enabled": True, "optimizer_ms": 0.000001}
    session = trimtab.attach(engine={"name": "torch"}, record={"dir": tmp_path}, emulate=emulate)
    train(3, session)
    session.detach()
    (file,) = files_of(tmp_path)
    assert file.merged["oversubscribed"] == 3


def test_attaching_twice_says_so_and_gives_the_same_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = plain(tmp_path / "a")
    second = plain(tmp_path / "b")
    assert second is first
    assert [record.getMessage() for record in caplog.records] == [
        "trimtab: already attached to this process; this call changes nothing"
    ]
    first.detach()
    third = plain(tmp_path / "c")
    assert third is not first
    third.detach()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


def test_the_module_and_the_function_of_one_name_are_both_there(tmp_path: Path) -> None:
    import trimtab.attach

    with trimtab.attach(Config(engine=EngineConfig("torch"), record=RecordConfig(dir=str(tmp_path)))):  # pyright: ignore[reportCallIssue]
        pass
    assert trimtab.attach.Session is trimtab.attach.attach(record={"enabled": False}).__class__


def test_sources_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.toml"
    file.write_text(f'[engine]\nname = "torch"\n[record]\ndir = "{tmp_path}/file"\nevery_steps = 3\n')
    monkeypatch.setenv("TRIMTAB_RECORD_EVERY_STEPS", "5")
    with trimtab.attach(file, record={"dir": tmp_path / "argument"}) as session:
        assert session.config.record.every_steps == 5
        assert session.config.record.dir == f"{tmp_path}/argument"
    config = Config(engine=EngineConfig("torch"), record=RecordConfig(dir=str(tmp_path / "given")))
    with trimtab.attach(config, record={"flush_seconds": 3}) as session:
        assert session.config.record.every_steps == 1, "a Config is taken as it is, whatever the environment says"
        assert session.config.record.flush_seconds == 3


def test_mistakes_are_one_line_each_and_the_job_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    session = trimtab.attach(
        engine={"name": "torch"},
        record={"dir": tmp_path, "evry_steps": 2},
        faults={"inject": ["slow_compute:rank=7", "nonsense:rank=0"]},
        recrod=1,
    )
    with session:
        train(2, session)
    lines = [record.getMessage() for record in caplog.records]
    assert all("\n" not in line and line.startswith("trimtab: ") for line in lines)
    for part in ("evry_steps", "recrod", "rank 7 is not in a world of 1", "no kind 'nonsense'"):
        assert sum(part in line for line in lines) == 1
    assert len(lines) == 4
    assert len(files_of(tmp_path)) == 1


def test_a_contradictory_environment_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with plain(tmp_path) as session:
        train(1, session)
    (record,) = caplog.records
    assert "rank 5 is not in a world of 2" in record.getMessage()
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_fails_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no dispatcher here")

    monkeypatch.setattr("trimtab.record.communication.collectives.Interception.install", broken)
    with plain(tmp_path) as session:
        train(1, session)
    assert ["no dispatcher here" in record.getMessage() for record in caplog.records] == [True]
    (file,) = files_of(tmp_path)
    assert "Adam" in {row["name"] for row in file.rows}


def test_a_composition_that_fails_is_undone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr("trimtab.engines.plain.PlainEngine.install", broken)
    with plain(tmp_path) as session:
        train(1, session)
    (record,) = caplog.records
    assert "not attached (RuntimeError: what nobody thought of)" in record.getMessage()
    assert [t for t in threading.enumerate() if t.name.startswith("trimtab")] == []


def test_recording_can_be_off(tmp_path: Path) -> None:
    with plain(tmp_path, enabled=False) as session:
        train(2, session)
        with trimtab.span("nowhere"):
            pass
    assert list(tmp_path.iterdir()) == []


EXITS = {
    "exit code": ("sys.exit(7)", 7),
    "exception": ("raise KeyError('x')", 1),
}


@pytest.mark.parametrize("how", EXITS)
def test_a_job_that_never_detaches_ends_in_order(tmp_path: Path, how: str) -> None:
    last, code = EXITS[how]
    script = f"""
import sys, trimtab
session = trimtab.attach(engine={{"name": "torch"}}, record={{"dir": {str(tmp_path)!r}, "flush_seconds": 1000}})
session.step()
with trimtab.span("work"):
    pass
{last}
"""
    if how == "exit code":
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    else:
        done = python(["-c", script], tmp_path)
    assert done.returncode == code, done.stderr
    said = done.stderr.replace(str(Path(__file__).parents[2]), "")  # the checkout may lie in a folder of that name
    assert "trimtab" not in said.replace("import sys, trimtab", "")
    (file,) = files_of(tmp_path)
    assert file.merged["closed"] is True
    assert {"step", "work"} <= {row["name"] for row in file.rows}


def test_a_killed_job_leaves_what_was_flushed(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, signal, trimtab
session = trimtab.attach(engine={{"name": "torch"}}, record={{"dir": {str(tmp_path)!r}, "ring_events": 256}})
(file,) = pathlib.Path({str(tmp_path)!r}).iterdir()
while file.stat().st_size < 50_000:
    with trimtab.span("work"):
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = python(["-c", script], tmp_path)
    assert done.returncode == -9, done.stderr
    (file,) = files_of(tmp_path)
    assert "closed" not in file.merged
    assert len(file.rows) > 50


def test_reads_of_a_data_loader_are_recorded(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    loader = DataLoader([torch.zeros(1)] * 4, batch_size=2)  # pyright: ignore[reportArgumentType]
    with plain(tmp_path) as session:
        session.step()
        assert len(list(loader)) == 2
    (file,) = files_of(tmp_path)
    reads = [row for row in file.rows if row["kind"] == "data"]
    assert [(row["name"], row["stream"], row["step"]) for row in reads] == [("data", "host", 0)] * 2


def test_faults_without_an_engine_are_loud_and_act(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faulty = trimtab.attach(
        engine={"name": "torch"}, record={"dir": tmp_path}, faults={"inject": ["host_stall:rank=0,ms=50,steps=1"]}
    )
    with faulty:
        train(2, faulty)
    (file,) = files_of(tmp_path)
    stalled = {row["step"]: row["end"] - row["start"] for row in file.rows if row["name"] == "step"}
    assert stalled[1] >= 50_000_000
    assert file.merged["faults"] == ["host_stall:ranks=0,ms=50,steps=1"]
    assert ["FAULT INJECTED" in record.getMessage() for record in caplog.records] == [True]


def test_a_wrong_rank_is_noticed_at_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain(tmp_path) as session:
        session.step()
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
        session.step()
        session.step()
    (record,) = caplog.records
    assert "recording as rank 0 what is rank 3" in record.getMessage()


def test_a_device_that_learns_its_name_late_is_named_in_the_file(tmp_path: Path) -> None:
    from trimtab.assembly import StepSpans
    from trimtab.record.clocks import CpuDevice
    from trimtab.record.recorder import Recorder

    device = CpuDevice()
    device.name = ""
    recorder = Recorder(RecordConfig(dir=str(tmp_path)), device, header() | {"device_name": ""})
    spans = StepSpans(0, recorder, device, None)
    spans.step_begin(0)
    device.name = "NVIDIA H200"
    spans.step_begin(1)
    recorder.close()
    assert read(tmp_path).ranks[0].device_name == "NVIDIA H200"
