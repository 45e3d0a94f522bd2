"""The benchmark's stages: real processes and messages, emulated compute and links, and what it reports of them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from harness import free_port, run_ranks
from megatron_job import train
from pipeline import BLOCKING_MICROBATCHES, CONTENDERS, Bench, Row
from pipeline_report import report
from pipeline_simulated import CONDITIONS
from pipeline_stages import Case, Stages

import trimtab
from trimtab.pipeline.simulate import simulate
from trimtab.traces.read import read

JOB = (
    *("--num-layers", "2", "--hidden-size", "16", "--heads", "2", "--seq-length", "16", "--data", __file__),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--pp", "2"),
)
CASES = [
    Case("zb-v", "auto", 3, 2, 5, 0.004, disturb="jitter=0.2 tail=0.1x3", cap=3),
    Case("zb-v", "hint", 3, 2, 5, 0.004, disturb="transient=link:2@0-1,0.25-0.5", cap=3),
    Case("1f1b", "static", 3, 1, 5, 0.004, disturb="link=1", blocking=True),
    Case("zb-v", "auto", 3, 2, 5, 0.004, disturb="link=1", cap=3, replanned=True),
]


def test_every_case_takes_at_least_what_its_stages_have_to_do() -> None:
    """That it takes not much more is for the benchmark to say, on a machine that does nothing else."""
    with Stages(3, "torch") as stages:
        for seed, case in enumerate(CASES):
            for _ in range(2):
                measured = stages.run(case, seed)
                simulated = simulate(
                    case.plan, case.make_policy(), case.costs, case.disturbance, case.cap, seed, blocking=case.blocking
                )
                assert measured.seconds >= simulated.bound
                assert measured.peak <= (case.cap or 3) + 1e-9
                assert measured.late >= 0.0


def test_a_stage_that_fails_is_named() -> None:
    with Stages(2, "torch") as stages, pytest.raises(RuntimeError, match=r"(?s)stage \d failed:.*cap"):
        stages.run(Case("zb-v", "static", 2, 2, 4, 0.001, cap=1), 0)


def _emulated(rank: int, folder: str, ports: list[int]) -> list[list[float]]:
    os.environ["MASTER_PORT"] = str(ports[0])
    expected = train(*JOB, steps=2)
    os.environ["MASTER_PORT"] = str(ports[1])
    times = {"forward_ms": ["4", "6"], "wgrad_ms": ["2"], "latency_ms": 1.0}
    with trimtab.attach(
        record={"dir": folder, "run_id": "job"},
        emulate={"enabled": True, "optimizer_ms": 0.0, "pipeline": times},
        pipeline={"policy": "hint"},
        transport={"kind": "torch"},
    ):
        losses = train(*JOB, steps=2)
    return [expected, losses]


def test_a_job_on_emulated_stages_computes_the_same(tmp_path: Path) -> None:
    for expected, losses in run_ranks(2, _emulated, str(tmp_path), [free_port(), free_port()]):
        assert losses == expected
    events = read(tmp_path).events.with_columns(pl.col("name", "stream").cast(pl.String))
    took = events.with_columns(took=pl.col("end") - pl.col("start")).filter(pl.col("stream") == "compute")
    for rank, milliseconds in enumerate([{"F": 4, "B": 4, "W": 2}, {"F": 6, "B": 6, "W": 2}]):
        for name, least in milliseconds.items():
            mine = took.filter((pl.col("rank") == rank) & (pl.col("name") == name))
            assert mine.height == 2 * 4
            assert mine["took"].min() >= least * 1_000_000


class Pretended:
    """Stages whose iterations take 2 % more than simulated, and greedy ones hold more than they may."""

    def __init__(self) -> None:
        self.runs: list[Case] = []

    def run(self, case: Case, seed: int) -> SimpleNamespace:
        self.runs.append(case)
        simulated = simulate(
            case.plan, case.make_policy(), case.costs, case.disturbance, case.cap, seed, blocking=case.blocking
        )
        peak = 4.5 if case.policy == "greedy" else 4.0
        return SimpleNamespace(seconds=1.02 * simulated.makespan, peak=peak, late=0.001, overhead=50e-6)


def options(file: Path, rounds: int) -> SimpleNamespace:
    return SimpleNamespace(
        json=file, forward_ms=20.0, transport="torch", fresh=False, report=False, sizes=[(8, rounds)], extras=[0, 2]
    )


def test_an_interrupted_benchmark_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.CONDITIONS", {name: CONDITIONS[name] for name in ("plain", "jitter 20 %")})
    file = tmp_path / "rows.json"
    one, both = Pretended(), Pretended()
    Bench(options(file, 1)).run(one)  # pyright: ignore[reportArgumentType]
    bench = Bench(options(file, 2))
    bench.run(both)  # pyright: ignore[reportArgumentType]
    assert {len(row.seconds) for row in bench.rows.values()} == {2}
    dynamic = [case for case in both.runs if case.policy != "static"]
    assert len(both.runs) == len(bench.rows) + len(dynamic) // 2, "with a warm-up for each that is dynamic"
    assert len({(row.condition, row.contender) for row in bench.rows.values()}) == 2 * (len(CONTENDERS) - 1)


def test_the_report_says_what_was_met_and_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: CONDITIONS[name] for name in ("plain", "link c=1", "5 % tail x3")}
    monkeypatch.setattr("pipeline.CONDITIONS", chosen)
    bench = Bench(options(tmp_path / "rows.json", 1))
    bench.run(Pretended())  # pyright: ignore[reportArgumentType]
    text = report(list(bench.rows.values()), 4)
    lines = text.splitlines()
    for contender in CONTENDERS:
        assert any(line.startswith(f"| {contender.name} |") for line in lines)
    assert all(condition in text for condition in chosen)
    (plain,) = [line for line in lines if line.startswith("| 8 | +0 | plain |")]
    assert "| zb-v |" in plain
    assert "at most +1 %: met" in plain
    assert f"- within 5 % of the simulator: {len(bench.rows)} of {len(bench.rows)}; median +2.0 %" in text
    (over,) = [line for line in lines if line.startswith("- peak over the cap")]
    assert over.count("greedy") == len(chosen)
    assert "50 us" in lines[-1]
    assert BLOCKING_MICROBATCHES >= 8


def test_nothing_measured_is_no_table() -> None:
    assert report([Row(8, 0, "plain", "zb-v")], 4) == "nothing measured"
