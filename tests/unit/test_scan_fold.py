"""Jobs of many replicas: folded, they are judged as they are when every event is looked at."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from trimtab.config import ScanConfig
from trimtab.scan import analyze
from trimtab.scan.analysis import rebuild
from trimtab.scan.fold import engines, load
from trimtab.scan.fold.digest import digest
from trimtab.scan.fold.engines import Inline, Local
from trimtab.scan.fold.mirror import Mirror
from trimtab.scan.fold.task import answer, perform, tasks_of
from trimtab.scan.fold.units import units_of
from trimtab.scan.measure import instance_of
from trimtab.scan.model import Report
from trimtab.scan.table import KINDS
from trimtab.scan.whatif import parse
from trimtab.topology import Topology
from trimtab.traces import own
from trimtab.traces.own_write import write
from trimtab.traces.read import read
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

LAYOUT = Topology(tp=2, pp=2, dp=10)
JOB = SyntheticJob(LAYOUT, steps=8, microbatches=4, layers=4, ranks_per_host=4)
RANK = LAYOUT.rank(dataclasses.replace(LAYOUT.coordinates(0), tp=1, dp=6, pp=1))
"""The rank that something is wrong with: tensor 1, replica 6, stage 1."""


def written(job: SyntheticJob, where: Path) -> Path:
    write(generate(job), where)
    return where


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fault = SyntheticFault("slow_compute", ranks=(RANK,), factor=1.4, steps=(2, None))
    return written(dataclasses.replace(JOB, faults=(fault,)), tmp_path_factory.mktemp("slow"))


def folded_report(where: Path, **options: object) -> tuple[Report, frozenset[int]]:
    trace, folded = load.load([where], fold_events=0, engine=Inline(), **options)  # type: ignore[arg-type]
    assert folded is not None
    return analyze(trace, folded=folded).report, folded.whole


def named(report: Report) -> list[tuple[object, ...]]:
    return [(f.kind, f.ranks, f.stage, f.link, f.onset, f.steps, f.pattern) for f in report.findings]


FAULTS = {
    "nothing": (),
    "slow rank": (SyntheticFault("slow_compute", ranks=(RANK,), factor=1.4),),
    "two slow ranks": (SyntheticFault("slow_compute", ranks=(3, RANK), factor=1.4),),
    "heavy stage": (SyntheticFault("slow_stage", stage=1, factor=1.4),),
    "long sequences": (SyntheticFault("long_sequence", dp=6, factor=1.6, every=3),),
    "slow link": (SyntheticFault("slow_link", link=(RANK - 1, RANK), ms=2.0),),
    "slow messages": (SyntheticFault("slow_link", link=(RANK - LAYOUT.tp * LAYOUT.dp, RANK), ms=15.0),),
    "host stall": (SyntheticFault("host_stall", ranks=(RANK,), ms=25.0),),
    "collector": (SyntheticFault("gc_pause", ranks=(RANK,), ms=25.0),),
    "slow data": (SyntheticFault("slow_data", ranks=(RANK,), ms=10.0),),
    "all slower": (SyntheticFault("global_slowdown", factor=1.4, steps=(3, 5)),),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_folded_job_is_judged_as_the_whole_one(name: str, tmp_path: Path) -> None:
    where = written(dataclasses.replace(JOB, faults=FAULTS[name]), tmp_path / "job")
    got, whole = folded_report(where)
    assert len(whole) < 6
    wanted = analyze(read(where)).report
    assert named(got) == named(wanted)
    assert bool(got.findings) == (name != "nothing")
    assert got.verdict == wanted.verdict
    assert got.matching == wanted.matching
    assert got.step_time_s.actual == pytest.approx(wanted.step_time_s.actual, rel=1e-6)
    assert got.step_time_s.replayed == pytest.approx(wanted.step_time_s.replayed, rel=1e-6)
    assert got.step_time_s.ideal == pytest.approx(wanted.step_time_s.ideal, rel=0.01)
    for mine, other in zip(got.findings, wanted.findings, strict=True):
        assert mine.seconds_lost_per_step == pytest.approx(other.seconds_lost_per_step, rel=0.05)
        assert mine.ratio == pytest.approx(other.ratio, rel=0.05)
        assert mine.confidence == pytest.approx(other.confidence, abs=1e-3)


def test_sums_of_work_are_those_of_its_pieces(tmp_path: Path) -> None:
    """To the nanosecond, where clocks agree and nothing is shifted."""
    job = dataclasses.replace(JOB, clock_offset_ms=0.0, clock_drift_ppm=0.0, ranks_per_host=LAYOUT.world_size)
    where = written(job, tmp_path / "job")
    run = rebuild(read(where), ScanConfig())
    measures, table = run.context.measures, run.context.table
    found = own.discover([where])
    units = units_of(LAYOUT)
    instance, first = instance_of(table, measures.pieces)
    assert len(instance)
    for unit in range(units.count):
        files = {int(rank): found.selection.files[int(rank)] for rank in units.ranks(unit)}
        got = digest(unit, files, found.offsets, units)
        cells = got.cells.filter(pl.col("step").is_in(table.steps.numbers.tolist())).sort("rank", "step")
        ranks = np.searchsorted(table.ids, units.ranks(unit))
        for code in range(len(KINDS)):
            ns = cells[f"ns_{code}"].to_numpy().reshape(len(ranks), -1)
            np.testing.assert_array_equal(ns / 1e9, measures.seconds[code, ranks])
            mine = np.isin(measures.pieces.rank[first], ranks) & (measures.pieces.kind[first] == code)
            assert cells[f"n_{code}"].sum() == mine.sum()


def test_a_task_and_its_answer_travel_as_bytes(slow: Path) -> None:
    found = own.discover([slow])
    units = units_of(LAYOUT)
    task = tasks_of(found, units)[6]
    got = answer(perform(task), {})
    files = {int(rank): found.selection.files[int(rank)] for rank in units.ranks(6)}
    wanted = digest(6, files, found.offsets, units)
    for name in ("rows", "cells", "passes", "links", "matched"):
        assert getattr(got, name).equals(getattr(wanted, name)), name
    assert got.parts == wanted.parts
    assert (got.unit, got.odd) == (6, ())


def test_processes_answer_as_one_does(slow: Path) -> None:
    tasks = tasks_of(own.discover([slow]), units_of(LAYOUT))
    assert sorted(Local(workers=2).run(tasks)) == sorted(Inline().run(tasks))


def test_processes_that_end_at_once_are_done_without(
    slow: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = tasks_of(own.discover([slow]), units_of(LAYOUT))[:2]
    monkeypatch.setattr(engines.sys, "executable", "/bin/true")
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        assert sorted(Local(workers=2).run(tasks)) == sorted(Inline().run(tasks))
    assert "in one process" in caplog.text


def test_whoever_stops_to_listen_leaves_no_process(slow: Path) -> None:
    engine = Local(workers=2)
    answers = engine.run(tasks_of(own.discover([slow]), units_of(LAYOUT)))
    assert isinstance(answers, Iterator)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert [process.poll() for process in engine.processes] != [None, None]
    assert all(process.poll() is not None for process in engine.processes)


def test_small_runs_and_few_replicas_are_not_folded(slow: Path, tmp_path: Path) -> None:
    assert load.load([slow])[1] is None
    few = written(dataclasses.replace(JOB, topology=Topology(tp=2, pp=2, dp=4), steps=4), tmp_path / "few")
    assert load.load([few], fold_events=0, engine=Inline())[1] is None


def test_damaged_and_missing_files_are_said_as_ever(slow: Path, tmp_path: Path) -> None:
    write(read(slow), tmp_path, batch_rows=100)
    files = sorted(tmp_path.iterdir())
    files[4].write_bytes(files[4].read_bytes()[:-100])
    files[9].unlink()
    files[13].write_bytes(b"no header")
    got, _ = folded_report(tmp_path)
    wanted = analyze(read(tmp_path)).report
    assert sorted(got.warnings) == sorted(wanted.warnings)
    assert got.missing_ranks == wanted.missing_ranks == (9, 13)
    assert named(got) == named(wanted)


def test_what_makes_no_sense_is_left_to_those_who_look_at_every_event(slow: Path, tmp_path: Path) -> None:
    trace = read(slow)
    odd = (pl.col("rank") == 8) & (pl.col("event_id") == 100)
    events = trace.events.with_columns(end=pl.when(odd).then(pl.col("start") - 1).otherwise("end"))
    write(dataclasses.replace(trace, events=events), tmp_path / "odd")
    got, whole = folded_report(tmp_path / "odd")
    assert units_of(LAYOUT).of_rank[8] in whole
    wanted = analyze(read(tmp_path / "odd")).report
    assert got.warnings == wanted.warnings
    assert any("end before they start" in warning for warning in got.warnings)
    assert named(got) == named(wanted)


def test_ranks_that_questions_are_about_are_not_folded(slow: Path) -> None:
    question = parse("rank 11 at 1.5x")
    trace, folded = load.load([slow], None, [question], fold_events=0, engine=Inline())
    assert folded is not None
    assert units_of(LAYOUT).of_rank[11] in folded.whole
    got = analyze(trace, None, [question], folded).report.what_if[0]
    wanted = analyze(read(slow), None, [question]).report.what_if[0]
    assert got.step_time_s == pytest.approx(wanted.step_time_s, rel=1e-3)


def test_units_are_replicas_or_as_many_as_share_experts() -> None:
    units = units_of(Topology(tp=2, cp=2, dp=8, pp=2))
    assert units.count == 8
    assert [list(units.ranks(1))] == [[4, 5, 6, 7, 36, 37, 38, 39]]
    assert units_of(Topology(ep=4, dp=16)).count == 4
    assert not units.crosses(np.array([4, 36]))
    assert units.crosses(np.array([4, 8]))
    assert units.crosses(np.array([4, 4000]))


def test_ranks_elsewhere_than_the_topology_says_are_not_folded(tmp_path: Path) -> None:
    trace = generate(dataclasses.replace(JOB, steps=4))
    ranks = {
        rank: dataclasses.replace(info, coordinates=LAYOUT.coordinates(rank ^ 1)) for rank, info in trace.ranks.items()
    }
    write(dataclasses.replace(trace, ranks=ranks), tmp_path / "job")
    assert load.load([tmp_path / "job"], fold_events=0, engine=Inline())[1] is None


def test_of_a_run_too_long_for_memory_some_steps_are_judged(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_EVENTS", 3_000)
    monkeypatch.setattr(load, "LEAST_JUDGED", 5)
    got, _ = folded_report(slow)
    assert [warning for warning in got.warnings if "of 8 steps 5 are judged" in warning]
    assert got.job.steps == 4
    assert [finding.ranks for finding in got.findings] == [(RANK,)]
    trace, folded = load.load([slow])
    assert folded is None
    assert set(trace.events["step"].unique()) == {0, 2, 4, 5, 7}
    assert [finding.ranks for finding in analyze(trace).report.findings] == [(RANK,)]


@pytest.mark.parametrize(("alike", "expected"), [(False, [0.0, 30.0, 0.0, 44.0]), (True, [0.0, 15.0, 0.0, 22.0])])
def test_folded_stretches_follow_the_reference(alike: bool, expected: list[float]) -> None:
    """A folded rank takes 20 and 40 to its nodes 1 and 3, the reference 10 and 20 for the same."""
    nothing = np.zeros(0, dtype=np.int64)
    assert Mirror(np.zeros(4), nothing, nothing, nothing).follow(np.zeros(0), np.zeros(0), alike=False) is None
    mirror = Mirror(np.array([0.0, 20.0, 0.0, 40.0]), np.array([1, 3]), np.array([5, 7]), np.array([4, 6]))
    usual = np.array([10.0, 20.0])
    assert mirror.follow(usual + 0.5, usual, alike=False) is None
    got = mirror.follow(np.array([15.0, 22.0]), usual, alike)
    assert got is not None
    np.testing.assert_allclose(got, expected)
