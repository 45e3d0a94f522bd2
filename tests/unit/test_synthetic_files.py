"""Synthetic jobs written rank by rank: the files of the same jobs, and of larger ones than would fit into memory."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from trimtab.scan import analyze
from trimtab.topology import Coordinates, Topology
from trimtab.traces.read import read
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.synthetic_files import write_files
from trimtab.traces.table import COLUMNS


def test_files_written_rank_by_rank_are_those_of_the_trace(tmp_path: Path) -> None:
    fault = SyntheticFault("slow_compute", ranks=(5,), factor=1.3)
    job = SyntheticJob(Topology(tp=2, pp=2, dp=3), steps=3, microbatches=2, faults=(fault,), ranks_per_host=4)
    trace = generate(job)
    assert write_files(job, tmp_path / "job") == trace.events.height
    got = read(tmp_path / "job")
    assert (got.ranks, got.groups, got.topology, got.warnings) == (trace.ranks, trace.groups, trace.topology, ())
    order = ["rank", "event_id"]
    mine, wanted = (one.events.select(list(COLUMNS)).sort(order) for one in (got, trace))
    times = ["ready", "start", "end"]
    words = [pl.col(name).cast(pl.String) for name, kind in COLUMNS.items() if kind == pl.Categorical]
    assert mine.drop(times).with_columns(words).equals(wanted.drop(times).with_columns(words))
    for name in times:
        assert (mine[name] - wanted[name]).abs().max() <= 1


def test_more_replicas_than_are_simulated_do_as_the_simulated_ones(tmp_path: Path) -> None:
    layout = Topology(tp=2, pp=2, dp=3)
    slow = layout.rank(Coordinates(tp=1, dp=2, pp=1))
    fault = SyntheticFault("slow_compute", ranks=(slow,), factor=1.3)
    job = SyntheticJob(layout, steps=3, microbatches=2, faults=(fault,), clock_offset_ms=0, clock_drift_ppm=0)
    write_files(job, tmp_path / "large", dp=7)
    got = read(tmp_path / "large")
    large = Topology(tp=2, pp=2, dp=7)
    assert (got.world_size, got.topology) == (28, large)
    assert [rank for rank, info in got.ranks.items() if info.faults] == [large.rank(Coordinates(tp=1, dp=6, pp=1))]
    at = [large.rank(Coordinates(tp=1, dp=dp, pp=1)) for dp in range(7)]
    ends = [got.events.filter(pl.col("rank") == rank).sort("event_id")["end"] for rank in at]
    alike = [[one.equals(other) for other in ends] for one in ends]
    assert alike == [[(i % 2 == j % 2) if 6 not in (i, j) else i == j for j in range(7)] for i in range(7)]
    report = analyze(got).report
    assert report.matching.unmatched == 0
    assert [finding.ranks for finding in report.findings] == [(at[6],)]


def test_a_job_with_experts_across_replicas_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no experts"):
        write_files(SyntheticJob(Topology(ep=2, dp=4)), tmp_path, dp=8)
