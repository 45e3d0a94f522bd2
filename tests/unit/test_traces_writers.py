"""Perfetto, Chrome and Parquet files hold what the trace holds."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from trimtab.events import COMM_KINDS, EVENT_SCHEMA, HEADER_KEY
from trimtab.topology import Topology
from trimtab.traces import window
from trimtab.traces.chrome import write_chrome
from trimtab.traces.convert import convert
from trimtab.traces.own_write import write
from trimtab.traces.parquet import write_parquet
from trimtab.traces.perfetto import write_perfetto
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import COLUMNS, RankInfo, Trace

JOB = SyntheticJob(Topology(tp=2, pp=2, dp=2), steps=4, dp_overlap=True, receive_ahead=True)
HOSTILE = '</script>"\\\u202e\n{{7*7}}\x00 %s'
Slice = tuple[str, str, int, int, dict[str, Any], tuple[int, ...]]


def texts(events: pl.DataFrame) -> pl.DataFrame:
    return events.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))


def parse(path: Path) -> tuple[dict[int, pb.TrackDescriptor], dict[int, list[Slice]]]:
    """Tracks by number, and on each its slices: name, category, start, end, arguments, flows."""
    trace = pb.Trace.FromString(path.read_bytes())
    tracks: dict[int, pb.TrackDescriptor] = {}
    slices: dict[int, list[Slice]] = defaultdict(list)
    running: dict[int, list[Any]] = defaultdict(list)
    strings: dict[tuple[str, int], str] = {}
    for packet in trace.packet:
        for field, entries in packet.interned_data.ListFields():
            for entry in entries:
                text = entry.str.decode() if field.name == "debug_annotation_string_values" else entry.name
                assert strings.setdefault((field.name, entry.iid), text) == text
    for number, packet in enumerate(sorted(trace.packet, key=lambda packet: packet.timestamp)):  # as viewers do
        assert packet.trusted_packet_sequence_id == 1
        if packet.HasField("track_descriptor"):
            assert packet.track_descriptor.uuid not in tracks
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        if not packet.HasField("track_event"):
            assert number == 0 or packet.HasField("track_descriptor")
            continue
        event = packet.track_event
        assert event.track_uuid in tracks
        if event.type == pb.TrackEvent.TYPE_SLICE_END:
            name, category, start, args, flows = running[event.track_uuid].pop()
            slices[event.track_uuid].append((name, category, start, packet.timestamp, args, flows))
            continue
        args = {
            strings["debug_annotation_names", a.name_iid]: a.int_value
            if a.HasField("int_value")
            else strings["debug_annotation_string_values", a.string_value_iid]
            for a in event.debug_annotations
        }
        name = strings["event_names", event.name_iid]
        category = strings["event_categories", event.category_iids[0]]
        running[event.track_uuid].append((name, category, packet.timestamp, args, tuple(event.flow_ids)))
    assert not any(running.values())
    return tracks, slices


def test_perfetto_has_a_group_for_each_rank_and_a_track_for_each_stream(tmp_path: Path) -> None:
    trace = generate(JOB)
    written = write_perfetto(trace, tmp_path / "t.pftrace")
    assert written.events == len(trace.events)
    tracks, slices = parse(tmp_path / "t.pftrace")
    groups = {uuid: t for uuid, t in tracks.items() if t.HasField("process")}
    assert [t.process.process_name for t in groups.values()][5] == "rank 5 (tp1 dp0 pp1)"
    assert [t.process.legacy_sort_index for t in groups.values()] == list(range(8))
    assert len({t.process.pid for t in groups.values()} - {0}) == 8
    origin = trace.events["start"].min()
    found: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for uuid, content in slices.items():
        rank = groups[tracks[uuid].parent_uuid].process.legacy_sort_index
        stream = tracks[uuid].name.split(" (")[0]
        found[rank, stream] += [(name, kind, start + origin, end + origin) for name, kind, start, end, _, _ in content]
    expected: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for rank, stream, *rest in texts(trace.events).select("rank", "stream", "name", "kind", "start", "end").iter_rows():
        expected[rank, stream].append(tuple(rest))
    assert {place: sorted(rows) for place, rows in found.items()} == {p: sorted(r) for p, r in expected.items()}
    by_place = {(tracks[uuid].parent_uuid, tracks[uuid].name) for uuid in slices}
    assert len(by_place) == len(slices)


def test_perfetto_flows_join_the_members_of_each_communication(tmp_path: Path) -> None:
    trace = generate(JOB)
    write_perfetto(trace, tmp_path / "t.pftrace")
    tracks, slices = parse(tmp_path / "t.pftrace")
    members: dict[int, list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    joined = 0
    for uuid, content in slices.items():
        rank = tracks[tracks[uuid].parent_uuid].process.legacy_sort_index
        for name, kind, _, _, args, flows in content:
            assert bool(flows) == (kind in COMM_KINDS)
            joined += bool(flows)
            for flow in flows:
                members[flow].append((rank, name, args))
    assert joined == trace.events["kind"].is_in([kind.value for kind in COMM_KINDS]).sum()
    for sharing in members.values():
        ranks = tuple(sorted(rank for rank, _, _ in sharing))
        assert len({(a["group"], a["seq"], a["step"]) for _, _, a in sharing}) == 1
        args = sharing[0][2]
        if "src" in args:
            assert sorted(name for _, name, _ in sharing) == ["recv", "send"]
            assert ranks == tuple(sorted((args["src"], args["dst"])))
        else:
            assert ranks == trace.groups[args["group"]]


def test_a_message_sent_both_ways_makes_two_flows() -> None:
    events = texts(generate(replace(JOB, topology=Topology(pp=2), steps=2, receive_ahead=False)).events)
    untagged = events.with_columns(tag=pl.lit(None, pl.Int32)).with_columns(
        pl.col("kind").cast(COLUMNS["kind"]), *[pl.col(c).cast(pl.Categorical) for c in ("group", "op", "name")]
    )
    shown = window.choose(Trace(untagged, {0: RankInfo(0), 1: RankInfo(1)}, 2)).events
    messages = shown.filter(pl.col("kind").is_in(["send", "recv"]))
    sizes = messages.group_by("flow").agg(pl.len(), pl.col("src").n_unique())
    assert sizes["len"].unique().to_list() == [2]
    assert sizes["src"].max() == 1


def test_a_communication_whose_other_members_are_missing_makes_no_flow() -> None:
    trace = generate(JOB)
    alone = replace(trace, events=trace.events.filter(pl.col("rank") == 0))
    assert window.choose(alone).events["flow"].max() == 0


span = st.tuples(st.integers(0, 20), st.integers(0, 12))


@settings(max_examples=100, deadline=None)
@given(st.lists(span, min_size=1, max_size=30))
def test_overlapping_spans_get_lanes_on_which_they_nest(spans: list[tuple[int, int]]) -> None:
    rows = [
        dict.fromkeys(COLUMNS)
        | {"rank": 0, "event_id": k, "kind": "user", "stream": "comm", "start": start, "end": start + length}
        for k, (start, length) in enumerate(spans)
    ]
    shown = window.choose(Trace(pl.DataFrame(rows, schema=COLUMNS), {0: RankInfo(0)}, 1)).events
    for _, lane in shown.group_by("lane"):
        pairs = lane.select("start", "end").rows()
        for a in pairs:
            for b in pairs:
                crossing = a[0] < b[0] < a[1] < b[1]
                assert not crossing
    nested = all(not (a < c < a + b < c + d) for a, b in spans for c, d in spans)
    assert not nested or shown["lane"].max() == 0


def test_a_window_around_the_slowest_step(tmp_path: Path) -> None:
    slow = SyntheticFault("global_slowdown", steps=(7, 7), factor=2.0)
    trace = generate(SyntheticJob(Topology(dp=2), steps=10, faults=(slow,)))
    per_step = len(trace.events) // 10
    assert window.choose(trace, max_events=per_step).steps == (7, 7)
    assert window.choose(trace, max_events=3 * per_step).steps == (6, 8)
    assert window.choose(trace, max_events=7 * per_step).steps == (3, 9)
    assert window.choose(trace, max_events=1).steps == (7, 7)
    assert window.choose(trace).steps is None
    chosen = write_perfetto(trace, tmp_path / "t.pftrace", steps=(2, 3))
    assert (chosen.events, chosen.steps) == (2 * per_step, (2, 3))
    _, slices = parse(tmp_path / "t.pftrace")
    assert {args["step"] for content in slices.values() for *_, args, _ in content} == {2, 3}
    with pytest.raises(ValueError, match="steps 12-13: not in this trace, which holds steps 0-9"):
        window.choose(trace, (12, 13))


def test_the_first_step_is_not_taken_for_the_slowest() -> None:
    warm_up = SyntheticFault("global_slowdown", steps=(0, 0), factor=5.0)
    slow = SyntheticFault("global_slowdown", steps=(2, 2), factor=2.0)
    trace = generate(SyntheticJob(Topology(dp=2), steps=5, faults=(warm_up, slow)))
    assert window.choose(trace, max_events=1).steps == (2, 2)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_chrome_json(tmp_path: Path, name: str) -> None:
    trace = generate(JOB)
    write_chrome(trace, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    content = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    events = content["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "t", "f"}
    slices = [event for event in events if event["ph"] == "X"]
    origin = trace.events["start"].min()
    found = sorted(
        (e["pid"], e["name"], e["cat"], round(e["ts"] * 1000) + origin, round(e["dur"] * 1000)) for e in slices
    )
    shown = texts(trace.events).select("rank", "name", "kind", "start", pl.col("end") - pl.col("start"))
    assert found == sorted(shown.rows())
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert all((e["pid"], e["tid"]) in titles for e in slices)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} >= {"rank 5 (tp1 dp0 pp1)"}
    phases: dict[int, str] = defaultdict(str)
    for event in events:
        if event["ph"] in "stf":
            phases[event["id"]] += event["ph"]
    assert set(phases.values()) == {"sf", "s" + "t" * 6 + "f"}


def hostile_trace() -> Trace:
    row = dict.fromkeys(COLUMNS) | {"rank": 0, "event_id": 0, "kind": "user", "start": 5, "end": 9, "args": HOSTILE}
    return Trace(pl.DataFrame([row | {"name": HOSTILE, "stream": HOSTILE}], schema=COLUMNS), {0: RankInfo(0)}, 1)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    write_perfetto(hostile_trace(), tmp_path / "t.pftrace")
    tracks, slices = parse(tmp_path / "t.pftrace")
    (content,) = slices.values()
    assert content == [(HOSTILE, "user", 0, 4, {"args": HOSTILE}, ())]
    assert HOSTILE in {track.name for track in tracks.values()}
    write_chrome(hostile_trace(), tmp_path / "t.json")
    (event,) = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert (event["name"], event["args"]) == (HOSTILE, {"args": HOSTILE})


def test_parquet_is_the_event_table(tmp_path: Path) -> None:
    trace = generate(JOB)
    written = write_parquet(trace, tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema.remove_metadata() == EVENT_SCHEMA
    assert table.num_rows == written.events == len(trace.events)
    assert table["run_id"].to_pylist()[0] == "synthetic"
    said = json.loads(table.schema.metadata[HEADER_KEY])
    assert said["groups"]["world"] == list(range(8))
    assert said["ranks"]["3"]["coordinates"]["dp"] == 1
    back = pl.read_parquet(tmp_path / "t.parquet").select(pl.col(name).cast(pl.String) for name in ("kind", "group"))
    assert back.equals(texts(trace.events.sort("rank", "start")).select("kind", "group"))
    assert write_parquet(trace, tmp_path / "u.parquet", steps=(1, 2)).events == len(trace.events) // 2


@pytest.mark.parametrize("name", ["a.pftrace", "a.perfetto-trace", "a.json", "a.JSON.GZ", "a.parquet"])
def test_convert_goes_by_the_ending(tmp_path: Path, name: str) -> None:
    write(generate(JOB), tmp_path / "run")
    written = convert(tmp_path / "run", tmp_path / name, steps=(1, 2))
    assert written.path == tmp_path / name
    assert written.path.stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", name])  # nothing half-written stays


def test_convert_refuses_in_one_line(tmp_path: Path) -> None:
    write(generate(JOB), tmp_path / "run")
    with pytest.raises(ValueError, match=r"a.svg: its ending names no known format, choose from .perfetto-trace"):
        convert(tmp_path / "run", tmp_path / "a.svg")
    with pytest.raises(ValueError, match="no such file or directory"):
        convert(tmp_path / "walk", tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"cannot be written \(there is no directory"):
        convert(tmp_path / "run", tmp_path / "no" / "a.json")
    with pytest.raises(ValueError, match="steps 9-9: not in this trace"):
        convert(tmp_path / "run", tmp_path / "a.json", steps=(9, 9))


@pytest.mark.parametrize("writer", [write_perfetto, write_chrome, write_parquet])
def test_a_trace_without_events_is_refused_and_leaves_no_file(tmp_path: Path, writer: Any) -> None:
    empty = Trace(pl.DataFrame(schema=COLUMNS), {0: RankInfo(0)}, 1)
    with pytest.raises(ValueError, match="holds no events"):
        writer(empty, tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    def interrupted() -> None:
        with window.whole_file(tmp_path / "t.json") as sink:
            sink.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
