"""Synthetic jobs: the trace of a training run that never ran, by causal simulation.

Every time follows from dependencies: a rank waits for what its neighbours send and for the slowest member of
each collective, the host launches ahead of its device, and a fault costs what is not hidden behind something
else. A job of any layout, with noise stated per operation and per rank and step, clocks that disagree, and
faults of known size, tests what scan concludes.

What is simplified: messages between two ranks do not compete for a link; the gradient norm is reduced over all
ranks at the end of each step (as Megatron's distributed optimizer does), so that steps meet at a barrier and
are computed side by side.
"""

from __future__ import annotations

from trimtab.traces.synthetic_job import FaultKind, Link, SyntheticFault, SyntheticJob
from trimtab.traces.synthetic_run import simulate
from trimtab.traces.synthetic_table import build_trace
from trimtab.traces.table import Trace

__all__ = ["FaultKind", "Link", "SyntheticFault", "SyntheticJob", "generate"]


def generate(job: SyntheticJob) -> Trace:
    """The trace of ``job``, as reading its files would give it; equal for equal jobs."""
    return build_trace(job, simulate(job))
