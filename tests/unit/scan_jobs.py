"""Synthetic jobs that several tests of scan share."""

from __future__ import annotations

import polars as pl

from trimtab.scan import Report, analyze
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate
from trimtab.traces.table import Trace

TP2_PP2_DP2 = Topology(tp=2, pp=2, dp=2)


def report(job: SyntheticJob) -> Report:
    """What scan says of a synthetic job."""
    return analyze(generate(job)).report


def faulty(topology: Topology = TP2_PP2_DP2, *faults: SyntheticFault, **settings: object) -> SyntheticJob:
    """A job with faults."""
    return SyntheticJob(topology, faults=faults, **settings)  # pyright: ignore[reportArgumentType]


def edited(trace: Trace, events: pl.DataFrame) -> Trace:
    """The trace with other events."""
    return Trace(
        events=events,
        ranks=trace.ranks,
        world_size=trace.world_size,
        topology=trace.topology,
        groups=trace.groups,
    )
