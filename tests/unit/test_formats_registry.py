"""Which format a place is read as, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from format_files import (
    SHARED,
    chrome,
    flight_recorder,
    megatronapp_merged,
    nccl_inspector,
    rows_of_bytedance,
    write_bytedance,
    write_flight_recorder,
    write_nsight,
)

from trimtab.traces.convert import convert
from trimtab.traces.own_write import write as write_own
from trimtab.traces.read import FORMATS, read
from trimtab.traces.synthetic import generate
from trimtab.traces.synthetic_job import SyntheticJob


def write_all(folder: Path) -> Path:
    """A file of each format."""
    folder.mkdir(exist_ok=True)
    write_bytedance(folder / "a", rows_of_bytedance())
    (folder / "b").write_text(json.dumps(megatronapp_merged()))
    write_nsight(folder / "d")
    (folder / "e").write_text(nccl_inspector(0, ranks=1))
    write_flight_recorder(folder, {0: flight_recorder(0)})
    (folder / "g").write_text(json.dumps(chrome()))
    (folder / "notes.txt").write_text("nothing")
    (folder / "empty").touch()
    return folder


def test_of_several_formats_the_one_that_says_most_is_read(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "run")
    trace = read(folder)
    assert trace.sources == (str(folder / "a"),)
    said = trace.warnings[0]
    assert said.startswith(
        "files of several formats are here; those of ByteDance what-if are read, not: 1 of MegatronApp (b)"
    )
    assert all(
        name in said for name in ("Nsight Systems (d)", "NCCL Inspector (e)", "Flight Recorder", "Chrome trace (g)")
    )


@pytest.mark.parametrize("name", ["a", "b", "d", "e", "nccl_trace_rank_0", "g"])
def test_files_are_known_by_their_content(tmp_path: Path, name: str) -> None:
    folder = write_all(tmp_path / "run")
    assert len(read(folder / name).events) > 0


def test_trimtabs_own_files_come_first(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "run")
    write_own(generate(SyntheticJob()), folder)
    assert all(source.endswith(".trimtab.arrow") for source in read(folder).sources)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b").write_text(json.dumps(megatronapp_merged()))
    with pytest.raises(ValueError, match="other: not recorded by trimtab, as the others are; read it alone"):
        read(folder, tmp_path / "other")


def test_folders_of_nodes_and_files_that_are_given_twice(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"node{rank}").mkdir()
        write_nsight(tmp_path / f"node{rank}" / f"rank{rank}.sqlite", first_gpu=rank)
    assert sorted(read(tmp_path).ranks) == [0, 1]
    twice = read(tmp_path / "node0", tmp_path / "node1", tmp_path / "node1" / "rank1.sqlite")
    assert sorted(twice.ranks) == [0, 1]
    assert not any("copy" in warning for warning in twice.warnings)


def test_columns_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(megatronapp_merged()))
    assert read(path, columns=["kind", "start"]).events.columns == ["rank", "kind", "start"]
    assert read(path, run_id="merged", attempt=0).run_id == "merged"
    with pytest.raises(ValueError, match="not of run 'other', attempt 0: only trimtab's own files tell runs apart"):
        read(path, run_id="other")
    with pytest.raises(ValueError, match="not of run 'merged', attempt 2"):
        read(path, attempt=2)


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty: an empty file"):
        read(tmp_path / "empty")
    (tmp_path / "broken").write_bytes(b"\x1f\x8b\x08broken")
    with pytest.raises(ValueError, match=r"broken: its compression \(gzip\) is damaged"):
        read(tmp_path / "broken")
    (tmp_path / "text").write_text("[1, 2, 3]")
    with pytest.raises(ValueError, match="not a trace file of a known format") as caught:
        read(tmp_path / "text")
    assert all(known.name in str(caught.value) for known in FORMATS)


def test_what_has_no_end_is_shown_as_a_moment(tmp_path: Path) -> None:
    folder = write_flight_recorder(tmp_path / "run", {0: flight_recorder(0)})
    assert convert(folder, tmp_path / "out.json").events == 5
    shown = [event for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert [event["dur"] for event in shown[1:]] == [0, 0, 0, 0]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the public traces are not at {SHARED}")
def test_every_public_file_is_read_or_refused_in_one_line() -> None:
    """But for those of torch.profiler, which have a test of their own."""
    for path in sorted(SHARED.glob("bytedance_straggler/*")) + sorted(SHARED.glob("*/*.pkl")):
        try:
            assert isinstance(read(path).events, pl.DataFrame)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
