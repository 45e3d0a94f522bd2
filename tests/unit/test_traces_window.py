"""Window files as a GPU's profiler writes them, joined with a run; and files that are damaged or hostile."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.traces.kineto import read_kineto
from trimtab.traces.table import COLUMNS, KIND, RankInfo, Trace
from trimtab.traces.window_kernels import _Intervals, find_windows, read_window, with_kernels

BASE = 1_700_000_000_000_000_000
"""Unix time of the file's origin, in nanoseconds ..."""
HOST = 5_000_000_000
"""... the recorder's clock then ..."""
TRACE = BASE + 1_000_000
"""... and the run's, whose own measure of Unix time was a millisecond off."""
FILE = "rank00003-a0-window-000010-000011.pt.trace.json.gz"


def trace() -> Trace:
    """Of rank 3: the window's opening, a forward, a backward and a collective."""
    rows: list[dict[str, Any]] = [
        {"event_id": 1, "kind": "host", "name": "window", "start": TRACE - 50_000, "args": '{"part": "opening"}'},
        {"event_id": 7, "kind": "forward", "name": "layer", "ready": TRACE + 110_000},
        {"event_id": 8, "kind": "backward", "name": "layer", "ready": TRACE + 210_000},
        {"event_id": 9, "kind": "collective", "name": "all_reduce", "ready": TRACE + 290_000},
    ]
    columns = {name: [{"rank": 3, "step": 10, **row}.get(name) for row in rows] for name in COLUMNS}
    events = pl.DataFrame(columns, schema={**COLUMNS, "kind": KIND})
    return Trace(events, {3: RankInfo(3)}, world_size=8, run_id="job")


def slice_(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(number: int, ts: float, tid: int, start: float, dur: float, stream: int = 7) -> list[dict[str, Any]]:
    return [
        slice_("cuda_runtime", "cudaLaunchKernel", ts, 5, tid, correlation=number, cbid=211),
        slice_("kernel", f"kernel {number}", start, dur, 7, correlation=number, stream=stream, device=0),
    ]


def document() -> dict[str, Any]:
    """Two threads: the main one with a forward, autograd's with a backward and a collective within it."""
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE,
        "distributedInfo": {"rank": 3, "world_size": 8},
        "trimtab": {
            "version": 1,
            "run_id": "job",
            "attempt": 0,
            "rank": 3,
            "world_size": 8,
            "first_step": 10,
            "last_step": 11,
            "opening_ns": HOST - 50_000,
            "clock_unix_ns": [[HOST, BASE], [HOST + 1_000_000, BASE + 1_000_000]],
        },
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 100, "tid": 0, "args": {"name": "python"}},
            slice_("user_annotation", "ProfilerStep#10", 100, 400),
            slice_("user_annotation", "ProfilerStep#11", 500, 400),
            slice_("user_annotation", "trimtab:7 layer 0 forward", 115, 50),
            slice_("user_annotation", "trimtab-begin:8 layer 0 backward", 215, 1, tid=2),
            slice_("user_annotation", "trimtab:9 all_reduce", 295, 20, tid=2),
            slice_("user_annotation", "trimtab-end:8 layer 0 backward", 350, 1, tid=2),
            *launched(1, ts=120, tid=1, start=300, dur=100),
            *launched(2, ts=230, tid=2, start=400, dur=50),
            *launched(3, ts=300, tid=2, start=460, dur=200, stream=20),
            *launched(4, ts=340, tid=2, start=470, dur=10),
            *launched(5, ts=230, tid=1, start=480, dur=10),  # while the other thread is in a backward
            *launched(6, ts=600, tid=2, start=700, dur=10),
            slice_("gpu_memcpy", "Memcpy HtoD", 110, 2, 7, correlation=99, stream=7, device=0),  # launched before
            slice_("cpu_op", "aten::mm", 118, 20),
            slice_("Trace", "PyTorch Profiler", 100, 900),
        ],
    }


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / FILE
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def test_kernels_belong_to_the_innermost_span_of_the_thread_that_launched_them(tmp_path: Path) -> None:
    window = read_window(written(tmp_path, document()), trace())
    assert (window.rank, window.first, window.last) == (3, 10, 11)
    events = window.events.with_columns(pl.col("name", "stream").cast(pl.String))
    found = {row["name"]: row for row in events.iter_rows(named=True)}
    assert {name: (row["step"], row["correlation_id"]) for name, row in found.items()} == {
        "kernel 1": (10, 7),
        "kernel 2": (10, 8),
        "kernel 3": (10, 9),
        "kernel 4": (10, 8),
        "kernel 5": (10, None),
        "kernel 6": (11, None),
        "Memcpy HtoD": (None, None),
    }
    assert found["kernel 3"]["stream"] == "gpu stream 20"
    assert found["Memcpy HtoD"]["ready"] is None
    first = found["kernel 1"]
    assert (first["ready"], first["start"], first["end"]) == (TRACE + 120_000, TRACE + 300_000, TRACE + 400_000)
    assert set(events["kind"]) == {"kernel"}
    assert window.lag_us == (5.0, 5.0)


def test_a_clock_that_drifts_is_followed(tmp_path: Path) -> None:
    content = document()
    content["trimtab"]["clock_unix_ns"] = [[HOST, BASE], [HOST + 999_000, BASE + 1_000_000]]
    window = read_window(written(tmp_path, content), trace())
    kernel = window.events.filter(pl.col("name").cast(pl.String) == "kernel 1")
    assert kernel["start"].item() == TRACE + 300_000 - 300
    assert kernel["end"].item() == TRACE + 400_000 - 400


def test_without_a_device_the_operators_are_what_ran(tmp_path: Path) -> None:
    content = document()
    content["traceEvents"] = [
        event for event in content["traceEvents"] if event.get("cat") not in ("kernel", "gpu_memcpy")
    ]
    window = read_window(written(tmp_path, content), trace())
    (row,) = window.events.iter_rows(named=True)
    assert (row["name"], row["stream"], row["step"], row["correlation_id"]) == ("aten::mm", "thread 1", 10, 7)


def test_kernels_join_the_event_table(tmp_path: Path) -> None:
    run = trace()
    together = with_kernels(run, [read_window(written(tmp_path, document()), run)])
    assert together.events.schema == run.events.schema
    assert len(together.events) == 4 + 7


def test_windows_are_found_one_folder_a_node(tmp_path: Path) -> None:
    assert find_windows(tmp_path) == []
    node = tmp_path / "node1"
    node.mkdir()
    path = written(node, document())
    (node / "rank00003-a0-000.trimtab.arrow").write_bytes(b"")
    assert find_windows(tmp_path) == [path]
    assert find_windows(node) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trimtab": None}, "not written by trimtab's recorder"),
        ({"trimtab": {"run_id": "job"}}, "not written by trimtab's recorder"),
        ({"traceEvents": 3}, "not a trace"),
        ({"traceEvents": [{"ph": "X", "ts": "soon"}]}, "1 events are damaged"),
        ({"traceEvents": [{"ph": "X", "ts": 1e300}]}, "a century or more away"),
        ({"traceEvents": [{"ph": "X", "ts": 0, "dur": 1e300}]}, "a century or more away"),
        ({"baseTimeNanoseconds": 1 << 64}, "a century"),
        ({"baseTimeNanoseconds": (1 << 63) - 1}, "a century or more away"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_window(written(tmp_path, document() | change), trace())
    assert "\n" not in str(raised.value)


def test_numbers_of_the_recorder_that_are_nonsense_are_one_line(tmp_path: Path) -> None:
    content = document()
    for key, value in (("clock_unix_ns", [[0, 0], [0, 1 << 62]]), ("opening_ns", -(1 << 62)), ("rank", 1 << 40)):
        wrong = {**content, "trimtab": {**content["trimtab"], key: value}}
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            read_window(written(tmp_path, wrong), trace())


def test_names_cannot_break_out(tmp_path: Path) -> None:
    content = document()
    content["traceEvents"] += [
        slice_("user_annotation", f"trimtab:{'9' * 30} x", 1, 1),
        slice_("user_annotation", "trimtab-end:12 never begun", 1, 1),
        slice_("user_annotation", "ProfilerStep#" + "9" * 30, 1, 1),
        slice_("kernel", "\u202e\x1b[2J", 1, 1, correlation=-5, stream="\n"),
    ]
    assert len(read_window(written(tmp_path, content), trace()).events) == 8


@pytest.mark.parametrize("damage", [b"", b"\x1f\x8b", b"{", None])
def test_a_damaged_file_is_one_line(tmp_path: Path, damage: bytes | None) -> None:
    path = written(tmp_path, document())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.raises(ValueError, match=FILE) as raised:
        read_kineto(path)
    assert "\n" not in str(raised.value)


def test_a_window_of_another_run_or_one_that_the_run_does_not_know(tmp_path: Path) -> None:
    path = written(tmp_path, document())
    with pytest.raises(ValueError, match=r"of another run \(job, attempt 0\)"):
        read_window(path, replace(trace(), attempt=1))
    silent = trace()
    with pytest.raises(ValueError, match="do not tell of this window"):
        read_window(path, replace(silent, events=silent.events.filter(pl.col("kind") != "host")))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8),
    st.lists(st.integers(-1, 45), min_size=1, max_size=20),
)
def test_the_innermost_interval_is_the_one_begun_last(spans: list[tuple[int, int]], times: list[int]) -> None:
    spans = sorted({start: (start, length) for start, length in spans}.values())
    intervals = _Intervals([s for s, _ in spans], [s + n for s, n in spans], list(range(len(spans))))
    expected = [
        max((number for number, (start, length) in enumerate(spans) if start <= time < start + length), default=-1)
        for time in times
    ]
    assert intervals.innermost(np.array(times, np.int64)).tolist() == expected
