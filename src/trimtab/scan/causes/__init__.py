"""The causes of lost time. Each is one function that turns measures into candidates; a new one is added here.

A cause compares like with like: ranks of one pipeline stage do the same work in the same step, so what one of
them takes beyond the median of the others is its own excess, whatever the others wait for. A rank that merely
waits has no excess and never becomes a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trimtab.events import Kind
from trimtab.scan.candidates import Candidate, Context
from trimtab.scan.causes.compute import global_slowdown, slow_rank
from trimtab.scan.causes.host import host_cause
from trimtab.scan.causes.links import slow_link
from trimtab.scan.causes.stage import slow_stage, told_by_clocks
from trimtab.scan.causes.workload import Workload, examine
from trimtab.scan.model import FindingKind

Cause = Callable[[Context, Workload], Sequence[Candidate]]

CAUSES: tuple[Cause, ...] = (
    slow_rank,
    slow_stage,
    slow_link,
    host_cause(FindingKind.DATA_LOADING, Kind.DATA, "data loading"),
    host_cause(FindingKind.GARBAGE_COLLECTION, Kind.GC, "garbage collection"),
    host_cause(FindingKind.HOST_STALL, Kind.HOST, "host time with the device idle"),
    global_slowdown,
)


def find(context: Context) -> list[Candidate]:
    """Candidates of all causes. Uneven microbatches come first, so that the others can leave them out."""
    workload = examine(context)
    found = [candidate for cause in CAUSES for candidate in cause(context, workload)]
    return [*workload.candidates, *told_by_clocks(context, found)]
