"""Logs of the NCCL Inspector, as its documentation shows them."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from format_files import nccl_inspector

from trimtab.traces.read import read


def write(folder: Path, texts: dict[str, str]) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    return folder


def test_a_verbose_log(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "run", {f"n0-pid{rank}": nccl_inspector(rank) for rank in range(2)}))
    assert trace.groups == {"0xabc": (0, 1)}
    assert trace.world_size == 2
    assert {info.host for info in trace.ranks.values()} == {"n0"}
    event = trace.events.filter((pl.col("rank") == 1) & (pl.col("seq") == 2)).row(0, named=True)
    at = (1_752_867_229_000_000 + 2_000 + 1) * 1_000
    assert (event["op"], event["bytes"], event["name"]) == ("all_reduce", 1 << 20, "AllReduce")
    assert (event["ready"], event["start"], event["end"]) == (at, at + 20_000, at + 120_000)
    assert json.loads(event["args"])["busbw_gbs"] == 15.75
    assert not any("VERBOSE" in warning for warning in trace.warnings)


def test_a_plain_log_has_durations_only(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "run", {"a": nccl_inspector(0, ranks=1, verbose=False)}))
    assert trace.events.select((pl.col("end") - pl.col("start")).unique()).to_series().to_list() == [100_000]
    assert any("without NCCL_INSPECTOR_DUMP_VERBOSE=1 only the durations" in warning for warning in trace.warnings)


def test_ranks_of_smaller_communicators_are_those_of_the_job(tmp_path: Path) -> None:
    """Processes 2 and 3 are 0 and 1 in a communicator of their own."""
    texts = {str(rank): nccl_inspector(rank, ranks=4) for rank in range(4)}
    for place, rank in enumerate((2, 3)):
        line = nccl_inspector(place, "0xdef", ranks=2).replace(f'"pid": {100 + place}', f'"pid": {100 + rank}')
        texts[str(rank)] += line
    trace = read(write(tmp_path / "run", texts))
    assert trace.groups == {"0xabc": (0, 1, 2, 3), "0xdef": (2, 3)}
    assert len(trace.events) == 4 * 6


def test_without_a_communicator_of_all_the_processes_are_numbered(tmp_path: Path) -> None:
    texts = {"a": nccl_inspector(0, "0x1"), "b": nccl_inspector(1, "0x1")}
    texts |= {
        f"c{place}": nccl_inspector(place, "0x2").replace(f'"pid": {100 + place}', f'"pid": {102 + place}')
        for place in range(2)
    }
    trace = read(write(tmp_path / "run", texts))
    assert sorted(trace.ranks) == [0, 1, 2, 3]
    assert trace.groups == {"0x1": (0, 1), "0x2": (2, 3)}
    assert any("numbered by host and process id" in warning for warning in trace.warnings)


def test_one_process_of_several_ranks(tmp_path: Path) -> None:
    text = "".join(nccl_inspector(rank) for rank in range(2)).replace('"pid": 101', '"pid": 100')
    trace = read(write(tmp_path / "run", {"a": text}))
    assert sorted(trace.ranks) == [0, 1]


def test_damaged_lines_and_copies_are_said(tmp_path: Path) -> None:
    text = nccl_inspector(0, ranks=1)
    broken = text + "{broken\n" + text.splitlines()[0] + "\n" + text[:100]
    trace = read(write(tmp_path / "run", {"a": broken}))
    assert len(trace.events) == 4
    assert any("2 lines are damaged" in warning for warning in trace.warnings)
    assert any("1 of 5 collectives are here twice" in warning for warning in trace.warnings)


def test_lines_that_tell_no_rank_are_one_line(tmp_path: Path) -> None:
    text = nccl_inspector(0).replace('"rank": 0', '"rank": -7')
    with pytest.raises(ValueError, match="no line in it tells its rank") as caught:
        read(write(tmp_path / "run", {"a": text}))
    assert "\n" not in str(caught.value)
