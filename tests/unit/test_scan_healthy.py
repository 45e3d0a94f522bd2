"""Healthy jobs raise nothing, whatever their seed."""

from __future__ import annotations

import pytest
from scan_jobs import TP2_PP2_DP2, report

from trimtab.scan.model import Verdict
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticJob

NOISE = {"low": (0.02, 0.01), "high": (0.06, 0.03)}


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 4))])
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("topology", [TP2_PP2_DP2, Topology(pp=4, dp=2)], ids=["tp2pp2dp2", "pp4dp2"])
def test_healthy_seeds_raise_nothing(topology: Topology, noise: str, block: int) -> None:
    """200 seeds in all: 4 blocks of 12 or 13 for each layout and noise, of which ``make test`` takes the first."""
    operation, rank_step = NOISE[noise]
    seeds = range(block, 50, 4)
    for seed in seeds:
        job = SyntheticJob(topology, op_noise=operation, rank_step_noise=rank_step, seed=seed, ranks_per_host=4)
        got = report(job)
        assert not got.findings, f"seed {seed}: {got.findings}"
        assert got.verdict in (Verdict.HEALTHY, Verdict.INCONCLUSIVE)
        if noise == "low":
            assert got.verdict is Verdict.HEALTHY
