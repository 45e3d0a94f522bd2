"""What scan says of public traces with known answers; they lie beside the repository and are not part of it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import polars as pl
import pytest
from format_files import SHARED

from trimtab.scan import Report, analyze
from trimtab.scan.kernels.peers import stages_of
from trimtab.scan.model import FindingKind, Pattern, Verdict
from trimtab.scan.table import build
from trimtab.traces.read import read

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the public traces are not at {SHARED}")

MLP_GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"


@cache
def report(pattern: str) -> Report:
    """Of all files that match, as one job."""
    return analyze(read(*sorted(SHARED.glob(pattern)))).report


def nccl2(name: str) -> Report:
    return report(f"nccl2/{name}-rank*")


def replays(got: Report) -> bool:
    """The waits that were inferred give back the step time that was measured."""
    return got.step_time_s.replayed == pytest.approx(got.step_time_s.actual, rel=0.01)


def test_two_healthy_gpus() -> None:
    got = nccl2("dp2-healthy")
    assert got.findings == ()
    assert got.verdict is Verdict.HEALTHY or got.smallest_detectable is not None
    assert got.matching.unmatched == 0
    assert replays(got)
    assert any("optimizer ends" in warning for warning in got.warnings), "the steps are inferred, which is said"


@pytest.mark.parametrize(("name", "healthy_s"), [("dp2-slow1", 0.527), ("tp2-slow1", 0.291)])
def test_additional_kernels_make_a_slow_rank(name: str, healthy_s: float) -> None:
    got = nccl2(name)
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [(FindingKind.SLOW_RANK, (1,))]
    assert replays(got)
    evidence = " ".join(got.findings[0].evidence)
    assert f"128 more of '{MLP_GEMM}'" in evidence, "8 before each MLP of 4 layers and 4 microbatches"
    assert "more work, not a slower GPU" in evidence
    assert got.what_if[0].step_time_s == pytest.approx(healthy_s, rel=0.02), "what the job takes without the fault"
    assert [victim.rank for victim in got.victims] == [0]


def test_a_stage_without_peers() -> None:
    got = nccl2("pp2-slow1")
    assert [finding.ranks for finding in got.findings] == [(1,)]
    finding = got.findings[0]
    assert finding.kind in (FindingKind.SLOW_STAGE, FindingKind.SLOW_RANK)
    assert finding.stage == 1
    evidence = " ".join(finding.evidence)
    assert "cannot be told apart" in evidence or "look the same" in evidence
    assert f"more of '{MLP_GEMM}'" in evidence
    assert replays(got)


def test_stages_are_told_by_their_kernels_where_messages_name_nobody() -> None:
    trace = read(*sorted(SHARED.glob("nccl2/pp2-slow1-rank*")))
    blind = trace.events.with_columns(pl.lit(None, pl.Int32).alias("src"), pl.lit(None, pl.Int32).alias("dst"))
    data, _ = build(replace(trace, events=blind), 1)
    stage, pipeline = stages_of(data)
    assert (stage.tolist(), pipeline) == ([0, 1], True)


def test_who_is_last_is_not_who_is_to_blame() -> None:
    """Rank 2 sleeps 30 ms a step; rank 3 comes late to the collective of all, but only because it waits for rank 2."""
    got = report("torch_gloo4/rank*.json")
    stalls = [finding for finding in got.findings if finding.kind in (FindingKind.HOST_STALL, FindingKind.DATA_LOADING)]
    assert [finding.ranks for finding in stalls] == [(2,)]
    assert all(finding.ranks == (2,) for finding in got.findings)
    assert stalls[0].seconds_lost_per_step == pytest.approx(0.03, rel=0.2)
    assert any("injected_delay" in line for line in stalls[0].evidence)
    assert 3 in [victim.rank for victim in got.victims]


def test_bytedance_one_worker_made_slow() -> None:
    """AR: the published S is 1.973, and the slowest 3 % of the workers account for all of it."""
    got = report("bytedance_straggler/trace-AR.parquet")
    assert got.verdict is Verdict.STRAGGLER
    assert [(f.kind, f.ranks, f.pattern) for f in got.findings] == [(FindingKind.SLOW_RANK, (0,), Pattern.PERSISTENT)]
    assert got.slowdown == pytest.approx(1.973, rel=0.02)
    assert got.findings[0].share_of_slowdown > 0.9
    assert got.findings[0].ratio == pytest.approx(2.37, rel=0.06), "2.25 to 2.5 times its peers"
    published = json.loads((SHARED / "bytedance_straggler" / "mw-AR.json").read_text())
    assert got.step_time_s.replayed == pytest.approx(published["tori"], rel=0.02)
    assert got.step_time_s.ideal == pytest.approx(published["tideal"], rel=0.02)
    assert got.what_if[0].step_time_s == pytest.approx(published["trem"], rel=0.03), "without the slowest worker"
    assert len(got.victims) == 15


def test_bytedance_a_heavier_last_stage() -> None:
    """ST: the published S is 1.179, replayed over ideal."""
    got = report("bytedance_straggler/trace-ST.parquet")
    assert got.verdict is Verdict.IMBALANCE
    finding = got.findings[0]
    assert (finding.kind, finding.ranks, finding.stage) == (FindingKind.SLOW_STAGE, (6, 7), 3)
    assert FindingKind.SLOW_RANK not in [finding.kind for finding in got.findings]
    assert got.slowdown == pytest.approx(1.179, rel=0.02)
    published = json.loads((SHARED / "bytedance_straggler" / "ms-ST.json").read_text())
    assert got.step_time_s.replayed == pytest.approx(published["tori"], rel=0.02)
    assert got.step_time_s.ideal == pytest.approx(published["tideal"], rel=0.03)
    assert got.clock.aligned


@pytest.mark.parametrize(
    ("name", "fault"), [("AR", (FindingKind.SLOW_RANK, (0,))), ("ST", (FindingKind.SLOW_STAGE, (6, 7)))]
)
def test_bytedance_without_its_sequence_numbers(name: str, fault: tuple[FindingKind, tuple[int, ...]]) -> None:
    trace = read(SHARED / "bytedance_straggler" / f"trace-{name}.parquet")
    if name == "AR":
        trace = replace(trace, events=trace.events.filter(pl.col("step") < 430))
    numbered = analyze(trace).report
    got = analyze(replace(trace, matching="order")).report
    assert (got.findings[0].kind, got.findings[0].ranks) == fault
    assert (got.matching.matched, got.matching.unmatched) == (numbered.matching.matched, numbered.matching.unmatched)
    assert got.matching.by.order == got.matching.matched
    assert got.slowdown == pytest.approx(numbered.slowdown, rel=1e-3)


def test_bytedance_with_a_rank_missing_and_one_that_began_late() -> None:
    trace = read(SHARED / "bytedance_straggler" / "trace-ST.parquet")
    late = (pl.col("rank") == 2) & (pl.col("step") < 260)
    events = trace.events.filter(~late & (pl.col("rank") != 5))
    ranks = {rank: info for rank, info in trace.ranks.items() if rank != 5}
    got = analyze(replace(trace, events=events, ranks=ranks)).report
    assert (got.findings[0].kind, got.findings[0].ranks) == (FindingKind.SLOW_STAGE, (6, 7))
    assert got.missing_ranks == (5,)
    assert any("were not recorded by every rank" in warning for warning in got.warnings)
    assert got.job.steps < 32 - 5


@pytest.mark.parametrize(("name", "send_ms", "step_s"), [("pp", 9.0, 0.677), ("dpp", 20.2, 0.907)])
def test_megatronapp_windows(name: str, send_ms: float, step_s: float) -> None:
    got = report(f"megatronapp/data-1-pipeline-4-tensor-1-{name}-aggregated.json")
    assert got.windows.pp_send_s == pytest.approx(send_ms / 1e3, rel=0.01)
    assert got.windows.dp_reduce_s is not None
    assert got.step_time_s.actual == pytest.approx(step_s, rel=0.005)
    assert got.job.steps == 19


@pytest.mark.parametrize(
    "pattern",
    [
        "hta/cpu_only/*",
        "hta/critical_path/*/*.json.gz",
        "hta/distributed_info_unavailable/*",
        "hta/mtia_inference_trace/*",
        "hta/nccl_parser_config/*",
        "hta/rank_non_gpu/*",
        "hta/trace_filter/*rank-0*",
        "hta/triton_example/*",
        "kineto/*",
        "param/linear_kineto*",
    ],
)
def test_one_rank_is_judged_as_far_as_it_can_be_or_refused_in_a_line(pattern: str) -> None:
    files = sorted(SHARED.glob(pattern))
    assert files
    for file in files:
        try:
            got = analyze(read(file)).report
        except ValueError as refused:
            lines = str(refused).splitlines()
            assert len(lines) == 1, "no steps, said in a line"
            continue
        assert got.job.steps >= 3 or got.verdict is Verdict.INCONCLUSIVE
        assert any("one rank" in warning or "no file of" in warning for warning in got.warnings)
        assert all(finding.kind != FindingKind.SLOW_LINK for finding in got.findings)
