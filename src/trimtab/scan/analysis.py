"""The whole scan: select steps, match, align, cut into lanes, replay, look for causes, price them, conclude."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.config import ScanConfig
from trimtab.scan import graph, lanes, match, measure, table, transfers
from trimtab.scan.align import Alignment
from trimtab.scan.candidates import Context
from trimtab.scan.causes import find
from trimtab.scan.counters import collect
from trimtab.scan.drawing import draw
from trimtab.scan.fold.folded import Folded
from trimtab.scan.history import history
from trimtab.scan.kernels.compare import compare
from trimtab.scan.model import Finding, FindingKind, Job, Matching, Report, StepTime, Verdict
from trimtab.scan.plots import ReportPlots
from trimtab.scan.price import price
from trimtab.scan.replay import Replayer
from trimtab.scan.sensitivity import smallest_detectable
from trimtab.scan.together import bring_together
from trimtab.scan.whatif import Question, answer
from trimtab.scan.windows import windows
from trimtab.traces.own_header import rank_list
from trimtab.traces.summaries import read_summaries
from trimtab.traces.table import RankInfo, Trace

LEAST_STEPS = 3
"""Fewer judged steps decide nothing."""
COARSE = 1.25
"""Where no smaller slow-down of one rank than this could have been seen, no finding means nothing."""
POOR_REPLAY = 0.1
"""A replay further than this share from the actual step time is warned of."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a scan returns: the report, and what its figures are drawn from."""

    report: Report
    plots: ReportPlots


def analyze(
    trace: Trace, config: ScanConfig | None = None, questions: Sequence[Question] = (), folded: Folded | None = None
) -> Analysis:
    """Scan ``trace``, and answer what-if ``questions`` about it. ``folded`` is what :func:`.fold.load.load` made of
    ranks that are not there event by event.

    Raises ValueError, in one line, when it holds nothing that could be judged, or not what a question is about.
    """
    if trace.summaries and trace.events.is_empty():
        raise ValueError(f"only summaries are left: no cause can be found. {'; '.join(_history(trace))}")
    run = rebuild(trace, config or ScanConfig(), folded)
    context, replayer, clocks = run.context, run.replayer, run.clocks
    steps = context.table.steps
    enough = steps.count >= LEAST_STEPS
    actual = replayer.run()
    scales = measure.ideal_scales(context.table, context.measures, context.transfers, context.segments)
    ideal = replayer.run(*scales, alike=True)
    hosts = tuple(info.host for info in run.ranks)
    asked = answer(questions, context, replayer, actual, hosts)
    priced = price(
        context,
        replayer,
        find(context) if enough else [],
        actual,
        ideal.step_ns / 1e9,
        clocks.largest_error_ns / 1e9,
        hosts,
    )
    step_time = StepTime(steps.mean_seconds(), actual.step_ns / 1e9, ideal.step_ns / 1e9)
    smallest = smallest_detectable(context, replayer, actual.step_ns) if enough else None
    report = Report(
        verdict=_verdict(priced.findings, steps.count, smallest),
        job=_job(trace, run),
        clock=replace(clocks.summary(), device_drift_ppm=_device_drift(run.ranks)),
        matching=_matching(run, folded),
        step_time_s=step_time,
        slowdown=step_time.replayed / step_time.ideal if step_time.ideal > 0 else 1.0,
        findings=priced.findings,
        what_if=(*asked, *priced.what_if),
        windows=windows(context.table, run.matches, replayer.lanes.nodes, context.transfers),
        victims=priced.victims,
        missing_ranks=trace.missing_ranks,
        dropped_events=sum(info.dropped for info in run.ranks),
        smallest_detectable=smallest,
        warnings=(*trace.warnings, *run.warnings, *_poor_replay(step_time), *_missing(trace)),
    )
    return Analysis(report, draw(context, replayer, actual, clocks.error_ns, priced.findings))


@dataclass(frozen=True, slots=True)
class Run:
    """A trace made replayable."""

    context: Context
    replayer: Replayer
    clocks: Alignment
    matches: match.Matches
    ranks: tuple[RankInfo, ...]
    warnings: tuple[str, ...]


def rebuild(trace: Trace, config: ScanConfig, folded: Folded | None = None) -> Run:
    """Select, match, align, cut into lanes, connect."""
    data, warnings = table.build(trace, config.warmup_steps)
    counters = collect(trace.events, data)
    infos = tuple(trace.ranks[int(rank)] for rank in data.ids)
    data, matches, clocks, more = bring_together(trace, data, table.clocks_of(infos))
    warnings += more
    lane = lanes.build(data, matches)
    seen = transfers.observe(data, matches, lane.nodes, clocks.largest_error_ns)
    comm_of_row = np.full(len(data.rank), -1)
    comm_of_row[matches.rows] = matches.comm
    comm_of_post = graph.comm_of_posts(lane.nodes, comm_of_row)
    depend, seen = graph.build(lane.nodes, seen, comm_of_post)
    if depend.dropped:
        warnings.append(f"{depend.dropped} communications contradict each other's order and were left unmatched")
    lane, mirror = (lane, None) if folded is None else folded.fold(data, lane)
    measures = measure.measure(data, lane.pieces, None if folded is None else folded.sums(data))
    kernels = compare(data, measures.peers.group)
    segments = measure.segments_of(measures, lane.nodes, comm_of_post) if kernels else None
    context = Context(data, measures, seen, config, lane.nodes.comm_row[seen.node], counters, kernels, segments)
    replayer = Replayer(lane, depend, seen, data.steps.count, mirror)
    return Run(context, replayer, clocks, matches, infos, tuple(warnings))


def _device_drift(ranks: Sequence[RankInfo]) -> float | None:
    known = [abs(info.drift_ppm) for info in ranks if info.drift_ppm is not None]
    return round(max(known), 3) if known else None


def _matching(run: Run, folded: Folded | None) -> Matching:
    seen = run.matches.summary()
    return seen if folded is None else folded.matching(seen, run.context.table)


def _job(trace: Trace, run: Run) -> Job:
    return Job(
        world_size=trace.world_size,
        steps=run.context.table.steps.count,
        topology=trace.topology.as_dict() if trace.topology else None,
        sources=trace.sources,
        device="+".join(sorted({info.device for info in run.ranks})),
        run_id=trace.run_id,
        oversubscribed=sum(info.oversubscribed for info in run.ranks),
    )


def _poor_replay(step_time: StepTime) -> Sequence[str]:
    if abs(step_time.replayed / step_time.actual - 1) <= POOR_REPLAY:
        return ()
    return (
        f"the replay gives {step_time.replayed:.4f} s a step, the run took {step_time.actual:.4f} s: "
        "something that the trace does not show takes part; read costs with care",
    )


def _history(trace: Trace) -> list[str]:
    try:
        return history(read_summaries(trace.summaries)).lines()
    except ValueError as error:
        return [str(error)]


def _missing(trace: Trace) -> Sequence[str]:
    missing = trace.missing_ranks
    if not missing:
        return ()
    return (
        f"no file of {rank_list(missing)} ({len(trace.ranks)} of {trace.world_size} ranks are here): "
        "they are judged by nobody, and who waits for them cannot be told",
    )


def _verdict(findings: Sequence[Finding], steps: int, smallest: float | None) -> Verdict:
    """One word; imbalance only if the work is all that is uneven. What slows all alike does not count beside that."""
    if findings:
        work = (FindingKind.SLOW_STAGE, FindingKind.WORKLOAD_IMBALANCE)
        uneven = [f for f in findings if f.kind != FindingKind.GLOBAL_SLOWDOWN]
        return Verdict.IMBALANCE if uneven and all(f.kind in work for f in uneven) else Verdict.STRAGGLER
    if steps < LEAST_STEPS or smallest is None or smallest > COARSE:
        return Verdict.INCONCLUSIVE
    return Verdict.HEALTHY
