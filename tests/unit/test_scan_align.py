"""Clocks: offsets and drifts are found, what is not connected is named, jumps are moved back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from scan_jobs import TP2_PP2_DP2, edited

from trimtab.scan import analyze, match, table
from trimtab.scan.align import Alignment, align
from trimtab.scan.model import FindingKind, Verdict
from trimtab.scan.together import bring_together
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import Trace


def aligned(trace: Trace) -> tuple[table.Table, match.Matches, Alignment]:
    data, _ = table.build(trace, 1)
    matches = match.match(data, trace.groups)
    found = align(data, matches, [trace.ranks[int(rank)].clock for rank in data.ids])
    return data.shifted(found.offset, found.drift), matches, found


def spread_us(data: table.Table, matches: match.Matches) -> float:
    """Largest difference between the ends of one all-reduce on different ranks, in microseconds."""
    rows = matches.rows[(matches.complete & ~matches.p2p)[matches.comm]]
    comm = matches.comm[(matches.complete & ~matches.p2p)[matches.comm]]
    low, high = np.full(matches.count, np.inf), np.full(matches.count, -np.inf)
    np.minimum.at(low, comm, data.end[rows])
    np.maximum.at(high, comm, data.end[rows])
    return float((high - low)[np.isfinite(low)].max() / 1e3)


def job(**settings: object) -> SyntheticJob:
    base = {"clock_offset_ms": 20.0, "clock_drift_ppm": 50.0, "clock_noise_us": 1.0, "ranks_per_host": 2}
    return SyntheticJob(TP2_PP2_DP2, **{"steps": 20, **base, **settings})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", range(5))
def test_offsets_and_drifts_are_found(seed: int) -> None:
    data, matches, found = aligned(generate(job(seed=seed)))
    assert found.anchors >= 50
    assert spread_us(data, matches) < 40
    assert found.largest_error_ns < 20e3


def test_noise_shows_in_the_stated_error() -> None:
    quiet = aligned(generate(job(clock_noise_us=1.0)))[2].largest_error_ns
    loud = aligned(generate(job(clock_noise_us=100.0)))[2].largest_error_ns
    assert loud > 20 * quiet


def test_ranks_on_one_clock_need_no_alignment() -> None:
    data, _, found = aligned(generate(job(ranks_per_host=8)))
    assert not found.offset.any()
    assert found.largest_error_ns == 0.0
    assert data.ranks == 8


def test_pipeline_neighbours_are_tied_by_messages_when_no_collective_joins_them() -> None:
    trace = generate(job(steps=12, ranks_per_host=4))
    only_p2p = trace.events.filter(
        ~((pl.col("kind") == "collective") & (pl.col("group").cast(pl.String) == "world"))
        & ~((pl.col("kind") == "collective") & pl.col("group").cast(pl.String).str.starts_with("pp"))
    )
    data, _, found = aligned(edited(trace, only_p2p))
    assert not found.unconnected
    truth, _, whole = aligned(trace)
    shift = np.diff(found.offset[[0, 4]] - whole.offset[[0, 4]])
    assert abs(float(shift[0])) < 3e6, "smallest delays each way are a bound of some milliseconds"
    assert data.ranks == truth.ranks


def test_ranks_that_nothing_connects_are_named() -> None:
    trace = generate(job(steps=8, ranks_per_host=4))
    lonely = trace.events.filter(
        ~pl.col("kind").is_in(["send", "recv"])
        & ~((pl.col("kind") == "collective") & ~pl.col("group").cast(pl.String).str.starts_with("tp"))
    )
    found = aligned(edited(trace, lonely))[2]
    assert len(found.unconnected) == 4
    assert not found.summary().aligned


def test_messages_of_one_direction_across_clocks_are_not_used() -> None:
    """Who waited for whom cannot be told, so nobody is said to have waited."""
    trace = generate(job(steps=8, ranks_per_host=4))
    groups = pl.col("group").cast(pl.String)
    onward = (pl.col("kind") == "collective") & groups.str.starts_with("tp") | (pl.col("src") < pl.col("dst"))
    events = trace.events.filter(onward.fill_null(False) | ~pl.col("kind").is_in(["send", "recv", "collective"]))
    data, _ = table.build(trace_of := edited(trace, events), 1)
    names = [trace.ranks[int(rank)].clock for rank in data.ids]
    data, matches, found, _ = bring_together(trace_of, data, names)
    assert len(found.unconnected) == 4
    assert not matches.complete[matches.p2p].any()
    assert matches.complete[~matches.p2p].all()


@pytest.mark.parametrize(("noise_us", "off_ms"), [(5.0, 0), (100.0, 0), (5.0, 30)])
def test_clocks_that_are_aligned_already_are_left_alone_and_checked(noise_us: float, off_ms: int) -> None:
    trace = generate(job(steps=6, clock_offset_ms=0.0, clock_drift_ppm=0.0, clock_noise_us=noise_us))
    late = pl.when(pl.col("rank") >= 4).then(off_ms * 10**6).otherwise(0)
    events = trace.events.with_columns(pl.col("ready", "start", "end") + late)
    got = analyze(replace(edited(trace, events), aligned=True)).report
    assert got.clock.aligned
    assert got.clock.anchors > 0
    assert got.clock.scatter_us is not None
    if off_ms:
        assert got.clock.error_us.max > 1000
        assert any("said to be aligned" in warning for warning in got.warnings)
    else:
        assert 0.1 * noise_us < got.clock.error_us.max < 3 * noise_us
        assert not any("said to be aligned" in warning for warning in got.warnings)


@pytest.mark.parametrize("ms", [80.0, 15.0, -40.0])
@pytest.mark.parametrize("slow", [None, 2])
def test_a_clock_that_jumps_is_moved_back_and_named(ms: float, slow: int | None) -> None:
    faults = (SyntheticFault("slow_compute", ranks=(slow,), factor=1.3),) if slow is not None else ()
    trace = generate(SyntheticJob(TP2_PP2_DP2, ranks_per_host=2, faults=faults))
    first = trace.events.filter((pl.col("rank") == 5) & (pl.col("step") == 7))["start"].min()
    moment = int(first) + 100_000_000  # pyright: ignore[reportArgumentType]
    late = pl.col("rank").is_in([4, 5])
    moved = [
        pl.when(late & (pl.col(name) >= moment)).then(pl.col(name) + int(ms * 1e6)).otherwise(pl.col(name)).alias(name)
        for name in ("ready", "start", "end")
    ]
    got = analyze(edited(trace, trace.events.with_columns(moved))).report
    named = [warning for warning in got.warnings if "jumped by" in warning]
    assert len(named) == 1
    assert f"{ms:+.0f}"[:3] in named[0]
    expected = [(FindingKind.SLOW_RANK, (2,))] if slow is not None else []
    assert [(finding.kind, finding.ranks) for finding in got.findings] == expected
    assert got.verdict is (Verdict.STRAGGLER if expected else Verdict.HEALTHY)


def test_many_clocks_in_small_groups() -> None:
    trace = generate(SyntheticJob(Topology(dp=16), steps=20, ranks_per_host=1, clock_noise_us=5.0))
    data, matches, found = aligned(trace)
    assert spread_us(data, matches) < 60
    assert not found.unconnected
