"""What no span covers: a slower device needs longer for it, and that is no stall of the host."""

from __future__ import annotations

import polars as pl
import pytest
from scan_jobs import edited, faulty

from trimtab.scan import Report, analyze
from trimtab.scan.model import FindingKind
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, generate

Fault = SyntheticFault
DP2 = Topology(dp=2)
SLOW = FindingKind.SLOW_RANK, (1,)


def scanned(*faults: Fault, unrecorded_ms: float, topology: Topology = DP2, seed: int = 0) -> Report:
    """A job on GPUs, hosts ahead, whose output layers run on the device and are not in the trace."""
    job = faulty(
        topology,
        *faults,
        layers=6,
        microbatches=2,
        device="cuda",
        layer_forward_ms=2.5,
        optimizer_ms=6.0,
        output_ms=unrecorded_ms,
        seed=seed,
    )
    trace = generate(job)
    recorded = (pl.col("name").cast(pl.String) != "output").fill_null(True)
    return analyze(edited(trace, trace.events.filter(recorded))).report


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [(0, None), (6, None)], ids=["always", "later"])
@pytest.mark.parametrize(("unrecorded_ms", "factor"), [(0.9, 1.4), (2.0, 1.4), (2.0, 2.0), (4.0, 1.2)])
@pytest.mark.parametrize("topology", [DP2, Topology(pp=2, dp=2)], ids=str)
def test_a_slow_device_is_no_stall_of_its_host(
    topology: Topology, unrecorded_ms: float, factor: float, steps: tuple[int, int | None], seed: int
) -> None:
    fault = Fault("slow_compute", ranks=(1,), factor=factor, steps=steps)
    got = scanned(fault, unrecorded_ms=unrecorded_ms, topology=topology, seed=seed)
    assert [(finding.kind, finding.ranks) for finding in got.findings] == [SLOW]


@pytest.mark.parametrize("unrecorded_ms", [0.0, 0.9, 2.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stall_is_named_beside_a_slow_device(rank: int, unrecorded_ms: float) -> None:
    slow, stall = Fault("slow_compute", ranks=(1,), factor=1.2), Fault("host_stall", ranks=(rank,), ms=25)
    got = scanned(slow, stall, unrecorded_ms=unrecorded_ms)
    named = {(finding.kind, finding.ranks) for finding in got.findings}
    assert named == {SLOW, (FindingKind.HOST_STALL, (rank,))}


def test_it_is_told_what_of_a_stall_goes_with_the_slower_device() -> None:
    slow, stall = Fault("slow_compute", ranks=(1,), factor=1.5), Fault("host_stall", ranks=(1,), ms=25)
    got = scanned(slow, stall, unrecorded_ms=2.0)
    (finding,) = (one for one in got.findings if one.kind is FindingKind.HOST_STALL)
    assert any("go with its slower device" in sentence for sentence in finding.evidence)
