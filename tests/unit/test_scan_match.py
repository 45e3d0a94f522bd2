"""Communications are matched without sequence numbers, and what cannot be known is not claimed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scan_jobs import TP2_PP2_DP2

from trimtab.scan import analyze, table
from trimtab.scan.align import Alignment
from trimtab.scan.arrays import factorize
from trimtab.scan.match import Clocks, Matches, match, match_again
from trimtab.scan.match.sequences import GAP, align
from trimtab.scan.model import FindingKind
from trimtab.scan.together import bring_together
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import Trace

COMM = pl.col("kind").cast(pl.String).is_in(["collective", "send", "recv"])


def unnumbered(trace: Trace) -> Trace:
    return replace(trace, events=trace.events.with_columns(seq=pl.lit(None, pl.Int64)), matching="order")


def numbers(trace: Trace) -> np.ndarray:
    """What each communication of the judged steps truly is."""
    data, _ = table.build(trace, 1)
    rows = np.flatnonzero(data.is_comm)
    p2p = data.src[rows] >= 0
    op = np.where(p2p, -2, data.op[rows])
    return factorize(data.group[rows], data.seq[rows], op, data.src[rows], data.dst[rows], data.tag[rows])[0]


def found(trace: Trace) -> tuple[Matches, Alignment]:
    data, _ = table.build(trace, 1)
    names = table.clocks_of([trace.ranks[int(rank)] for rank in data.ids])
    _, matches, clocks, _ = bring_together(trace, data, names)
    return matches, clocks


def wrong(matches: Matches, truth: np.ndarray) -> int:
    """Communications that are called complete and are made of several."""
    low, high = np.full(matches.count, len(truth)), np.full(matches.count, -1)
    np.minimum.at(low, matches.comm, truth)
    np.maximum.at(high, matches.comm, truth)
    return int((matches.complete & (low != high)).sum())


def without(trace: Trace, lost: np.ndarray) -> Trace:
    return replace(trace, events=trace.events.filter(~(pl.Series(lost) & trace.events.select(COMM).to_series())))


@pytest.mark.parametrize("ranks_per_host", [1, 2, 8])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_order_finds_what_sequence_numbers_say(ranks_per_host: int, device: str) -> None:
    job = SyntheticJob(TP2_PP2_DP2, steps=6, ranks_per_host=ranks_per_host, device=device)  # pyright: ignore[reportArgumentType]
    trace = generate(job)
    matches, _ = found(unnumbered(trace))
    assert matches.complete.all()
    assert wrong(matches, numbers(trace)) == 0
    summary = matches.summary()
    assert (summary.confidence, summary.by.order, summary.by.sequence_numbers) == (1.0, matches.count, 0)


def test_a_trace_without_numbers_gives_the_same_report() -> None:
    fault = SyntheticFault("slow_compute", ranks=(3,), factor=1.5)
    trace = generate(SyntheticJob(TP2_PP2_DP2, ranks_per_host=2, faults=(fault,)))
    numbered, by_order = analyze(trace).report, analyze(unnumbered(trace)).report
    assert by_order.findings == numbered.findings
    assert by_order.slowdown == numbered.slowdown
    assert by_order.windows == numbered.windows
    assert numbered.windows.pp_send_s is not None


@pytest.mark.parametrize("ranks_per_host", [2, 8])
@pytest.mark.parametrize("share", [0.005, 0.02])
def test_dropped_events_cost_little_more_than_themselves(ranks_per_host: int, share: float) -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2, steps=6, ranks_per_host=ranks_per_host))
    damaged = without(trace, np.random.default_rng(1).random(trace.events.height) < share)
    matches, clocks = found(unnumbered(damaged))
    possible = int(found(damaged)[0].complete.sum())
    assert wrong(matches, numbers(damaged)) == 0
    assert int(matches.complete.sum()) >= 0.97 * possible
    assert matches.summary().confidence < 1 - share / 2
    assert clocks.unconnected == ()


def test_a_profiler_that_started_late_shifts_nothing() -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2, steps=5))
    first = trace.events.filter((pl.col("rank") == 3) & (pl.col("step") == 1))["event_id"].min()
    head = trace.events.select((pl.col("rank") == 3) & pl.col("event_id").is_between(first, first + 40))  # pyright: ignore
    damaged = without(trace, head.to_series().to_numpy())
    matches, _ = found(unnumbered(damaged))
    assert 0 < (~matches.complete).sum() < 0.1 * matches.count
    assert wrong(matches, numbers(damaged)) == 0


def test_events_that_are_there_twice_do_no_harm() -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2, steps=5))
    again = trace.events.filter(COMM & (pl.col("rank") == 1) & (pl.col("event_id") % 5 == 0))
    doubled = replace(trace, events=pl.concat([trace.events, again]))
    matches, _ = found(unnumbered(doubled))
    assert wrong(matches, numbers(doubled)) == 0
    assert matches.complete.sum() == found(trace)[0].complete.sum()


settings_of_jobs = st.fixed_dictionaries(
    {
        "topology": st.sampled_from([TP2_PP2_DP2, Topology(pp=4), Topology(dp=4), Topology(tp=2, pp=2, vpp=2)]),
        "steps": st.integers(3, 5),
        "ranks_per_host": st.sampled_from([1, 2, 8]),
        "device": st.sampled_from(["cuda", "emulated", "cpu"]),
        "receive_ahead": st.booleans(),
        "dp_overlap": st.booleans(),
        "clock_noise_us": st.sampled_from([2.0, 20.0, 100.0]),
        "seed": st.integers(0, 999),
    }
)


@settings(max_examples=40, deadline=None)
@given(settings_of_jobs, st.sampled_from([0.0, 0.003, 0.01, 0.05, 0.2]), st.integers(0, 20), st.booleans())
def test_no_wrong_match_is_claimed_with_confidence(job: dict, share: float, head: int, doubles: bool) -> None:
    """Whatever is missing or there twice: what is called sure is true."""
    trace = generate(SyntheticJob(microbatches=4, **job))
    rng = np.random.default_rng(job["seed"])
    events = trace.events.sort("rank", "ready", "event_id")
    lost = rng.random(events.height) < share
    at = events.select(pl.int_range(pl.len()).over("rank", COMM, pl.col("step") >= 1)).to_series().to_numpy()
    first = rng.integers(0, head + 1, job["topology"].world_size)
    lost |= (events["step"].to_numpy() >= 1) & (at < first[events["rank"]])
    damaged = without(replace(trace, events=events), lost)
    if doubles:
        again = damaged.events.filter(COMM & pl.Series(rng.random(damaged.events.height) < 0.02))
        damaged = replace(damaged, events=pl.concat([damaged.events, again]))
    matches, _ = found(unnumbered(damaged))
    mistakes = wrong(matches, numbers(damaged))
    assert mistakes <= 0.03 * matches.count
    if matches.summary().confidence >= 0.9:
        assert mistakes == 0


@pytest.mark.parametrize("shift", [1, 7, 1000])
def test_numbers_that_each_process_counts_for_itself_are_not_trusted(shift: int) -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2, steps=6))
    late = pl.when((pl.col("rank") % 2 == 1) & (pl.col("kind") == "collective")).then(pl.col("seq") + shift)
    shifted = replace(trace, events=trace.events.with_columns(seq=late.otherwise("seq")))
    matches, _ = found(shifted)
    assert wrong(matches, numbers(trace)) == 0
    assert matches.complete.all()
    assert any("do not fit each other" in warning for warning in matches.warnings)
    assert matches.summary().by.order > 0


@pytest.mark.parametrize("steps", [(4, 5), (2, 4), (2, 3, 5)])
def test_numbers_hold_where_order_would_be_less_sure_though_messages_seem_to_lie_in_other_steps(
    steps: tuple[int, ...],
) -> None:
    """Receivers that were ready, by their host, before their device began the step."""
    trace = generate(SyntheticJob(Topology(pp=2), steps=6, ranks_per_host=2, receive_ahead=True))
    begins = trace.events.filter(pl.col("name") == "step").select("rank", "step", begin="start")
    events = trace.events.join(begins, on=["rank", "step"], how="left", maintain_order="left")
    early = (pl.col("kind") == "recv") & (pl.col("rank") == 1) & pl.col("step").is_in(steps)
    moved = [pl.when(early).then(pl.col("begin") - 1_000).otherwise(name).alias(name) for name in ("ready", "start")]
    matches, _ = found(replace(trace, events=events.with_columns(moved).drop("begin")))
    assert matches.warnings == ()
    assert matches.complete.all()
    assert wrong(matches, numbers(trace)) == 0


def test_names_that_differ_between_the_ranks_of_a_group_are_one_group() -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2, steps=5))
    own = pl.format("{} on rank {}", pl.col("group").cast(pl.String), pl.col("rank")).cast(pl.Categorical)
    groups = {f"{name} on rank {rank}": ranks for name, ranks in trace.groups.items() for rank in ranks}
    renamed = replace(trace, events=trace.events.with_columns(group=own), groups=groups)
    for named in (renamed, unnumbered(renamed)):
        matches, _ = found(named)
        assert matches.complete.all()
        assert wrong(matches, numbers(trace)) == 0


def test_groups_whose_members_nobody_names_are_matched_among_those_seen_in_them() -> None:
    trace = generate(SyntheticJob(TP2_PP2_DP2, steps=5))
    matches, _ = found(replace(unnumbered(trace), groups={}))
    assert matches.complete.all()
    assert wrong(matches, numbers(trace)) == 0


def test_sizes_that_differ_by_nature_do_not_part_a_collective() -> None:
    trace = generate(SyntheticJob(Topology(tp=4), steps=5))
    own = pl.when(pl.col("kind") == "collective").then(pl.col("bytes") + pl.col("rank")).otherwise("bytes")
    matches, _ = found(unnumbered(replace(trace, events=trace.events.with_columns(bytes=own))))
    assert matches.complete.all()


def test_clocks_that_nothing_connects_do_not_decide() -> None:
    """The same calls of one size over and over, some of them lost, on clocks that cannot be compared."""
    trace = generate(SyntheticJob(Topology(tp=2), steps=5, ranks_per_host=1))
    damaged = without(trace, np.random.default_rng(0).random(trace.events.height) < 0.1)
    data, _ = table.build(unnumbered(damaged), 1)
    matches = match(data, damaged.groups, "order")
    assert wrong(matches, numbers(damaged)) == 0
    assert matches.summary().confidence < 0.5
    together = match_again(data, matches, damaged.groups, "order", Clocks(np.array([0, 1])))
    assert together.complete.sum() == matches.complete.sum()


def test_times_that_cannot_be_lower_the_confidence() -> None:
    trace = generate(SyntheticJob(Topology(dp=2), steps=5, ranks_per_host=8))
    off = [
        pl.when((pl.col("rank") == 1) & (pl.col("kind") == "collective")).then(pl.col(name) + 10**8).otherwise(name)
        for name in ("ready", "start", "end")
    ]
    matches, _ = found(replace(trace, events=trace.events.with_columns(off)))
    assert matches.summary().confidence < 0.6


def test_two_slow_downs_are_found_without_numbers_and_with_losses() -> None:
    faults = (SyntheticFault("slow_compute", ranks=(2,), factor=1.4), SyntheticFault("gc_pause", ranks=(5,), ms=40))
    trace = generate(SyntheticJob(TP2_PP2_DP2, ranks_per_host=2, faults=faults))
    damaged = without(trace, np.random.default_rng(3).random(trace.events.height) < 0.01)
    got = {(finding.kind, finding.ranks) for finding in analyze(unnumbered(damaged)).report.findings}
    assert got == {(FindingKind.SLOW_RANK, (2,)), (FindingKind.GARBAGE_COLLECTION, (5,))}


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_alignment_is_the_cheapest(keys: list[int], lost_a: list[bool], lost_b: list[bool]) -> None:
    """Against all alignments of short sequences, by recursion."""
    a = [key for key, lost in zip(keys, lost_a, strict=False) if not lost]
    b = [key for key, lost in zip(keys, lost_b, strict=False) if not lost]
    cost = np.array([[0.0 if x == y else 1e9 for y in b] for x in a]).reshape(len(a), len(b))
    pairs = align(cost)
    assert (np.diff(pairs.a) > 0).all()
    assert (np.diff(pairs.b) > 0).all()
    assert all(a[i] == b[j] for i, j in zip(pairs.a, pairs.b, strict=True))
    best = {(i, j): GAP * (i + j) for i in range(len(a) + 1) for j in range(len(b) + 1) if i * j == 0}
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            options = (best[i - 1, j] + GAP, best[i, j - 1] + GAP, best[i - 1, j - 1] + cost[i - 1, j - 1])
            best[i, j] = min(options)
    left_over = len(a) + len(b) - 2 * len(pairs.a)
    assert GAP * left_over == pytest.approx(best[len(a), len(b)])


def test_two_alignments_of_equal_cost_are_a_toss_up() -> None:
    pairs = align(np.zeros((2, 1)))
    assert pairs.sure.tolist() == [0.5]
    assert align(np.array([[0.0], [6.0]])).sure[0] > 0.99
