"""Counters as evidence: cited where they differ, silent where they do not, harmless whatever they hold."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_jobs import TP2_PP2_DP2, edited, faulty

from trimtab.events import Kind
from trimtab.scan import Report, analyze
from trimtab.scan.counters import MOST_SAMPLES, Readings, collect
from trimtab.scan.model import FindingKind, Verdict
from trimtab.scan.table import build
from trimtab.topology import Topology
from trimtab.traces.counters import NOTHING, Sample, levels, parse_sample
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import Trace

Fault = SyntheticFault
CLOCK = "SM clock"


@functools.cache
def counted(topology: Topology, *faults: SyntheticFault, **settings: Any) -> Trace:
    """A job that samples its counters ten times a second."""
    return generate(faulty(topology, *faults, counter_seconds=0.1, **settings))


def changed(trace: Trace, ranks: Iterable[int], change: Callable[[dict[str, Any]], Any], name: str = "gpu") -> Trace:
    """The trace with ``change`` made to the values of each sample of ``name`` on ``ranks``; it may return text."""

    def apply(args: str) -> str:
        values = json.loads(args)
        said = change(values)
        return said if isinstance(said, str) else json.dumps(values)

    events = trace.events.with_row_index("row")
    chosen = events.filter(
        (pl.col("kind") == Kind.COUNTER.value)
        & (pl.col("name").cast(pl.String) == name)
        & pl.col("rank").is_in(list(ranks))
    )
    new = chosen.select("row", new=pl.Series([apply(args) for args in chosen["args"]], dtype=pl.String))
    events = events.join(new, on="row", how="left", maintain_order="left")
    return edited(trace, events.with_columns(args=pl.coalesce("new", "args")).drop("new", "row"))


def only(report: Report, kind: FindingKind, ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Evidence of the one finding."""
    assert [(finding.kind, finding.ranks) for finding in report.findings] == [(kind, ranks)]
    return report.findings[0].evidence


SLOW_CLOCK = Fault("slow_clock", ranks=(3,), factor=1.4)
SLOW_COMPUTE = Fault("slow_compute", ranks=(3,), factor=1.4)
STALL = Fault("host_stall", ranks=(2,), ms=30)
LINK = Fault("slow_link", link=(2, 6), ms=8)


def test_a_gpu_that_is_clocked_down_is_cited() -> None:
    evidence = only(analyze(counted(TP2_PP2_DP2, SLOW_CLOCK)).report, FindingKind.SLOW_RANK, (3,))
    (line,) = [line for line in evidence if CLOCK in line]
    assert line.startswith("SM clock 1,4")
    assert "MHz against 1,98" in line
    assert "on its peers; throttled: hw_thermal_slowdown in 100% of samples; temperature 91 °C against 62" in line


def test_where_all_counters_are_equal_none_is_cited() -> None:
    with_counters = analyze(counted(TP2_PP2_DP2, SLOW_COMPUTE)).report
    without = analyze(generate(faulty(TP2_PP2_DP2, SLOW_COMPUTE))).report
    assert with_counters.findings == without.findings


@pytest.mark.parametrize("fault", [STALL, LINK, Fault("slow_data", ranks=(0,), ms=20)], ids=str)
def test_other_findings_cite_nothing_that_is_equal(fault: SyntheticFault) -> None:
    got = analyze(counted(TP2_PP2_DP2, fault)).report
    assert got.findings == analyze(generate(faulty(TP2_PP2_DP2, fault))).report.findings
    assert len(got.findings) == 1


def test_a_healthy_job_stays_healthy_with_counters() -> None:
    report = analyze(counted(TP2_PP2_DP2)).report
    assert report.verdict is Verdict.HEALTHY
    assert report.warnings == ()


def test_a_clock_within_three_percent_is_not_cited_and_one_below_is() -> None:
    trace = counted(TP2_PP2_DP2, SLOW_COMPUTE)

    def lines(mhz: float) -> list[str]:
        got = analyze(changed(trace, [3], lambda values: values.update(sm_clock_mhz=mhz))).report
        return [line for line in only(got, FindingKind.SLOW_RANK, (3,)) if CLOCK in line]

    assert lines(1935) == []
    assert len(lines(1890)) == 1


def test_clocks_of_an_idle_gpu_count_for_nothing() -> None:
    def idle(values: dict[str, Any]) -> None:
        values.update(sm_clock_mhz=345, throttle=["gpu_idle"])

    got = analyze(changed(counted(TP2_PP2_DP2, SLOW_COMPUTE), [3], idle)).report
    assert not any(CLOCK in line for line in only(got, FindingKind.SLOW_RANK, (3,)))


@pytest.mark.parametrize(
    ("reasons", "everywhere", "cited"),
    [
        (["sw_power_cap"], False, "throttled: sw_power_cap in 100% of samples"),
        (["sw_power_cap"], True, None),
        (["applications_clocks_setting"], False, None),
        (["hw_slowdown"], False, "throttled: hw_slowdown in 100% of samples"),
        (["<script>", "no such reason"], False, None),
    ],
)
def test_throttle_reasons_are_cited_where_the_peers_have_none(
    reasons: list[str], everywhere: bool, cited: str | None
) -> None:
    ranks = range(8) if everywhere else [3]
    trace = changed(counted(TP2_PP2_DP2, SLOW_COMPUTE), ranks, lambda values: values.update(throttle=reasons))
    text = " ".join(only(analyze(trace).report, FindingKind.SLOW_RANK, (3,)))
    assert (cited in text) if cited else ("throttled" not in text)
    assert "script" not in text


def test_a_lower_power_limit_and_applications_clock_are_cited_with_the_clock() -> None:
    def limited(values: dict[str, Any]) -> None:
        values.update(sm_clock_mhz=1400, power_limit_w=500, sm_clock_set_mhz=1410)

    got = analyze(changed(counted(TP2_PP2_DP2, SLOW_COMPUTE), [3], limited)).report
    (line,) = [line for line in only(got, FindingKind.SLOW_RANK, (3,)) if CLOCK in line]
    assert "power limit 500 W against 700" in line
    assert "applications clock set to 1,410 MHz against 1,980" in line


def test_without_peers_the_clock_tells_a_slow_rank_from_a_heavy_stage() -> None:
    topology = Topology(pp=4)
    slow = analyze(counted(topology, SLOW_CLOCK, layers=8)).report
    evidence = only(slow, FindingKind.SLOW_RANK, (3,))
    assert slow.verdict is Verdict.STRAGGLER
    assert any("on the other ranks" in line and CLOCK in line for line in evidence)
    assert not any("look the same" in line for line in evidence)
    heavy = analyze(counted(topology, Fault("slow_stage", stage=3, factor=1.4), layers=8)).report
    assert any("look the same" in line for line in only(heavy, FindingKind.SLOW_STAGE, (3,)))


def test_a_clock_that_explains_little_leaves_a_heavy_stage_a_heavy_stage() -> None:
    trace = counted(Topology(pp=4), Fault("slow_stage", stage=3, factor=1.5), layers=8)
    got = analyze(changed(trace, [3], lambda values: values.update(sm_clock_mhz=1850))).report
    evidence = only(got, FindingKind.SLOW_STAGE, (3,))
    assert any(line.startswith("SM clock 1,850 MHz") for line in evidence)


def test_a_stage_whose_every_gpu_is_clocked_down_is_made_of_slow_ranks() -> None:
    got = analyze(counted(TP2_PP2_DP2, Fault("slow_clock", ranks=(4, 5, 6, 7), factor=1.4))).report
    evidence = only(got, FindingKind.SLOW_RANK, (4, 5, 6, 7))
    assert got.verdict is Verdict.STRAGGLER
    assert any("slow ranks rather than a heavier stage" in line for line in evidence)


def test_a_rank_without_peers_is_compared_with_its_own_other_steps() -> None:
    fault = Fault("slow_clock", ranks=(3,), factor=1.4, steps=(6, None))
    got = analyze(counted(Topology(pp=4), fault, layers=8)).report
    evidence = only(got, FindingKind.SLOW_RANK, (3,))
    assert any(CLOCK in line and "in its other steps" in line for line in evidence)
    assert not any("cannot be told apart" in line for line in evidence)


def test_a_slow_down_of_all_is_compared_with_the_other_steps() -> None:
    fault = Fault("slow_clock", ranks=tuple(range(8)), factor=1.4, steps=(6, None))
    got = analyze(counted(TP2_PP2_DP2, fault)).report
    evidence = only(got, FindingKind.GLOBAL_SLOWDOWN, tuple(range(8)))
    assert any(CLOCK in line and "in the other steps" in line for line in evidence)


def test_a_crowded_host_is_cited_for_a_stall() -> None:
    def crowded(values: dict[str, Any]) -> None:
        values.update(load_1m=64, cpus=32, main_thread_wait_share=0.34, involuntary_switches=150, major_faults=30)

    trace = counted(TP2_PP2_DP2, STALL, ranks_per_host=2)
    evidence = only(analyze(changed(trace, [2], crowded, "host")).report, FindingKind.HOST_STALL, (2,))
    assert "host load 64 on 32 CPUs (0.2 for each CPU on other hosts)" in evidence
    assert "its main thread waited for a CPU 34% of the time (0% on the other ranks)" in evidence
    assert "1,500 involuntary context switches a second (0 on the other ranks)" in evidence
    assert "300 major page faults a second (0 on the other ranks)" in evidence


def test_a_load_that_all_hosts_have_explains_nothing_but_one_without_others_is_told() -> None:
    def crowded(values: dict[str, Any]) -> None:
        values.update(load_1m=64, cpus=32)

    several = changed(counted(TP2_PP2_DP2, STALL, ranks_per_host=2), range(8), crowded, "host")
    assert not any("host load" in line for line in only(analyze(several).report, FindingKind.HOST_STALL, (2,)))
    one = changed(counted(TP2_PP2_DP2, STALL, ranks_per_host=8), range(8), crowded, "host")
    assert "host load 64 on 32 CPUs" in only(analyze(one).report, FindingKind.HOST_STALL, (2,))


def test_a_crowded_host_is_cited_for_a_slow_rank_that_computes_on_it() -> None:
    def crowded(values: dict[str, Any]) -> None:
        values.update(main_thread_wait_share=0.3)

    def lines(device: str) -> list[str]:
        trace = changed(counted(TP2_PP2_DP2, SLOW_COMPUTE, device=device), [3], crowded, "host")
        return [line for line in analyze(trace).report.findings[0].evidence if "waited for a CPU" in line]

    assert lines("cuda") == []
    assert lines("cpu") == ["its main thread waited for a CPU 30% of the time (0% on the other ranks)"]


def test_a_quota_is_cited() -> None:
    def held_back(values: dict[str, Any]) -> None:
        values.update(cpus_available=2.0, cgroup_throttled_share=0.2)

    evidence = only(
        analyze(changed(counted(TP2_PP2_DP2, STALL), [2], held_back, "host")).report, FindingKind.HOST_STALL, (2,)
    )
    assert "2 CPUs available to it against 16 on the other ranks" in evidence
    assert "the CPU quota of its cgroup held it back 20% of the time" in evidence


def test_errors_of_a_link_are_cited() -> None:
    trace = counted(TP2_PP2_DP2, LINK)
    seen = [0]

    def failing(values: dict[str, Any]) -> None:
        seen[0] += 4
        values.update(nvlink_replays_total=seen[0], pcie_width=8)

    evidence = only(analyze(changed(trace, [6], failing)).report, FindingKind.SLOW_LINK, (2, 6))
    assert any(
        line.startswith("the GPU of rank 6 counted ") and "NVLink replays (0 elsewhere)" in line for line in evidence
    )
    assert "the PCIe link of rank 6 runs at generation 5 x8, others at 5 x16" in evidence
    assert not any("rank 2 counted" in line for line in evidence)


HOSTILE = [
    "",
    "null",
    "[1, 2]",
    "{",
    "[" * 100_000,
    '{"sm_clock_mhz": NaN}',
    '{"sm_clock_mhz": Infinity, "interval_s": -1, "major_faults": 5}',
    '{"sm_clock_mhz": 1e999}',
    '{"sm_clock_mhz": ' + "9" * 4000 + "}",
    '{"sm_clock_mhz": "fast", "throttle": "hw_slowdown", "temperature_c": true, "power_w": {"a": []}}',
    '{"sm_clock_mhz": -5, "throttle": [{}, null, ["hw_slowdown"]], "nvlink_replays_total": -1e17}',
    json.dumps({f"v{k}": k for k in range(300)}),
    '{"a": "' + "x" * 100_000 + '"}',
    '{"\\ud800": 1, "sm_clock_mhz": 0}',
]


@pytest.mark.parametrize("fault", [SLOW_CLOCK, STALL, LINK], ids=str)
def test_absurd_values_change_no_finding(fault: SyntheticFault) -> None:
    trace = counted(TP2_PP2_DP2, fault)
    expected = analyze(trace).report.findings
    for name in ("gpu", "host"):
        turn = itertools.cycle(HOSTILE)
        trace = changed(trace, range(8), lambda _, turn=turn: next(turn), name)
    found = analyze(trace).report.findings
    bare = [dataclasses.replace(finding, evidence=()) for finding in (*found, *expected)]
    assert bare[: len(found)] == bare[len(found) :]
    assert len(found) == 1


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_absurd_text_is_no_number_that_is_not_finite(text: str) -> None:
    assert all(math.isfinite(value) for value in parse_sample(text).numbers.values())
    assert parse_sample(text).throttle in (None, frozenset())


ANY_JSON = st.recursive(st.none() | st.floats() | st.text() | st.booleans(), st.lists)


@settings(max_examples=30)
@given(st.text(max_size=200) | st.dictionaries(st.sampled_from(["a", "b", "throttle"]), ANY_JSON).map(json.dumps))
def test_any_text_is_a_sample_of_finite_numbers(text: str) -> None:
    assert all(math.isfinite(value) for value in parse_sample(text).numbers.values())
    assert parse_sample(None) == NOTHING


def test_a_sample_keeps_what_it_can() -> None:
    assert parse_sample('{"a": 1, "b": NaN, "c": "x", "throttle": ["gpu_idle", "?"]}') == Sample(
        {"a": 1.0}, frozenset(["gpu_idle"])
    )
    assert levels("gpu", '{"a": 1.5}') == {"gpu: a": 1.5}
    assert levels(None, "[]") == {}


def test_samples_are_found_by_rank_and_step_and_few_are_parsed() -> None:
    job = SyntheticJob(Topology(dp=2), steps=6, counter_seconds=0.001, clock_offset_ms=5000.0, ranks_per_host=1)
    trace = generate(job)
    table, _ = build(trace, 1)
    counters = collect(trace.events, table)
    for rank in range(2):
        own = trace.events.filter((pl.col("kind") == Kind.COUNTER.value) & (pl.col("rank") == rank))
        expected = own.filter((pl.col("step") == 3) & (pl.col("name").cast(pl.String) == "gpu"))
        marked = [(begin, end) for begin, end in zip(table.steps.begin[rank], table.steps.end[rank], strict=True)][2]
        inside = expected["start"].is_between(*(int(mark + table.origin[rank]) for mark in marked), closed="left")
        assert inside.mean() > 0.9
        got = counters.of("gpu", rank, 2, 2)
        assert len(got.samples) == MOST_SAMPLES < len(expected)
        assert set(got.values("sm_clock_mhz")) <= {json.loads(args)["sm_clock_mhz"] for args in expected["args"]}
    assert counters.of("gpu", 0, 0, -1).samples == ()


def test_rates_and_growth_of_what_is_there() -> None:
    readings = Readings(
        tuple(
            Sample({"faults": 10.0, "interval_s": seconds, "total": total})
            for seconds, total in ((1.0, 5.0), (4.0, 9.0), (0.0, 12.0))
        )
    )
    assert readings.rate("faults") == 4.0
    assert readings.growth("total") == 7.0
    assert math.isnan(readings.rate("absent"))
    assert math.isnan(readings.growth("absent"))
    assert readings.throttled() == {}


def test_counters_are_no_work_and_make_no_step(tmp_path: Any) -> None:
    trace = counted(Topology(dp=2))
    bare = trace.events.filter(pl.col("kind") == Kind.COUNTER.value)
    with pytest.raises(ValueError, match="no training step"):
        analyze(edited(trace, bare))
    unmarked = trace.events.filter(pl.col("name").cast(pl.String) != "step")
    without = unmarked.filter(pl.col("kind") != Kind.COUNTER.value)
    assert analyze(edited(trace, unmarked)).report == analyze(edited(trace, without)).report
