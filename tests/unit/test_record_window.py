"""Profiler windows on one rank, with torch's real profiler: when they open, what they leave, when they step aside."""

from __future__ import annotations

import gzip
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import profile

from trimtab.config import RecordConfig, WindowConfig
from trimtab.events import Kind
from trimtab.record.clocks import CpuDevice
from trimtab.record.observe import Call
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity, make_header
from trimtab.record.spans import SpanObserver
from trimtab.record.windows.annotations import Annotations
from trimtab.record.windows.kineto import OtherProfilers
from trimtab.record.windows.window import Place, Windows, start_windows
from trimtab.record.windows.window_files import REQUEST_FILE, Request, window_name, write_request
from trimtab.traces.read import read
from trimtab.traces.window_kernels import find_windows, read_window

SECOND = 1_000_000_000


class Rank:
    """A recorder and its windows, stepped by hand; ``now`` is Unix time."""

    def __init__(self, directory: Path, threaded: bool = False, **window: Any) -> None:
        self.now = 1000 * SECOND
        self.directory = directory
        config = RecordConfig(dir=str(directory), window=WindowConfig(**window))
        header = make_header(
            Identity(3, 8, "job", 0),
            device="cpu",
            device_name="",
            granularity="layer",
            unix_offset_ns=time.time_ns() - time.perf_counter_ns(),
            clock_domain="here",
        )
        self.recorder = Recorder(config, CpuDevice(), header, threaded=False)
        self.spans = SpanObserver(self.recorder, CpuDevice())
        place = Place(directory, "job", 0, 3, 8)
        self.windows = Windows(
            config.window,
            place,
            self.recorder,
            Annotations(self.spans),
            unix=lambda: self.now,
            threaded=threaded,
        )
        self.step = -1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.windows.before_step(self.step)
            self.spans.step_begin(self.step)
            self.windows.step_begun(self.step)
            call = Call(Kind.FORWARD, "layer", layer=0)
            self.spans.begin(call)
            torch.add(torch.ones(4), 1)
            self.spans.end(call)
            while self.windows.write():
                pass

    def close(self) -> None:
        self.windows.close()
        while self.windows.write():
            pass
        self.recorder.close()

    def files(self) -> list[str]:
        return sorted(path.name for path in find_windows(self.directory))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "trimtab")
    return caplog


def names(*windows: tuple[int, int]) -> list[str]:
    return [window_name(3, 0, first, last) for first, last in windows]


def content(path: Path) -> dict[str, Any]:
    with gzip.open(path) as source:
        return json.load(source)


def test_planned_windows_open_and_leave_files_that_others_read(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path, steps=2, start=1, every=4, ranks="1,3-4")
    rank.train(9)
    rank.close()
    assert rank.files() == names((1, 2), (5, 6))
    assert said.messages == []
    for name, first in zip(rank.files(), (1, 5), strict=True):
        trace = content(tmp_path / name)
        slices = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        steps = [event["name"] for event in slices if event["name"].startswith("ProfilerStep#")]
        assert steps == [f"ProfilerStep#{first}", f"ProfilerStep#{first + 1}"]
        assert sum(event["name"] == "aten::add" for event in slices) == 2
        assert trace["distributedInfo"]["rank"] == 3
        assert trace["trimtab"]["run_id"] == "job"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".arrow", ".gz", ".gz", ".json"]  # no leftovers
    trace = read(tmp_path)
    events = trace.events.filter(trace.events["name"].cast(str) == "window")
    assert events["step"].sort().to_list() == [1, 2, 5, 6]
    for name in rank.files():
        window = read_window(tmp_path / name, trace)
        assert set(window.events["step"]) == {window.first, window.last}
        assert window.events["correlation_id"].null_count() == 0


def test_other_ranks_open_none_and_nothing_is_in_the_way(tmp_path: Path) -> None:
    rank = Rank(tmp_path, steps=2, start=0, ranks="0-2")
    patched = profile._prepare_trace
    rank.train(3)
    assert not _profiler_enabled()
    assert not {"begin", "end"} & set(vars(rank.spans))
    rank.close()
    assert rank.files() == []
    assert profile._prepare_trace is not patched


def test_spans_are_untouched_outside_of_the_window(tmp_path: Path) -> None:
    rank = Rank(tmp_path, steps=1, start=1, ranks="all")
    rank.train(1)
    assert not {"begin", "end"} & set(vars(rank.spans))
    rank.train(1)
    assert {"begin", "end"} <= set(vars(rank.spans))
    rank.train(1)
    assert not {"begin", "end"} & set(vars(rank.spans))
    rank.close()


def test_a_window_is_opened_on_request_once_and_not_before_its_time(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    rank = Rank(tmp_path)
    write_request(tmp_path, Request(rank.now + 1, rank.now + 5 * SECOND, 2, "0,3"))
    rank.windows.look()
    rank.train(2)
    rank.now += 6 * SECOND
    rank.train(4)
    rank.windows.look()
    rank.train(4)
    rank.close()
    assert rank.files() == names((2, 3))
    assert said.messages == []


@pytest.mark.parametrize("ranks", ["0-2", "4"])
def test_a_request_to_others_is_left_to_them(tmp_path: Path, ranks: str) -> None:
    rank = Rank(tmp_path)
    write_request(tmp_path, Request(rank.now + 1, 0, 2, ranks))
    rank.windows.look()
    rank.train(3)
    rank.close()
    assert rank.files() == []


def test_a_request_from_before_this_process_is_not_served_again(tmp_path: Path) -> None:
    write_request(tmp_path, Request(999 * SECOND, 0, 2, "all"))
    rank = Rank(tmp_path)
    rank.windows.look()
    rank.train(3)
    rank.close()
    assert rank.files() == []


@pytest.mark.parametrize(
    "text", ["", "[]", '{"steps": 3}', '{"number":1e99,"begins_unix_ns":1,"steps":1,"ranks":"0"}', "[" * 4000]
)
def test_a_request_that_makes_no_sense_is_told_once(tmp_path: Path, said: pytest.LogCaptureFixture, text: str) -> None:
    rank = Rank(tmp_path)
    (tmp_path / REQUEST_FILE).write_text(text)
    rank.windows.look()
    rank.windows.look()
    rank.train(2)
    rank.close()
    (line,) = said.messages
    assert "not a request for a window" in line
    assert "\n" not in line


def test_the_jobs_own_profiler_goes_first(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path, steps=2, start=1, ranks="all")
    own = profile()
    with own:
        rank.train(4)
    rank.close()
    assert rank.files() == []
    assert any(event.name == "aten::add" for event in own.function_events or ())
    (line,) = said.messages
    assert "the job runs a profiler of its own" in line


def test_an_open_window_gives_way_to_the_jobs_profiler(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path, steps=3, start=1, ranks="all")
    rank.train(3)
    assert _profiler_enabled()
    own = profile()
    with own:
        rank.train(3)
    rank.close()
    assert sum(event.name == "aten::add" for event in own.function_events or ()) == 3
    assert rank.files() == []
    (line,) = said.messages
    assert "gives way to the job's own profiler" in line


def test_a_profiler_that_is_prepared_counts_as_running() -> None:
    begun: list[int] = []
    others = OtherProfilers(lambda: begun.append(1))
    original = profile._prepare_trace
    others.install()
    try:
        assert not others.running
        own = profile()
        own._prepare_trace()
        assert others.running
        own._start_trace()
        own.__exit__(None, None, None)
        assert not others.running
        assert begun == [1]
    finally:
        others.remove()
    assert profile._prepare_trace is original


def test_a_file_that_cannot_be_written_is_told_and_training_goes_on(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    rank = Rank(tmp_path, steps=1, start=0, ranks="all")
    (tmp_path / window_name(3, 0, 0, 0)).mkdir()
    rank.train(3)
    rank.close()
    (line,) = said.messages
    assert "the profiler window of steps 0 to 0 is lost" in line
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    told = read(tmp_path).events
    assert told.filter(told["name"].cast(str) == "window")["args"].str.contains("file").sum() == 0


def test_a_profiler_that_fails_ends_windows_and_not_the_job(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any) -> None:
        raise RuntimeError("CUPTI\nis taken")

    rank = Rank(tmp_path, steps=1, start=0, every=1, ranks="all")
    monkeypatch.setattr("trimtab.record.windows.kineto._profile.__enter__", broken)
    rank.train(3)
    rank.close()
    (line,) = said.messages
    assert "could not be opened (RuntimeError: CUPTI is taken)" in line
    assert read(tmp_path).events.filter(read(tmp_path).events["name"].cast(str) == "step").height == 3


def test_detaching_in_a_window_keeps_what_was_seen(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path, steps=100, start=1, ranks="all")
    rank.train(3)
    rank.close()
    assert rank.files() == names((1, 2))
    assert not _profiler_enabled()
    assert said.messages == []


def test_the_thread_writes_and_ends(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path, threaded=True, steps=1, start=0, ranks="all")
    rank.train(2)
    rank.windows.close(timeout=30.0)
    rank.recorder.close()
    assert rank.files() == names((0, 0))
    assert said.messages == []


def test_none_are_prepared_for_where_none_can_come(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    identity = Identity(3, 8, "job", 0)
    config = RecordConfig(window=WindowConfig(request_seconds=0))
    assert start_windows(config, identity, rank.recorder, rank.spans) is None
    rank.close()
