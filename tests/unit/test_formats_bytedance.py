"""ByteDance's what-if traces: the public ones with their known answers, and small jobs made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
from format_files import SHARED, rows_of_bytedance, write_bytedance

from trimtab.events import Kind
from trimtab.topology import Topology
from trimtab.traces.read import read
from trimtab.traces.table import COLUMNS, Trace

PUBLIC = SHARED / "bytedance_straggler"
MESSAGE = ["group", "src", "dst", "tag", "seq"]


def of_kind(trace: Trace, *kinds: Kind) -> pl.DataFrame:
    return trace.events.filter(pl.col("kind").is_in([kind.value for kind in kinds]))


def pairs(trace: Trace) -> pl.DataFrame:
    """Each message with both of its ends."""
    columns = [*MESSAGE, "rank", "start", "end", "microbatch"]
    sent, received = (of_kind(trace, kind).select(columns) for kind in (Kind.SEND, Kind.RECV))
    return sent.join(received, on=MESSAGE, suffix="_there")


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"the public traces are not at {PUBLIC}")
@pytest.mark.parametrize(
    ("name", "topology", "messages"),
    [("AR", Topology(tp=4, dp=4, pp=4), 33_792), ("ST", Topology(dp=2, pp=4), 1_536)],
)
def test_public_traces(name: str, topology: Topology, messages: int) -> None:
    trace = read(PUBLIC / f"trace-{name}.parquet")
    assert trace.topology == topology
    assert trace.world_size == topology.world_size
    assert len(trace.ranks) == topology.dp * topology.pp
    assert list(trace.events.schema.items()) == list(pl.DataFrame(schema=COLUMNS).schema.items())
    found = pairs(trace)
    assert len(found) == messages == len(of_kind(trace, Kind.SEND)) == len(of_kind(trace, Kind.RECV))
    assert (found["microbatch"] == found["microbatch_there"]).all()
    begun = found.select(pl.max_horizontal("start", "start_there")).to_series()
    assert (found["end_there"] > begun).all()
    assert (found["end"] > begun).all()
    for rank, info in trace.ranks.items():
        assert info.coordinates == topology.coordinates(rank)
    collectives = of_kind(trace, Kind.COLLECTIVE).filter(~pl.col("group").cast(pl.String).str.starts_with("tp"))
    sizes = collectives.group_by("group", "op", "seq").len()
    wanted = [len(trace.groups[str(group)]) for group in sizes["group"]]
    assert sizes["len"].to_list() == wanted


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"the public traces are not at {PUBLIC}")
def test_the_steps_of_the_public_traces_last_as_published() -> None:
    trace = read(PUBLIC / "trace-ST.parquet")
    steps = trace.events.filter(pl.col("name").cast(pl.String) == "step")
    lengths = steps.filter(pl.col("rank") == 0).select("step", (pl.col("end") - pl.col("start")) / 1e9)
    by_step = dict(lengths.iter_rows())
    assert by_step[23] == pytest.approx(2.3816521, abs=1e-6)
    assert by_step[1048] == pytest.approx(2.2126920, abs=1e-6)
    worked = {
        rank: of_kind(trace, Kind.FORWARD)
        .filter(pl.col("rank") == rank)
        .select(pl.col("end") - pl.col("start"))
        .mean()
        .item()
        for rank in (5, 7)
    }
    assert worked[7] / worked[5] == pytest.approx(2.06, abs=0.02)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"the public traces are not at {PUBLIC}")
def test_a_folder_of_several_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"several jobs in one place, name one .*trace-AR.parquet, trace-ST.parquet"):
        read(PUBLIC)


@pytest.mark.parametrize("vpp", [1, 2])
def test_every_message_has_its_microbatch_and_peer(tmp_path: Path, vpp: int) -> None:
    rows = rows_of_bytedance(dp=2, pp=3, vpp=vpp)
    trace = read(write_bytedance(tmp_path / "job.parquet", rows))
    assert trace.topology == Topology(dp=2, pp=3, vpp=vpp)
    found = pairs(trace)
    assert (
        len(found) == len(of_kind(trace, Kind.SEND)) == len(of_kind(trace, Kind.RECV)) == 2 * 2 * 2 * 3 * (3 * vpp - 1)
    )
    assert (found["end_there"] > found["start"]).all()
    forward = found.filter(pl.col("tag") == 0)
    assert ((forward["dst"] - forward["src"]) % 6 == 2).all()
    assert (found["microbatch"] == found["microbatch_there"]).all()


def test_messages_that_were_never_sent_are_left_out(tmp_path: Path) -> None:
    """The profiler writes receives after the last computation, and those of chunks that have nobody before them."""
    rows = rows_of_bytedance(dp=1, pp=2, vpp=2)
    extra: list[dict[str, Any]] = []
    for row in rows:
        if row["optype"] == "forward-compute" and row["stage"] == 0 and row["mc"] == 0:
            extra.append(
                row | {"optype": "forward-recv", "start_ts": row["start_ts"] - 0.001, "duration": 0.0, "mc": -1}
            )
        if row["optype"] == "optimizer":
            extra.append(row | {"optype": "forward-recv", "seq_id": 90})
    for row in rows:
        if row["optype"] == "forward-recv" and row["stage"] == 0:
            row["seq_id"] += 50
    trace = read(write_bytedance(tmp_path / "job.parquet", rows + extra))
    assert len(pairs(trace)) == len(of_kind(trace, Kind.SEND)) == len(of_kind(trace, Kind.RECV))
    assert not any("belong to no computation" in warning for warning in trace.warnings)


def test_what_overlaps_with_computation_ran_beside_it_and_is_waited_for(tmp_path: Path) -> None:
    rows = rows_of_bytedance(dp=1, pp=2, batches=4)
    for row in rows:
        if row["optype"] == "forward-recv":
            row["start_ts"], row["duration"] = row["start_ts"] - 0.03, row["duration"] + 0.025
    trace = read(write_bytedance(tmp_path / "job.parquet", rows))
    beside = trace.events.filter(pl.col("stream").cast(pl.String) == "comm")
    assert set(beside["kind"]) == {"recv"}
    waits = trace.events.filter(pl.col("correlation_id").is_not_null())
    for event, begin, end in beside.select("event_id", "start", "end").iter_rows():
        wait = waits.filter(pl.col("correlation_id") == event)
        assert wait.height <= 1
        assert wait.filter((pl.col("start") < begin) | (pl.col("end") > end)).is_empty()


def test_ranks_times_and_rows_that_cannot_be_are_said(tmp_path: Path) -> None:
    rows = rows_of_bytedance(tp=2)
    damaged = [
        rows[0] | {"duration": float("nan"), "seq_id": 70},
        rows[1] | {"start_ts": float("inf"), "seq_id": 71},
        rows[2] | {"duration": -1.0, "seq_id": 72},
        rows[3] | {"step": -5},
        rows[4],
        rows[5] | {"optype": "<script>\x1b[31m", "seq_id": 73},
    ]
    trace = read(write_bytedance(tmp_path / "job.parquet", rows + damaged))
    said = " | ".join(trace.warnings)
    assert "2 of" in said
    assert "no time that makes sense" in said
    assert "1 events end before they begin" in said
    assert "name ranks or steps that cannot be" in said
    assert "1 operations are here twice" in said
    assert "unknown types are left out: <script>\\x1b[31m" in said
    assert "only the first rank of each tensor parallel group of 2" in said
    assert sorted(trace.ranks) == [0, 2, 4, 6]
    assert trace.missing_ranks == (1, 3, 5, 7)


def test_ranks_that_fit_no_layout_leave_it_unknown(tmp_path: Path) -> None:
    rows = [row | {"rank": row["rank"] * 3 + row["stage"]} for row in rows_of_bytedance()]
    trace = read(write_bytedance(tmp_path / "job.parquet", rows))
    assert trace.topology is None
    assert any("do not fit their places" in warning for warning in trace.warnings)
    assert len(pairs(trace)) == len(of_kind(trace, Kind.SEND))


def test_parts_of_one_job_and_copies(tmp_path: Path) -> None:
    rows = rows_of_bytedance()
    whole = read(write_bytedance(tmp_path / "whole.parquet", rows))
    (tmp_path / "parts").mkdir()
    for step in range(10, 13):
        write_bytedance(tmp_path / "parts" / f"{step}.parquet", [row for row in rows if row["step"] == step])
    (tmp_path / "parts" / "copy.parquet").write_bytes((tmp_path / "parts" / "10.parquet").read_bytes())
    trace = read(tmp_path / "parts")
    assert len(trace.events) == len(whole.events)
    assert sum("a copy of another file" in warning for warning in trace.warnings) == 1


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = write_bytedance(tmp_path / "job.parquet", rows_of_bytedance())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"job.parquet: damaged, or of other types") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_names_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    rows = [row | {"optype": row["optype"].replace("gc", "gcgc")} for row in rows_of_bytedance()]
    path = write_bytedance(tmp_path / "job.parquet", rows)
    path.write_bytes(path.read_bytes().replace(b"gcgc", b"\xff\xfe\xff\xfe"))
    with pytest.raises(ValueError, match="damaged, or of other types") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_parquet_of_others_is_not_claimed(tmp_path: Path) -> None:
    pq.write_table(pl.DataFrame({"a": [1]}).to_arrow(), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="not a trace file of a known format"):
        read(tmp_path / "other.parquet")
