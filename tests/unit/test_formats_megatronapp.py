"""MegatronApp's traces: the public merged ones with their known windows, and small jobs made up."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from format_files import SHARED, megatronapp_merged, megatronapp_rank

from trimtab.events import Kind
from trimtab.topology import Topology
from trimtab.traces.read import read
from trimtab.traces.table import Trace

PUBLIC = SHARED / "megatronapp"
MESSAGE = ["group", "src", "dst", "tag", "seq"]


def of_kind(trace: Trace, *kinds: Kind) -> pl.DataFrame:
    return trace.events.filter(pl.col("kind").is_in([kind.value for kind in kinds]))


def named(trace: Trace, name: str) -> pl.DataFrame:
    return trace.events.filter(pl.col("name").cast(pl.String) == name)


def pairs(trace: Trace) -> pl.DataFrame:
    sent, received = (
        of_kind(trace, kind).select([*MESSAGE, "step", "start", "end"]) for kind in (Kind.SEND, Kind.RECV)
    )
    return sent.join(received, on=MESSAGE, suffix="_there")


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"the public traces are not at {PUBLIC}")
@pytest.mark.parametrize(("schedule", "window_ms", "step_ms"), [("pp", 9.0, 677), ("dpp", 20.2, 907)])
def test_public_traces(schedule: str, window_ms: float, step_ms: float) -> None:
    trace = read(PUBLIC / f"data-1-pipeline-4-tensor-1-{schedule}-aggregated.json")
    assert trace.topology == Topology(pp=4, vpp=4)
    found = pairs(trace)
    assert len(found) == len(of_kind(trace, Kind.SEND)) == len(of_kind(trace, Kind.RECV)) == 20 * 2 * 8 * 15
    judged = found.filter(pl.col("step") > 0)
    assert judged.select((pl.col("end_there") - pl.col("end")).mean()).item() / 1e6 == pytest.approx(
        window_ms, abs=0.05
    )
    steps = named(trace, "step").filter((pl.col("rank") == 0) & (pl.col("step") > 0))
    assert steps.select((pl.col("end") - pl.col("start")).median()).item() / 1e6 == pytest.approx(step_ms, abs=1)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"the public traces are not at {PUBLIC}")
def test_a_folder_of_several_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match="several jobs in one place, name one"):
        read(PUBLIC)


def test_messages_that_the_schedule_implies(tmp_path: Path) -> None:
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(megatronapp_merged()))
    trace = read(path)
    assert trace.topology == Topology(pp=2, vpp=2)
    assert trace.aligned
    found = pairs(trace)
    assert len(found) == 3 * 2 * 2 * 3
    onward = found.filter((pl.col("src") == 0) & (pl.col("tag") == 0))
    assert set(onward.select((pl.col("end_there") - pl.col("end")) / 1e6).to_series()) == {1.0}
    windows = named(trace, "gradients (window)")
    assert len(windows) == 3 * 2 * 2
    assert windows.filter(pl.col("end") <= pl.col("start")).is_empty()
    assert of_kind(trace, Kind.FORWARD)["microbatch"].null_count() == 0


def test_two_tensor_ranks_of_a_merged_file(tmp_path: Path) -> None:
    events = [event | {"tid": tensor} for event in megatronapp_merged() for tensor in (0, 1)]
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(events))
    trace = read(path)
    assert trace.topology == Topology(tp=2, pp=2, vpp=2)
    assert trace.world_size == 4
    assert len(pairs(trace)) == 2 * 3 * 2 * 2 * 3


def write_ranks(folder: Path) -> Path:
    folder.mkdir()
    for dp in range(2):
        for pp in range(2):
            name = f"benchmark-data-{dp}-pipeline-{pp}-tensor-0.json"
            (folder / name).write_text(json.dumps(megatronapp_rank(dp, pp)))
    return folder


def test_the_files_of_the_ranks(tmp_path: Path) -> None:
    trace = read(write_ranks(tmp_path / "run"))
    assert trace.topology == Topology(dp=2, pp=2)
    assert trace.matching == "order"
    assert sorted(trace.ranks) == [0, 1, 2, 3]
    sent, received = of_kind(trace, Kind.SEND), of_kind(trace, Kind.RECV)
    assert sorted(sent.select("rank", "src", "dst", "tag").unique().iter_rows()) == [
        (0, 0, 2, 0), (1, 1, 3, 0), (2, 2, 0, 1), (3, 3, 1, 1),
    ]  # fmt: skip
    assert set(received.select("src", "dst", "tag").iter_rows()) == {(0, 2, 0), (1, 3, 0), (2, 0, 1), (3, 1, 1)}
    assert len(pairs(trace)) == 3 * 2 * 3
    assert set(sent["bytes"]) == {4096}
    reduced = of_kind(trace, Kind.COLLECTIVE)
    assert {trace.groups[str(name)] for name in reduced["group"].unique()} == {(0, 1), (2, 3)}
    assert named(trace, "transformer_layer_3")["layer"].unique().to_list() == [3]
    steps = named(trace, "step").filter(pl.col("rank") == 0).sort("step")
    assert steps.select((pl.col("end") - pl.col("start")) / 1e6).to_series().to_list() == [60.0] * 3
    assert steps["start"].diff().drop_nulls().unique().to_list() == [62_000_000]


def test_a_rank_is_told_by_the_name_of_its_file_or_not_at_all(tmp_path: Path) -> None:
    bare = [
        {key: value for key, value in row.items() if key not in ("dp_rk", "pp_rk", "tp_rk", "g_rk", "dev")}
        for row in megatronapp_rank(0, 1)
    ]
    path = tmp_path / "benchmark-data-0-pipeline-1-tensor-0.json"
    path.write_text(json.dumps(bare))
    assert sorted(read(path).ranks) == [1]
    path = path.rename(tmp_path / "trace.json")
    with pytest.raises(ValueError, match=r"does not tell its rank; give it the name benchmark-data-D-pipeline-P"):
        read(path)


def test_copies_and_merged_files_beside_the_ranks(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "run")
    first = folder / "benchmark-data-0-pipeline-0-tensor-0.json"
    (folder / "copy.json").write_text(first.read_text())
    (folder / "aggregated.json").write_text(json.dumps(megatronapp_merged()))
    trace = read(folder)
    assert sorted(trace.ranks) == [0, 1, 2, 3]
    assert any("of the same rank as" in warning for warning in trace.warnings)
    assert any("merged files are not read" in warning and "aggregated.json" in warning for warning in trace.warnings)


def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    text = json.dumps(megatronapp_merged(), indent=2)
    path = tmp_path / "merged.json"
    path.write_text(text[: len(text) * 2 // 3])
    trace = read(path)
    assert 0 < len(of_kind(trace, Kind.FORWARD)) < 3 * 2 * 2 * 2
    assert any("bytes" in warning and "are read" in warning for warning in trace.warnings)


def test_begins_without_ends_are_said(tmp_path: Path) -> None:
    events = megatronapp_merged()
    gone = next(place for place, event in enumerate(events) if event["ph"] == "E")
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(events[:gone] + events[gone + 1 :]))
    trace = read(path)
    assert any("1 begins or ends of spans have no counterpart" in warning for warning in trace.warnings)


def test_merged_by_the_newer_script(tmp_path: Path) -> None:
    events = [
        {
            "name": "forward", "ph": "X", "ts": 1000 * step + 10 * pp, "dur": 8.5, "pid": pp, "tid": 0,
            "args": {"iteration": step, "dp_rk": 0, "pp_rk": pp, "tp_rk": 0, "g_rk": pp, "micro_batch_index": 0},
        }
        for step in range(3) for pp in range(2)
    ]  # fmt: skip
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(events))
    trace = read(path)
    assert trace.topology == Topology(pp=2)
    assert of_kind(trace, Kind.FORWARD).select((pl.col("end") - pl.col("start")).unique()).to_series().to_list() == [
        8500
    ]
