"""Every fault in every layout: trained for real on emulated devices, recorded, read back, scanned, and named.

The devices' times leave the arithmetic of ranks that share two cores some air; see attempts.py for machines that have
other things to do. ``make test`` tries each kind of fault in one layout or two, ``make matrix`` everything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from attempts import BUSY, Outcome, held_up, until_right
from harness import run_ranks
from megatron_job import train

import trimtab
from trimtab.record.injection.faults import parse_fault
from trimtab.scan.analysis import analyze
from trimtab.scan.model import Finding, FindingKind, Report
from trimtab.traces.read import read
from trimtab.traces.table import Trace

STEPS = 12
LATE = "steps=6-"
SHARE = 6 / (STEPS - 1)
"""Part of the judged steps (all but the first) in which a fault of the later steps acts."""
SIZE = ("--hidden-size", "16", "--heads", "2", "--seq-length", "16", "--micro-batch-size", "1", "--data", __file__)


@dataclass(frozen=True)
class Layout:
    """A job of few layers and microbatches; ``layer_ms`` is what a layer's forward takes on the device."""

    world: int
    arguments: tuple[str, ...]
    layer_ms: float

    @property
    def emulate(self) -> dict[str, str]:
        times = {"layer_forward_ms": self.layer_ms, "embedding_ms": 2, "output_ms": 2, "optimizer_ms": self.layer_ms}
        return {"enabled": "true"} | {name: str(ms) for name, ms in times.items()}


LAYOUTS = {
    "dp2": Layout(2, ("--num-layers", "2", "--global-batch-size", "6"), 8),
    "tp2": Layout(2, ("--tp", "2", "--num-layers", "2", "--global-batch-size", "3"), 8),
    "pp2": Layout(2, ("--pp", "2", "--num-layers", "2", "--global-batch-size", "4"), 10),
    "pp2_vpp2": Layout(2, ("--pp", "2", "--vpp", "2", "--num-layers", "4", "--global-batch-size", "4"), 7),
    "tp2_pp2_dp2": Layout(8, ("--tp", "2", "--pp", "2", "--num-layers", "2", "--global-batch-size", "8"), 20),
}


@dataclass(frozen=True)
class Named:
    """What the most costly finding has to be."""

    kind: FindingKind
    ranks: tuple[int, ...]
    lost_ms: float
    """A step; within two fifths, as the machine decides how much is hidden behind other work."""
    ratio: float | None = None
    """Within a tenth; None: not looked at."""
    or_kind: FindingKind | None = None
    """As right as ``kind``, where nothing tells them apart."""

    def differences(self, found: Finding) -> list[str]:
        """What is not as it has to be."""
        out: list[str] = []
        if found.kind not in (self.kind, self.or_kind):
            out.append(f"{found.kind} is not {self.kind}")
        if found.ranks != self.ranks:
            out.append(f"ranks {found.ranks} are not {self.ranks}")
        if found.kind == FindingKind.SLOW_LINK and found.link != self.ranks:
            out.append(f"link {found.link} is not {self.ranks}")
        if self.ratio is not None and found.ratio != pytest.approx(self.ratio, rel=0.1):
            out.append(f"ratio {found.ratio} is not {self.ratio}")
        if 1e3 * found.seconds_lost_per_step != pytest.approx(self.lost_ms, rel=0.4):
            out.append(f"{1e3 * found.seconds_lost_per_step:.1f} ms lost a step are not {self.lost_ms:.1f}")
        return out


RANK, STAGE, LINK = FindingKind.SLOW_RANK, FindingKind.SLOW_STAGE, FindingKind.SLOW_LINK
UNEVEN, STALL = FindingKind.WORKLOAD_IMBALANCE, FindingKind.HOST_STALL
GARBAGE, DATA = FindingKind.GARBAGE_COLLECTION, FindingKind.DATA_LOADING

CASES: dict[str, dict[str, Named | None]] = {
    "dp2": {
        "none": None,
        f"slow_compute:rank=1,factor=1.5,{LATE}": Named(RANK, (1,), 51, ratio=1.5),
        "long_sequence:dp=1,factor=2,every=3": Named(UNEVEN, (1,), 28, ratio=2),
        f"slow_link:ranks=0+1,ms=30,{LATE}": Named(LINK, (0, 1), 60 * SHARE),
        f"host_stall:rank=1,ms=40,{LATE}": Named(STALL, (1,), 40 * SHARE),
        f"gc_pause:rank=1,ms=40,{LATE}": Named(GARBAGE, (1,), 40 * SHARE),
        # Of the three reads of a step only the first finds the device without work.
        f"slow_data:rank=1,ms=40,{LATE}": Named(DATA, (1,), 40 * SHARE),
        "hidden_stall:rank=1,ms=6": None,
    },
    "tp2": {
        "none": None,
        f"slow_compute:rank=1,factor=1.5,{LATE}": Named(RANK, (1,), 50, ratio=1.5),
        # Both ranks work on every microbatch and wait for nobody: were they even, a step would take as long.
        "long_sequence:dp=0,factor=2,every=3": None,
        f"slow_link:ranks=0+1,ms=5,{LATE}": Named(LINK, (0, 1), 130),
        f"host_stall:rank=1,ms=40,{LATE}": Named(STALL, (1,), 40 * SHARE),
        f"gc_pause:rank=1,ms=40,{LATE}": Named(GARBAGE, (1,), 40 * SHARE),
        f"slow_data:rank=1,ms=30,{LATE}": Named(DATA, (1,), 75 * SHARE),
        "hidden_stall:rank=1,ms=6": None,
    },
    "pp2": {
        "none": None,
        f"slow_compute:rank=1,factor=1.5,{LATE}": Named(RANK, (1,), 40, or_kind=STAGE),
        "slow_stage:stage=1,factor=1.5": Named(STAGE, (1,), 72, or_kind=RANK),
        "long_sequence:dp=0,factor=2,every=3": Named(UNEVEN, (0, 1), 48, ratio=2),
        f"slow_link:ranks=0+1,ms=10,{LATE}": Named(LINK, (0, 1), 34),
        f"host_stall:rank=1,ms=40,{LATE}": Named(STALL, (1,), 40 * SHARE),
        f"gc_pause:rank=1,ms=40,{LATE}": Named(GARBAGE, (1,), 40 * SHARE),
        f"slow_data:rank=1,ms=15,{LATE}": Named(DATA, (1,), 60 * SHARE),
        "hidden_stall:rank=1,ms=6": None,
    },
    "pp2_vpp2": {
        "none": None,
        f"slow_compute:rank=0,factor=1.5,{LATE}": Named(RANK, (0,), 38, or_kind=STAGE),
        "slow_stage:stage=1,factor=1.5": Named(STAGE, (1,), 89, or_kind=RANK),
        "long_sequence:dp=0,factor=2,every=3": Named(UNEVEN, (0, 1), 25, ratio=2),
        f"slow_link:ranks=0+1,ms=10,{LATE}": Named(LINK, (0, 1), 36),
        f"host_stall:rank=1,ms=40,{LATE}": Named(STALL, (1,), 40 * SHARE),
        f"gc_pause:rank=1,ms=40,{LATE}": Named(GARBAGE, (1,), 40 * SHARE),
        f"slow_data:rank=0,ms=15,{LATE}": Named(DATA, (0,), 82 * SHARE),
        "hidden_stall:rank=1,ms=6": None,
    },
    "tp2_pp2_dp2": {
        "none": None,
        f"slow_compute:rank=5,factor=1.5,{LATE}": Named(RANK, (5,), 64, ratio=1.5),
        "slow_stage:stage=1,factor=1.5": Named(STAGE, (4, 5, 6, 7), 130, ratio=1.5),
        "long_sequence:dp=1,factor=2,every=3": Named(UNEVEN, (2, 3, 6, 7), 160, ratio=2),
        f"slow_link:ranks=0+4,ms=20,{LATE}": Named(LINK, (0, 4), 50),
        f"slow_link:ranks=2+3,ms=10,{LATE}": Named(LINK, (2, 3), 75),
        f"host_stall:rank=5,ms=80,{LATE}": Named(STALL, (5,), 80 * SHARE),
        f"gc_pause:rank=5,ms=80,{LATE}": Named(GARBAGE, (5,), 80 * SHARE),
        f"slow_data:rank=5,ms=40,{LATE}": Named(DATA, (5,), 160 * SHARE),
        "hidden_stall:rank=5,ms=10": None,
    },
}
"""By layout, then by fault: what is found; None: nothing."""


EVERYDAY = (
    ("pp2", "none"),
    ("dp2", f"slow_compute:rank=1,factor=1.5,{LATE}"),
    ("pp2_vpp2", "slow_stage:stage=1,factor=1.5"),
    ("pp2", "long_sequence:dp=0,factor=2,every=3"),
    ("tp2_pp2_dp2", f"slow_link:ranks=0+4,ms=20,{LATE}"),
    ("tp2", f"host_stall:rank=1,ms=40,{LATE}"),
    ("dp2", f"gc_pause:rank=1,ms=40,{LATE}"),
    ("pp2", f"slow_data:rank=1,ms=15,{LATE}"),
    ("pp2_vpp2", "hidden_stall:rank=1,ms=6"),
)
"""What ``make test`` tries."""


def _job(rank: int, folder: str, emulate: dict[str, str], faults: list[str], arguments: list[str]) -> tuple[float, int]:
    """Train; returns the part of the time in which this rank waited for a core, and what is left of a hidden stall."""
    held, began = held_up(), time.perf_counter()
    with trimtab.attach(record={"dir": folder, "run_id": "m"}, emulate=emulate, faults={"inject": faults}) as session:
        train(*arguments, steps=STEPS)
        left = session._injection._hidden_left if session._injection is not None else 0
    return (held_up() - held) / (time.perf_counter() - began), left


def _differences(trace: Trace, report: Report, fault: str, named: Named | None, busy: float) -> list[str]:
    """What is not as it has to be."""
    out = [f"warning: {warning}" for warning in report.warnings]
    parsed = parse_fault(fault)
    assert trace.topology is not None
    told = {rank for rank, info in trace.ranks.items() if info.faults}
    acts = {rank for rank in trace.ranks if parsed and parsed.concerns(rank, trace.topology.coordinates(rank))}
    if told != acts:
        out.append(f"the files name ranks {told} as faulty, not {acts}")
    if named is None:
        verdicts = ("healthy", "inconclusive") if busy > BUSY else ("healthy",)  # noise may hide small faults
        out += [f"{found.kind} of ranks {found.ranks} was found" for found in report.findings]
    else:
        verdicts = ("imbalance",) if {found.kind for found in report.findings} <= {STAGE, UNEVEN} else ("straggler",)
        out += named.differences(report.findings[0]) if report.findings else ["nothing was found"]
    if report.verdict not in verdicts:
        out.append(f"the verdict is {report.verdict}")
    return out


def _cases() -> list[Any]:
    return [
        pytest.param(name, fault, id=f"{name}-{fault}", marks=() if (name, fault) in EVERYDAY else pytest.mark.slow)
        for name, faults in CASES.items()
        for fault in faults
    ]


@pytest.mark.alone
@pytest.mark.timeout(600)  # several attempts
@pytest.mark.parametrize(("name", "fault"), _cases())
def test_the_fault_is_the_most_costly_finding(tmp_path: Path, name: str, fault: str) -> None:
    layout, faults = LAYOUTS[name], [] if fault == "none" else [fault]

    def attempt(number: int) -> Outcome:
        folder = tmp_path / str(number)
        arguments = [*SIZE, *layout.arguments]
        ranks = run_ranks(layout.world, _job, str(folder), layout.emulate, faults, arguments, allow_warnings=True)
        if any(left for _, left in ranks):
            return Outcome(["the device had too little queued for the whole stall to hide"], busy=1)
        busy = max(busy for busy, _ in ranks)
        trace = read(folder)
        report = analyze(trace).report
        assert (report.job.device, report.job.steps) == ("emulated", STEPS - 1)
        wrong = _differences(trace, report, fault, CASES[name][fault], busy)
        return Outcome(wrong + [f"{f.kind} {f.ranks} {f.evidence}" for f in report.findings if wrong], busy)

    until_right(attempt)


def test_every_kind_of_fault_and_every_layout_is_tried_every_day() -> None:
    everyday, every = set(EVERYDAY), {(name, fault) for name in CASES for fault in CASES[name]}
    assert everyday < every
    assert {name for name, _ in everyday} == set(CASES)
    assert {fault.partition(":")[0] for _, fault in everyday} == {fault.partition(":")[0] for _, fault in every}
