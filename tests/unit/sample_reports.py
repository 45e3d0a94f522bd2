"""Reports and figures made by hand, for the tests of what renders them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from trimtab.scan.model import (
    Clock,
    ErrorUs,
    Finding,
    FindingKind,
    Job,
    Matching,
    Pattern,
    Report,
    StepTime,
    Verdict,
    Victim,
    WhatIf,
    Windows,
)
from trimtab.scan.plots import Category, ReportPlots, Segment

HOSTILE = "\x1b[31m[bold red]</script><img src=x onerror=alert(1)>\u202e&{{x}}\x00"


def finding(kind: FindingKind = FindingKind.SLOW_RANK, **changes: object) -> Finding:
    """A finding about rank 3."""
    base = Finding(
        kind=kind,
        ranks=(3,),
        host=None,
        stage=0,
        link=None,
        ops=("forward", "backward"),
        ratio=1.502,
        seconds_lost_per_step=0.0412,
        share_of_slowdown=0.941,
        pattern=Pattern.PERSISTENT,
        onset=8,
        steps=(8, 15),
        confidence=0.9996,
        evidence=(
            "forward of rank 3 took 12.0 ms a layer, its peers (0, 1, 2) 8.0 ms, from step 8 to 15",
            "ranks 0, 1, 2, 4, 5, 6 and 7 waited for it in 112 of 112 all-reduces",
        ),
    )
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]


def straggler() -> Report:
    """One slow rank and a smaller stall of another's host."""
    stall = finding(
        FindingKind.HOST_STALL,
        ranks=(5,),
        host="node-1",
        stage=None,
        ops=("forward",),
        ratio=math.nan,
        seconds_lost_per_step=0.0031,
        share_of_slowdown=0.06,
        pattern=Pattern.TRANSIENT,
        onset=None,
        steps=(4, 6),
        confidence=0.992,
        evidence=("the device of rank 5 was idle for 30 ms while its host slept",),
    )
    return Report(
        verdict=Verdict.STRAGGLER,
        job=Job(
            world_size=8,
            steps=15,
            topology={"tp": 2, "cp": 1, "ep": 1, "dp": 2, "pp": 2, "vpp": 1},
            sources=tuple(f"rank{rank:05d}-a0-000.trimtab.arrow" for rank in range(8)),
            device="emulated",
            run_id="demo",
            oversubscribed=2,
        ),
        clock=Clock(aligned=True, error_us=ErrorUs(p50=4.2, max=21.0), anchors=1824),
        matching=Matching(matched=3210, unmatched=0, confidence=1.0),
        step_time_s=StepTime(actual=0.2931, replayed=0.2902, ideal=0.2464),
        slowdown=1.178,
        findings=(finding(), stall),
        what_if=(
            WhatIf("rank 3 as fast as its peers", 0.249, 0.0412),
            WhatIf("no host stalls on rank 5", 0.2871, 0.0031),
        ),
        windows=Windows(pp_send_s=0.0021, dp_reduce_s=None),
        victims=(Victim(1, (3,), 0.038), Victim(2, (3,), 0.036), Victim(7, (3, 5), 0.035)),
        smallest_detectable=1.04,
    )


def healthy() -> Report:
    """Nothing found."""
    return replace(
        straggler(),
        verdict=Verdict.HEALTHY,
        findings=(),
        what_if=(),
        victims=(),
        slowdown=1.003,
        step_time_s=StepTime(0.2471, 0.247, 0.2463),
    )


def inconclusive() -> Report:
    """Two steps of a job with a missing rank; nothing numeric is known."""
    return Report(
        verdict=Verdict.INCONCLUSIVE,
        job=Job(world_size=4, steps=2, topology=None, sources=()),
        clock=Clock(False, ErrorUs(math.nan, math.inf), 0, unconnected=(1,)),
        matching=Matching(0, 12, math.nan),
        step_time_s=StepTime(math.nan, math.nan, math.nan),
        slowdown=math.nan,
        findings=(),
        missing_ranks=(2,),
        dropped_events=17,
        warnings=("no file of rank 2: it is judged by nobody", "only 2 steps were recorded; at least 3 are needed"),
    )


def hostile() -> Report:
    """Every text that a trace can bring holds markup and control characters."""
    bad = finding(host=HOSTILE, ops=(HOSTILE,), evidence=(HOSTILE,))
    report = straggler()
    return replace(
        report,
        job=replace(report.job, sources=(HOSTILE,), run_id=HOSTILE, device=HOSTILE),
        findings=(bad,),
        what_if=(WhatIf(HOSTILE, 0.2, 0.1),),
        warnings=(HOSTILE,),
    )


def plots() -> ReportPlots:
    """Figures of eight ranks and 16 steps, rank 3 slow from step 8 on."""
    random = np.random.default_rng(7)
    heatmap = random.normal(0.0, 0.008, (8, 16))
    heatmap[3, 8:] += 0.5
    heatmap[6, 2] = np.nan
    return ReportPlots(
        heatmap_ranks=tuple(range(8)),
        heatmap_steps=tuple(range(16)),
        heatmap=heatmap,
        timeline=_timeline(),
        timeline_step=11,
        lost_by_rank={rank: 0.0412 if rank == 3 else 0.0031 if rank == 5 else 0.0 for rank in range(8)},
        waited_by_rank={rank: 0.004 if rank == 3 else 0.038 for rank in range(8)},
        clock_error_us_by_rank={rank: 2.0 + 1.7 * rank for rank in range(8)},
        step_time_s={step: 0.247 if step < 8 else 0.293 for step in range(16)},
    )


def _timeline() -> tuple[Segment, ...]:
    segments: list[Segment] = []
    for rank in range(8):
        at = 0.0 if rank < 4 else 0.018
        for microbatch in range(4):
            for category, time in ((Category.FORWARD, 0.008), (Category.BACKWARD, 0.016)):
                for layer in range(2):
                    took = time * (1.5 if rank == 3 else 1.0)
                    label = f"layer {layer}, microbatch {microbatch}"
                    segments.append(Segment(rank, at, at + took, category, label))
                    at += took
                    end = max(at, 0.0008 + at + (0.0 if rank == 3 else time * 0.5))
                    segments.append(Segment(rank, at, end - 0.0008, Category.WAIT, "all_reduce tp"))
                    segments.append(Segment(rank, end - 0.0008, end, Category.TRANSFER, "all_reduce tp"))
                    at = end
        segments.append(Segment(rank, at, at + 0.003, Category.GAP))
        segments.append(Segment(rank, at + 0.003, at + 0.013, Category.OPTIMIZER, "optimizer step"))
    return tuple(segments)
