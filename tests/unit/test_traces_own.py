"""trimtab's own files: what was written is read, and bad input costs one clear line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from trimtab.events import FILE_SCHEMA, HEADER_KEY
from trimtab.record.files.spool import Spool
from trimtab.scan import analyze
from trimtab.scan.report import wording
from trimtab.topology import Topology
from trimtab.traces.own_write import to_arrow, write
from trimtab.traces.read import read
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import COLUMNS, RankInfo, Trace

JOB = SyntheticJob(Topology(tp=2, dp=2), steps=3, microbatches=2, ranks_per_host=2)


def assert_same(found: Trace, expected: Trace) -> None:
    key = ["rank", "event_id"]
    assert_frame_equal(found.events.sort(key), expected.events.sort(key), categorical_as_str=True)
    for name in ("ranks", "groups", "topology", "world_size", "run_id", "attempt"):
        assert getattr(found, name) == getattr(expected, name), name


def only_warning(trace: Trace) -> str:
    assert len(trace.warnings) == 1, trace.warnings
    assert "\n" not in trace.warnings[0]
    return trace.warnings[0]


def rewrite(file: Path, target: Path | None = None, *, header: dict[str, Any] | None = None, **options: Any) -> Path:
    """Copy a recorder file with another header; ``said`` replaces the first batch's metadata."""
    with pa.ipc.open_stream(file.read_bytes()) as reader:
        schema = options.get("schema", reader.schema)
        known = json.loads(reader.schema.metadata[HEADER_KEY])
        items = [reader.read_next_batch_with_custom_metadata() for _ in range(options.get("batches", 1))]
    target = target or file
    changed = schema.with_metadata({HEADER_KEY: json.dumps(known | (header or {})).encode()})
    with target.open("wb") as sink, pa.ipc.new_stream(sink, changed) as writer:
        for item in items:
            batch = options["change"](item.batch) if "change" in options else item.batch
            custom = options.get("said", item.custom_metadata)
            writer.write_batch(batch.replace_schema_metadata(changed.metadata), custom_metadata=custom)
    return target


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_rows=st.integers(1, 200),
    rotate_rows=st.none() | st.integers(20, 300),
    pp=st.integers(1, 2),
    faulty=st.booleans(),
    seed=st.integers(0, 100),
)
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, batch_rows: int, rotate_rows: int | None, pp: int, faulty: bool, seed: int
) -> None:
    faults = (SyntheticFault("slow_compute", ranks=(1,)),) if faulty else ()
    job = replace(JOB, topology=Topology(tp=2, dp=2, pp=pp), faults=faults, seed=seed)
    trace = generate(job)
    folder = tmp_path_factory.mktemp("run")
    files = write(trace, folder, batch_rows=batch_rows, rotate_rows=rotate_rows)
    found = read(folder)
    assert_same(found, trace)
    assert found.warnings == ()
    assert found.sources == tuple(map(str, files))
    assert found.missing_ranks == ()


def test_files_of_the_recorder_itself(tmp_path: Path) -> None:
    trace = generate(SyntheticJob(Topology(dp=2), steps=3, ranks_per_host=2, clock_offset_ms=0.0))
    offset = trace.events["start"].min() - 1  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
    rebased = trace.events.sort("rank", "event_id").with_columns(pl.col("ready", "start", "end") - offset)
    header = {"schema_version": 1, "run_id": trace.run_id, "attempt": 0, "world_size": 2, "unix_offset_ns": offset}
    header |= {"host": "node000", "clock_domain": "node000", "device": "emulated", "device_name": "synthetic"}
    for rank, info in trace.ranks.items():
        assert info.coordinates is not None
        assert trace.topology is not None
        spool = Spool(tmp_path, header | {"rank": rank}, rotate_bytes=8_000)
        said: dict[str, Any] = {"topology": trace.topology.as_dict(), "coordinates": info.coordinates.as_dict()}
        said |= {"groups": {name: list(ranks) for name, ranks in trace.groups.items()}}
        rows = to_arrow(rebased.filter(pl.col("rank") == rank)).combine_chunks().to_batches(max_chunksize=40)
        for number, batch in enumerate(rows):
            spool.append(batch, said if number == 0 else {"closed": True} if number == len(rows) - 1 else {})
        spool.close()
    found = read(tmp_path)
    assert len(found.sources) > 2  # rotated
    assert_same(found, trace)
    assert found.warnings == ()


def test_a_world_of_one_rank(tmp_path: Path) -> None:
    trace = generate(SyntheticJob(steps=2))
    write(trace, tmp_path)
    assert_same(read(tmp_path), trace)


def test_only_the_columns_asked_for(tmp_path: Path) -> None:
    write(generate(JOB), tmp_path)
    events = read(tmp_path, columns=["start", "kind"]).events
    assert events.columns == ["rank", "kind", "start"]
    assert_frame_equal(events, read(tmp_path).events.select("rank", "kind", "start"))
    with pytest.raises(ValueError, match="no column 'begin'"):
        read(tmp_path, columns=["begin"])


def test_extremes_and_unknowns_survive(tmp_path: Path) -> None:
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {
        "rank": 0,
        "event_id": 7,
        "kind": "user",
        "name": "<script>\n\u202e'; DROP",
        "start": 2**60,
        "end": 2**60 + 1,
    }
    row |= {"shape": [3, -1], "args": '{"a": "\\u0000"}', "stream": "", "bytes": 2**62}
    trace = Trace(pl.DataFrame([row], schema=COLUMNS), {0: RankInfo(0)}, 1, run_id="../../x\n")
    write(trace, tmp_path)
    assert_same(read(tmp_path), trace)


def test_one_offset_to_unix_time_for_each_clock(tmp_path: Path) -> None:
    trace = generate(JOB)
    files = write(trace, tmp_path)
    offset = json.loads(pa.ipc.open_stream(files[0].read_bytes()).schema.metadata[HEADER_KEY])["unix_offset_ns"]
    rewrite(files[1], header={"unix_offset_ns": offset + 10_000})  # measured a little later, the same clock
    assert_same(read(tmp_path), trace)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path)
    files[1].unlink()
    files[2].unlink()
    trace = read(tmp_path)
    assert trace.warnings == ()  # whoever judges the trace says what that means
    assert trace.missing_ranks == (1, 2)
    assert sorted(trace.events["rank"].unique()) == [0, 3]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kept=st.floats(0.0, 0.999))
def test_a_truncated_file_loses_its_last_batch_at_most(tmp_path_factory: pytest.TempPathFactory, kept: float) -> None:
    trace = generate(JOB)
    folder = tmp_path_factory.mktemp("run")
    files = write(trace, folder, batch_rows=10)
    data = files[2].read_bytes()
    files[2].write_bytes(data[: int(len(data) * kept)])
    found = read(folder)
    assert found.warnings
    mine, whole = (t.events.filter(pl.col("rank") == 2).sort("end", "event_id") for t in (found, trace))
    assert len(mine) % 10 == 0 or len(mine) == len(whole)
    assert mine["end"].to_list() == whole["end"].to_list()[: len(mine)]
    assert len(mine) >= 10 * int((kept - 0.25) * len(whole) / 10)  # a header of some size comes first
    if 2 in found.ranks:
        assert not found.ranks[2].closed


def test_a_truncated_tail_says_where_and_how_much(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path, batch_rows=10)
    data = files[2].read_bytes()
    files[2].write_bytes(data[:-500])
    first, second = read(tmp_path).warnings
    assert files[2].name in first
    assert "its end is cut off or damaged" in first
    assert second == "rank 2: the recording has no orderly end (still running, or killed)"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_in_a_file_costs_no_more_than_that_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bits that flipped, bytes that were lost or came in: Arrow and polars must not be handed what ends the process."""
    folder = tmp_path_factory.mktemp("run")
    files = write(generate(JOB), folder, batch_rows=20)
    content = bytearray(files[2].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "insert", "remove", "zero"])):
            case "flip":
                content[place] ^= 1 << data.draw(st.integers(0, 7))
            case "insert":
                content[place:place] = data.draw(st.binary(min_size=1, max_size=40))
            case "remove":
                del content[place : place + data.draw(st.integers(1, 40))]
            case _:
                content[place : place + 200] = bytes(len(content[place : place + 200]))
    files[2].write_bytes(content)
    found = read(folder)
    assert {0, 1, 3} <= set(found.ranks) or found.warnings  # its header may now name another run, or world
    assert all("\n" not in warning for warning in found.warnings)
    found.events.with_columns(pl.col(pl.Categorical).cast(pl.String)).rows()


def test_times_beyond_all_reason_are_left_out(tmp_path: Path) -> None:
    trace = generate(JOB)
    first = (pl.col("rank") == 1) & (pl.col("event_id") == 3)
    broken = trace.events.with_columns(end=pl.when(first).then(2**63 - 1).otherwise("end"))
    write(replace(trace, events=broken), tmp_path)
    found = read(tmp_path)
    assert only_warning(found) == "rank 1: 1 events lie a century or more away; left out"
    assert len(found.events) == len(trace.events) - 1


def test_empty_and_foreign_files_are_left_out(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path)
    files[0].write_bytes(b"")
    files[1].write_bytes(b"not arrow at all, but long enough to hold a message")
    with pa.ipc.new_stream(str(files[2]), FILE_SCHEMA):
        pass
    trace = read(tmp_path)
    assert sorted(trace.ranks) == [3]
    empty, foreign, no_header = trace.warnings
    assert f"{files[0]}: an empty file" in empty
    assert f"{files[1]}: not an Arrow stream" in foreign
    assert f"{files[2]}: an Arrow file, but not written by trimtab's recorder" in no_header
    assert trace.missing_ranks == (0, 1, 2)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"schema_version": 2}, r"newer trimtab \(schema 2, this one reads up to 1\); upgrade trimtab"),
        ({"rank": 4}, "its header says rank = 4"),
        ({"rank": "0"}, "its header says rank = '0'"),
        ({"world_size": None}, "its header says world_size = None"),
        ({"schema_version": True}, "schema_version"),
    ],
)
def test_nothing_usable_is_an_error_in_one_line(tmp_path: Path, header: dict[str, Any], says: str) -> None:
    for file in write(generate(JOB), tmp_path):
        rewrite(file, header=header)
    with pytest.raises(ValueError, match=says) as caught:
        read(tmp_path)
    assert "(and 3 more)" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_newer_file_among_others_is_left_out(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path)
    rewrite(files[3], header={"schema_version": 9})
    trace = read(tmp_path)
    assert "newer trimtab (schema 9" in only_warning(trace)
    assert trace.missing_ranks == (3,)


def test_the_newest_run_of_several_is_read(tmp_path: Path) -> None:
    old = replace(generate(JOB), run_id="old\n")
    new = generate(replace(JOB, run_id="new", start_unix_ns=JOB.start_unix_ns + 10**12))
    write(old, tmp_path)
    for file in tmp_path.iterdir():
        file.rename(file.with_name(f"old-{file.name}"))
    write(new, tmp_path)
    found = read(tmp_path)
    assert_same(found, new)
    assert only_warning(found) == r"files of 2 runs in one place: run 'new' is read, not 'old\n'"
    assert_same(read(tmp_path, run_id="old\n"), old)
    with pytest.raises(ValueError, match="no files of run 'x' here, only of"):
        read(tmp_path, run_id="x")


def test_the_last_attempt_of_a_run_is_read(tmp_path: Path) -> None:
    write(generate(JOB), tmp_path)
    again = replace(generate(replace(JOB, start_unix_ns=JOB.start_unix_ns + 10**12)), attempt=1)
    files = write(again, tmp_path)
    found = read(tmp_path)
    assert_same(found, again)
    assert "was started again: its last attempt is read" in only_warning(found)
    files[2].unlink()  # the first attempt's file of this rank must not fill the gap
    found = read(tmp_path)
    assert 2 not in found.ranks
    assert "rank 2: only files of an earlier attempt; not read" in found.warnings


def test_attempts_that_only_differ_in_number_belong_together(tmp_path: Path) -> None:
    """Where an older run left files of some ranks, the recorder counts on from theirs."""
    trace = generate(JOB)
    files = write(trace, tmp_path)
    rewrite(files[3], files[3].with_name("rank00003-a1-000.trimtab.arrow"), header={"attempt": 1})
    files[3].unlink()
    found = read(tmp_path)
    assert sorted(found.ranks) == [0, 1, 2, 3]
    assert found.warnings == ()


def test_an_earlier_attempt_can_be_asked_for(tmp_path: Path) -> None:
    first = generate(JOB)
    write(first, tmp_path)
    write(replace(generate(replace(JOB, start_unix_ns=JOB.start_unix_ns + 10**12)), attempt=1), tmp_path)
    assert_same(read(tmp_path, attempt=0), first)
    assert read(tmp_path, attempt=0).warnings == ()
    with pytest.raises(ValueError, match=r"no attempt 7 at run 'synthetic' here, only: 0, 1"):
        read(tmp_path, attempt=7)


@pytest.mark.parametrize(("before", "after"), [(8, 4), (4, 8), (8, 2)])
def test_a_restart_with_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    first = generate(replace(JOB, topology=Topology(dp=before)))
    write(first, tmp_path)
    job = replace(JOB, topology=Topology(dp=after), start_unix_ns=JOB.start_unix_ns + 10**12)
    second = replace(generate(job), attempt=1)
    write(second, tmp_path)
    found = read(tmp_path)
    assert_same(found, second)
    said = f"run 'synthetic' was started with {before} ranks, too (attempt 0): what its {after} ranks recorded is read"
    assert only_warning(found) == said
    assert_same(read(tmp_path, attempt=0), first)


def test_one_damaged_header_is_not_the_newest_run(tmp_path: Path) -> None:
    trace = generate(JOB)
    files = write(trace, tmp_path)
    for damage in ({"run_id": "zz"}, {"world_size": 5}):
        rewrite(files[3], header=damage | {"started_unix_ns": 1 << 61})
        found = read(tmp_path)
        assert sorted(found.ranks) == [0, 1, 2]
        assert found.run_id == trace.run_id
        assert found.world_size == 4


def test_the_folders_of_several_nodes(tmp_path: Path) -> None:
    trace = generate(JOB)
    for rank, file in enumerate(write(trace, tmp_path / "all")):
        node = tmp_path / f"node{rank // 2}"
        node.mkdir(exist_ok=True)
        file.rename(node / file.name)
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    found = read(*nodes)
    assert_same(found, trace)
    assert found.warnings == ()
    assert_same(read(*nodes, nodes[0], tmp_path / "node1" / ".." / "node1"), trace)
    assert read(*nodes, *nodes).warnings == ()
    with pytest.raises(ValueError, match="no trace files in this directory"):
        read(*nodes, tmp_path / "all")
    with pytest.raises(ValueError, match="give the directory"):
        read()


def test_a_directory_that_was_copied_costs_one_line(tmp_path: Path) -> None:
    trace = generate(replace(JOB, topology=Topology(dp=8)))
    write(trace, tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    found = read(tmp_path / "here", tmp_path / "there")
    assert_same(found, trace)
    assert only_warning(found) == "ranks 0-7: 8 files are here twice; the larger one of two is read"


def test_events_without_times_are_told(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path)
    rewrite(files[1], said={HEADER_KEY: b'{"unknown_times": 7, "closed": true}'})
    found = read(tmp_path)
    assert found.ranks[1].unknown_times == 7
    assert any(text.startswith("rank 1: 7 events have no times") for text in found.warnings)


def test_two_processes_that_claim_one_rank(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path)
    twin = tmp_path / "rank00000-a1-000.trimtab.arrow"
    rewrite(files[0], twin, header={"attempt": 1, "pid": 5})
    found = read(tmp_path)
    assert only_warning(found) == f"rank 0 is claimed by several processes: {twin.name} read, {files[0].name} not"
    assert sorted(found.ranks) == [0, 1, 2, 3]


def test_a_copy_of_a_file_and_a_missing_part(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path, rotate_rows=20)
    rank0 = [file for file in files if file.name.startswith("rank00000")]
    copy = tmp_path / "rank00000-a.copy.trimtab.arrow"  # first in order of names, but not whole
    copy.write_bytes(rank0[0].read_bytes()[:-400])
    rank0[1].unlink()
    found = read(tmp_path)
    assert str(copy) not in found.sources
    gap, claimed = found.warnings
    assert claimed.startswith("rank 0 is claimed by several files: ")
    assert copy.name in claimed
    assert gap == "rank 0: part 1 of its files is missing"


def test_a_rank_of_a_world_of_another_size(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path)
    rewrite(files[3], header={"world_size": 16})
    trace = read(tmp_path)
    assert only_warning(trace) == "rank 3: recorded in a world of another size than 4; not read"
    assert trace.missing_ranks == (3,)


def test_events_that_end_before_they_start_are_left_out(tmp_path: Path) -> None:
    trace = generate(JOB)
    first = (pl.col("rank") == 1) & (pl.col("event_id") == 3)
    broken = trace.events.with_columns(end=pl.when(first).then(pl.col("start") - 5).otherwise("end"))
    write(replace(trace, events=broken), tmp_path)
    found = read(tmp_path)
    assert only_warning(found).startswith("rank 1: 1 events end before they start (a clock that jumped?)")
    assert len(found.events) == len(trace.events) - 1


def test_drops_are_counted(tmp_path: Path) -> None:
    trace = generate(JOB)
    trace.ranks[1] = replace(trace.ranks[1], dropped=12)
    write(trace, tmp_path)
    assert only_warning(read(tmp_path)) == "rank 1: 12 events were dropped while recording"


@pytest.mark.parametrize(
    "said",
    [
        b"[1]",
        b"{",
        b'{"groups": 3}',
        b'{"groups": {"tp": ["x"]}}',
        b'{"topology": {"zp": 2}}',
        b'{"dropped": []}',
        b'{"coordinates": {"pp": -3}}',
    ],
)
def test_metadata_that_makes_no_sense_costs_a_line_but_no_events(tmp_path: Path, said: bytes) -> None:
    trace = generate(JOB)
    files = write(trace, tmp_path)
    rewrite(files[0], said={HEADER_KEY: said})
    found = read(tmp_path)
    assert len(found.events) == len(trace.events)
    assert "a batch's metadata is not understood" in found.warnings[0]


def test_a_column_of_another_type_costs_that_file_only(tmp_path: Path) -> None:
    files = write(generate(JOB), tmp_path)
    place = FILE_SCHEMA.get_field_index("start")
    schema = FILE_SCHEMA.set(place, pa.field("start", pa.string()))

    def as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = batch.columns
        columns[place] = pa.array(["soon"] * len(batch))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    rewrite(files[0], schema=schema, change=as_text)
    found = read(tmp_path)
    assert "not of the event schema" in found.warnings[0]
    assert sorted(found.events["rank"].unique()) == [1, 2, 3]


def test_unknown_columns_and_kinds_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    trace = generate(JOB)
    files = write(trace, tmp_path)
    schema = FILE_SCHEMA.append(pa.field("mood", pa.string()))
    kind = FILE_SCHEMA.get_field_index("kind")

    def later(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [*batch.columns, pa.nulls(len(batch), pa.string())]
        kinds = ["dream", *batch.column(kind).to_pylist()[1:]]
        columns[kind] = pa.array(kinds).dictionary_encode()
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    rewrite(files[0], schema=schema, change=later)
    found = read(tmp_path)
    assert found.events.columns == list(COLUMNS)
    assert found.warnings[0] == "rank 0: 1 events of unknown kind are left out"
    assert len(found.events) == len(trace.events) - 1


def test_one_name_for_several_groups_is_told_apart(tmp_path: Path) -> None:
    trace = generate(JOB)
    plain = trace.events["group"].cast(pl.String).str.replace(r"\d+$", "").cast(pl.Categorical)
    named = replace(trace, events=trace.events.with_columns(group=plain), groups={})
    files = write(named, tmp_path)
    for rank, file in enumerate(files):
        mine = {name.rstrip("0123456789"): ranks for name, ranks in trace.groups.items() if rank in ranks}
        rewrite(file, said={HEADER_KEY: json.dumps({"groups": mine, "closed": True}).encode()})
    found = read(tmp_path)
    assert found.groups == {
        "tp@0": (0, 1),
        "tp@2": (2, 3),
        "dp@0": (0, 2),
        "dp@1": (1, 3),
        "world": (0, 1, 2, 3),
    }
    for group, ranks in found.groups.items():
        users = found.events.filter(pl.col("group").cast(pl.String) == group)["rank"].unique()
        assert tuple(sorted(users)) == ranks
    assert found.events["group"].null_count() == trace.events["group"].null_count()


def test_paths_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: no such file or directory"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no trace files in this directory \(expected trimtab: \*.trimtab.arrow"):
        read(tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    with pytest.raises(ValueError, match="not a trace file of a known format"):
        read(other)
    with pytest.raises(ValueError, match="file name too long"):
        read(tmp_path / ("x" * 300))
    with pytest.raises(ValueError, match="null"):
        read("a\0b")
    with pytest.raises(ValueError, match="no such file") as caught:
        read(tmp_path / "a\nb\x1b[31m")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_files_without_events_say_so(tmp_path: Path) -> None:
    trace = generate(JOB)
    write(replace(trace, events=trace.events.filter(pl.col("rank") != 3)), tmp_path)
    found = read(tmp_path)
    assert only_warning(found) == "rank 3: the files hold no events"
    assert len(found.events) == (trace.events["rank"] != 3).sum()


def test_one_file_and_folders_of_folders(tmp_path: Path) -> None:
    trace = generate(JOB)
    files = write(trace, tmp_path / "all")
    alone = read(files[2])
    assert sorted(alone.ranks) == [2]
    assert alone.missing_ranks == (0, 1, 3)
    for rank, file in enumerate(files):
        node = tmp_path / "nodes" / f"node{rank // 2}"
        node.mkdir(parents=True, exist_ok=True)
        file.rename(node / file.name)
    assert_same(read(tmp_path / "nodes"), trace)


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    write(generate(JOB), tmp_path)
    with pytest.raises(ValueError, match="exists already"):
        write(generate(JOB), tmp_path)


@pytest.mark.parametrize(
    ("anchors", "ppm"),
    [
        ([[5, 100], [1_000_000_005, 1_000_000_000], [4_000_040_005, 4_000_000_100]], 10.0),
        ([[5, 100], [900_000_005, 900_000_000]], None),
        ([[5, 100]], None),
        ([], None),
    ],
)
def test_the_drift_of_a_device_is_stated(tmp_path: Path, anchors: list[list[int]], ppm: float | None) -> None:
    trace = generate(JOB)
    for file in write(trace, tmp_path):
        if "rank00001" in file.name:
            rewrite(file, said={HEADER_KEY: json.dumps({"anchors": anchors}).encode()})
    found = read(tmp_path)
    assert found.ranks[0].drift_ppm is None
    assert found.ranks[1].drift_ppm == (None if ppm is None else pytest.approx(ppm, rel=1e-3))
    report = analyze(found).report
    assert report.clock.device_drift_ppm == (None if ppm is None else pytest.approx(ppm, rel=1e-3))
    assert ("GPU clocks drift by up to 10 ppm" in wording.clocks(report.clock)) == (ppm is not None)
