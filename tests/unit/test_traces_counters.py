"""Counters in the viewers' formats: tracks of values, never slices; and through the recorder's own files unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from trimtab.events import Kind
from trimtab.topology import Topology
from trimtab.traces import own_write
from trimtab.traces.chrome import write_chrome
from trimtab.traces.perfetto import write_perfetto
from trimtab.traces.read import read
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import Trace

JOB = SyntheticJob(
    Topology(dp=2), steps=3, counter_seconds=0.05, faults=(SyntheticFault("slow_clock", ranks=(1,), factor=2.0),)
)


def expected(trace: Trace, rank: int, name: str, value: str) -> list[tuple[int, float]]:
    """(time from the first event, value) of one counter."""
    origin = trace.events["start"].min()
    rows = trace.events.filter(
        (pl.col("kind") == Kind.COUNTER.value) & (pl.col("rank") == rank) & (pl.col("name").cast(pl.String) == name)
    ).sort("start")
    return [(start - origin, json.loads(args)[value]) for start, args in rows.select("start", "args").iter_rows()]  # pyright: ignore[reportOperatorIssue]


def test_perfetto_draws_each_counter_on_a_track_of_its_rank(tmp_path: Path) -> None:
    trace = generate(JOB)
    write_perfetto(trace, tmp_path / "t.pftrace")
    tracks: dict[int, pb.TrackDescriptor] = {}
    values: dict[tuple[str, str], list[tuple[int, float]]] = {}
    begun = 0
    for packet in pb.Trace.FromString((tmp_path / "t.pftrace").read_bytes()).packet:
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        elif packet.track_event.type == pb.TrackEvent.TYPE_COUNTER:
            track = tracks[packet.track_event.track_uuid]
            assert track.HasField("counter")
            rank = tracks[track.parent_uuid].process.process_name
            value = packet.track_event.double_counter_value
            values.setdefault((rank, track.name), []).append((packet.timestamp, value))
        begun += packet.track_event.type == pb.TrackEvent.TYPE_SLICE_BEGIN
    assert values["rank 1 (dp1)", "gpu: sm_clock_mhz"] == expected(trace, 1, "gpu", "sm_clock_mhz")
    assert values["rank 0 (dp0)", "host: load_1m"] == expected(trace, 0, "host", "load_1m")
    assert {value for _, value in values["rank 1 (dp1)", "gpu: throttle hw_thermal_slowdown"]} == {1.0}
    assert {value for _, value in values["rank 0 (dp0)", "gpu: throttle hw_thermal_slowdown"]} == {0.0}
    assert begun == len(trace.events.filter(pl.col("kind") != Kind.COUNTER.value))


def test_chrome_draws_each_counter_by_itself(tmp_path: Path) -> None:
    trace = generate(JOB)
    write_chrome(trace, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    drawn = [e for e in events if e["ph"] == "C" and e["pid"] == 1 and e["name"] == "gpu: sm_clock_mhz"]
    assert [(e["ts"], e["args"]["value"]) for e in sorted(drawn, key=lambda e: e["ts"])] == [
        (time / 1000, value) for time, value in expected(trace, 1, "gpu", "sm_clock_mhz")
    ]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(trace.events.filter(pl.col("kind") != Kind.COUNTER.value))
    assert not any(event["cat"] == "counter" for event in slices)


def test_hostile_values_are_written_as_nothing(tmp_path: Path) -> None:
    trace = generate(JOB)
    events = trace.events.with_columns(args=pl.when(pl.col("args").is_not_null()).then(pl.lit('{"x": NaN, "y": [')))
    hostile = Trace(events, trace.ranks, trace.world_size)
    write_chrome(hostile, tmp_path / "t.json")
    assert not any(e["ph"] == "C" for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"])
    write_perfetto(hostile, tmp_path / "t.pftrace")


def test_counters_survive_the_recorders_own_format(tmp_path: Path) -> None:
    trace = generate(JOB)
    own_write.write(trace, tmp_path / "run")
    got = read(tmp_path / "run")
    assert got.warnings == ()
    keys = ["rank", "start", "event_id"]
    chosen = [
        t.events.filter(pl.col("kind") == Kind.COUNTER.value)
        .sort(keys)
        .select("rank", "step", pl.col("name").cast(pl.String), "start", "end", "args")
        for t in (trace, got)
    ]
    assert chosen[0].equals(chosen[1])
