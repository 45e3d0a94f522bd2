"""Any Chrome trace; and what trimtab itself writes as one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from format_files import SHARED, chrome

from trimtab.traces.chrome import write_chrome
from trimtab.traces.read import read
from trimtab.traces.synthetic import generate
from trimtab.traces.synthetic_job import SyntheticJob

PUBLIC = SHARED / "bytedance_straggler" / "timeline-ST.json.gz"


@pytest.mark.skipif(not PUBLIC.is_file(), reason=f"the public trace is not at {PUBLIC}")
def test_a_public_timeline() -> None:
    trace = read(PUBLIC)
    assert len(trace.events) == 6_784
    assert trace.events["step"].n_unique() == 32
    assert trace.events["microbatch"].max() == 3


@pytest.mark.parametrize("packed", [False, True])
def test_spans_steps_and_kernels(tmp_path: Path, packed: bool) -> None:
    text = json.dumps({"traceEvents": chrome()}).encode()
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    trace = read(path)
    assert sorted(trace.ranks) == [0, 1]
    assert trace.aligned
    loads = trace.events.filter((pl.col("name").cast(pl.String) == "load") & (pl.col("rank") == 1)).sort("start")
    assert loads["start"].to_list() == [step * 1_000_000 + 1_000 for step in range(3)]
    assert (loads["end"] - loads["start"]).to_list() == [10_000] * 3
    assert loads["step"].to_list() == [0, 1, 2]
    assert loads["microbatch"].to_list() == [4, 4, 4]
    assert json.loads(loads["args"][0])["mb_id"] == 4
    assert (
        trace.events.filter(pl.col("kind") == "kernel").select((pl.col("end") - pl.col("start")).unique()).item()
        == 5500
    )
    assert sorted(trace.events.filter(pl.col("name").cast(pl.String) == "step")["step"]) == [0, 0, 1, 1, 2, 2]


def test_what_trimtab_writes_comes_back_as_spans(tmp_path: Path) -> None:
    job = generate(SyntheticJob())
    path = tmp_path / "own.json.gz"
    written = write_chrome(job, path)
    trace = read(path)
    assert sorted(trace.ranks) == sorted(job.ranks)
    assert len(trace.events) == written.events


def test_files_of_ranks(tmp_path: Path) -> None:
    events = [event for event in chrome(1) if event["ph"] != "M"]
    for name in ("rank0", "rank7"):
        (tmp_path / f"{name}.json").write_text(json.dumps([*events, {"ph": "i", "name": name, "ts": 1, "pid": "x"}]))
    trace = read(tmp_path)
    assert sorted(trace.ranks) == [0, 7]
    (tmp_path / "other.json").write_text(json.dumps([*events, {"ph": "i", "name": "z", "ts": 1}]))
    with pytest.raises(ValueError, match=r"does not tell its rank: put it into the name, as in rank3.json"):
        read(tmp_path)


def test_processes_that_are_no_ranks_are_counted(tmp_path: Path) -> None:
    events = [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": pid, "tid": 0} for pid in (90210, "main", 1.5, None)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    trace = read(path)
    assert sorted(trace.ranks) == [0, 1, 2, 3]
    assert any("in the order of their ids" in warning for warning in trace.warnings)


def test_asynchronous_spans_and_lost_ends(tmp_path: Path) -> None:
    events = [
        {"ph": "b", "cat": "a", "id": "0x1", "name": "outer", "ts": 0, "pid": 0},
        {"ph": "b", "cat": "a", "id": "0x2", "name": "outer", "ts": 1, "pid": 0},
        {"ph": "e", "cat": "a", "id": "0x1", "name": "outer", "ts": 5, "pid": 0},
        {"ph": "B", "name": "never ends", "ts": 2, "pid": 0, "tid": 0},
        {"ph": "B", "name": "b", "ts": 3, "pid": 0, "tid": 0},
        {"ph": "E", "name": "b", "ts": 4, "pid": 0, "tid": 0},
        {"ph": "E", "name": "never began", "ts": 4, "pid": 0, "tid": 9},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    trace = read(path)
    spans = {name: end - start for name, start, end in trace.events.select("name", "start", "end").iter_rows()}
    assert spans == {"outer": 5_000, "b": 1_000}
    assert any("3 begins or ends of spans have no counterpart" in warning for warning in trace.warnings)


def test_hostile_names_are_kept_as_text(tmp_path: Path) -> None:
    name = "</script><img src=x>\x1b[2J\u0000"
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{"ph": "X", "name": name, "ts": 1, "dur": 1, "pid": 0, "tid": 0}]))
    assert read(path).events["name"].to_list() == [name]


def test_times_that_make_no_sense(tmp_path: Path) -> None:
    times = ((float("nan"), 1), (1e300, 1), (1, -5))
    text = json.dumps(
        [{"ph": "X", "name": name, "ts": ts, "dur": dur} for name, (ts, dur) in zip("abc", times, strict=True)]
    )
    path = tmp_path / "trace.json"
    path.write_text(text)
    trace = read(path)
    assert trace.events.select("name", "start", "end").rows() == [("c", 1000, 1000)]
    assert any("2 of 3 events have no time" in warning for warning in trace.warnings)
    assert any("1 events end before they begin" in warning for warning in trace.warnings)
