"""Spans of the engine's calls and of the user."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spool_files import FakeClock, files_of, make_recorder

import trimtab
from trimtab.events import Kind
from trimtab.record.clocks import CpuDevice
from trimtab.record.observe import Call, Observers
from trimtab.record.recorder import Recorder
from trimtab.record.spans import SpanObserver, set_recorder, span


def rows(directory: Path) -> list[dict[str, Any]]:
    (file,) = files_of(directory)
    return file.rows


class Rig:
    """A recorder with clocks in the test's hand: host, device and thread CPU."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.host, self.queue, self.cpu = FakeClock(1_000), FakeClock(5_000), FakeClock(10)
        self.directory = directory
        self.recorder = make_recorder(directory, self.host, **settings)
        self.observer = Observers([SpanObserver(self.recorder, CpuDevice(self.queue), self.host, self.cpu)])

    def rows(self) -> dict[str, dict[str, Any]]:
        self.recorder.close()
        return {row["name"]: row for row in rows(self.directory)}


def test_a_call_becomes_a_span_of_the_device(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.observer.step_begin(2)
    call = Call(Kind.BACKWARD, "layer", layer=3, microbatch=1, chunk=0)
    rig.observer.begin(call)
    rig.host.advance(7)
    rig.queue.advance(800)
    rig.cpu.advance(5)
    rig.observer.end(call)
    row = rig.rows()["layer"]
    assert (row["kind"], row["stream"], row["step"]) == ("backward", "compute", 2)
    assert (row["ready"], row["start"], row["end"], row["cpu_ns"]) == (1_000, 5_000, 5_800, 5)
    assert (row["layer"], row["microbatch"], row["chunk"]) == (3, 1, 0)
    assert row["parent_id"] is None
    assert call.state == {}


def test_calls_nest_by_thread(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    outer, inner, beside = (Call(Kind.FORWARD, name) for name in ("outer", "inner", "beside"))
    rig.observer.begin(outer)
    rig.observer.begin(inner)

    def other_thread() -> None:
        rig.observer.begin(beside)
        rig.observer.end(beside)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    rig.observer.end(inner)
    rig.observer.end(outer)
    found = rig.rows()
    assert found["inner"]["parent_id"] == found["outer"]["event_id"]
    assert found["outer"]["parent_id"] is None
    assert found["beside"]["parent_id"] is None


def test_calls_whose_end_never_came_are_nobodys_parents_for_long(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    outer, broken, after, later = (Call(Kind.FORWARD, name) for name in ("outer", "broken", "after", "later"))
    rig.observer.begin(outer)
    rig.observer.begin(broken)  # its forward raised
    rig.observer.end(outer)
    rig.observer.begin(after)
    rig.observer.end(after)
    rig.observer.begin(broken)
    rig.observer.step_begin(0)
    rig.observer.begin(later)
    rig.observer.end(later)
    found = rig.rows()
    assert "broken" not in found
    assert found["after"]["parent_id"] is None
    assert found["later"]["parent_id"] is None


def test_thread_cpu_time_is_unknown_across_threads(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    call = Call(Kind.BACKWARD, "layer")
    thread = threading.Thread(target=rig.observer.begin, args=(call,))
    thread.start()
    thread.join()
    rig.observer.end(call)
    assert rig.rows()["layer"]["cpu_ns"] is None


def test_right_after_a_call_the_cpus_clock_is_known(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    readings: list[int] = []

    def cpu_clock() -> int:
        readings.append(rig.cpu.now)
        return rig.cpu.now

    observer = SpanObserver(rig.recorder, CpuDevice(rig.queue), rig.host, cpu_clock)
    for name, gap in (("first", 0), ("near", 5_000), ("far", 50_000)):
        rig.host.advance(gap)
        rig.cpu.advance(gap)
        call = Call(Kind.FORWARD, name)
        observer.begin(call)
        rig.host.advance(900)
        rig.cpu.advance(700)
        observer.end(call)
    assert len(readings) == 5, "twice a call, but once for the one that began right after another"
    assert {name: row["cpu_ns"] for name, row in rig.rows().items()} == {"first": 700, "near": 700, "far": 700}


def test_outside_the_sample_nothing_is_collected(tmp_path: Path) -> None:
    rig = Rig(tmp_path, every_steps=2)
    call = Call(Kind.FORWARD, "layer")
    rig.observer.step_begin(1)
    rig.observer.begin(call)
    assert call.state == {}
    rig.observer.end(call)
    assert "layer" not in rig.rows()


def test_a_call_that_began_in_a_sampled_step_is_recorded(tmp_path: Path) -> None:
    rig = Rig(tmp_path, every_steps=2)
    call = Call(Kind.FORWARD, "layer")
    rig.observer.step_begin(0)
    rig.observer.begin(call)
    rig.observer.step_begin(1)
    rig.observer.end(call)
    assert "layer" in rig.rows()


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = make_recorder(tmp_path, FakeClock())
    set_recorder(recorder)
    yield recorder
    set_recorder(None)
    recorder.close()


def test_user_spans_are_on_the_host_stream(tmp_path: Path, recorder: Recorder) -> None:
    recorder.begin_step(5)
    with trimtab.span("load", shard=3):
        pass
    recorder.close()
    row = next(row for row in rows(tmp_path) if row["name"] == "load")
    assert (row["kind"], row["stream"], row["step"], row["args"]) == ("user", "host", 5, '{"shard": 3}')
    assert row["end"] >= row["start"] > 0
    assert row["cpu_ns"] >= 0


def test_a_span_lets_exceptions_pass_and_is_recorded(tmp_path: Path, recorder: Recorder) -> None:
    with pytest.raises(KeyError), span("raises"):
        raise KeyError
    recorder.close()
    assert [row["name"] for row in rows(tmp_path)] == ["raises"]


def test_a_decorated_function_is_measured_at_every_call(tmp_path: Path, recorder: Recorder) -> None:
    @span("double")
    def double(x: int, by: int = 2) -> int:
        """Doc."""
        return x * by

    @span("later", n=1)
    async def later() -> int:
        return 7

    assert double(4) == 8
    assert double(4, by=3) == 12
    assert (double.__name__, double.__doc__) == ("double", "Doc.")
    assert asyncio.run(later()) == 7
    recorder.close()
    assert [row["name"] for row in rows(tmp_path)] == ["double", "double", "later"]


def test_detached_or_unsampled_a_span_does_nothing(tmp_path: Path) -> None:
    with span("nowhere", a=1) as entered:
        assert isinstance(entered, span)
    recorder = make_recorder(tmp_path, FakeClock(), every_steps=2)
    set_recorder(recorder)
    try:
        recorder.begin_step(1)
        with span("unsampled"):
            recorder.begin_step(2)
        with span("sampled"):
            set_recorder(None)
    finally:
        set_recorder(None)
        recorder.close()
    assert [row["name"] for row in rows(tmp_path) if row["kind"] == "user"] == ["sampled"]


def test_importing_trimtab_brings_neither_torch_nor_pyarrow() -> None:
    import subprocess
    import sys

    code = "import sys, trimtab; assert not {'torch', 'pyarrow'} & set(sys.modules); print(trimtab.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == trimtab.__version__
    with pytest.raises(AttributeError, match="nothing"):
        trimtab.nothing  # noqa: B018


def test_at_granularity_step_layers_are_not_recorded_even_where_an_emulated_device_needs_them(tmp_path: Path) -> None:
    rig = Rig(tmp_path, granularity="step")
    rig.observer.step_begin(0)
    for call in (Call(Kind.FORWARD, "layer", layer=0), Call(Kind.OPTIMIZER, "optimizer")):
        rig.observer.begin(call)
        rig.observer.end(call)
    assert set(rig.rows()) == {"optimizer", "step"}
