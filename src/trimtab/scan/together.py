"""Match, align, and match again: which events are one communication, on clocks that are brought together by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimtab.scan.align import Alignment, align
from trimtab.scan.jumps import align_with_jumps
from trimtab.scan.match import Matches, match, match_again
from trimtab.scan.table import Table
from trimtab.traces.table import Trace

LARGE_ERROR_NS = 1e6
"""Where clocks are said to be aligned and are off by more than this, that is said."""


def bring_together(trace: Trace, table: Table, clocks: Sequence[str]) -> tuple[Table, Matches, Alignment, list[str]]:
    """The table on aligned clocks, its communications, the alignment, warnings. ``clocks`` names that of each rank.

    What order alone does not tell is matched once the clocks are aligned by the rest.
    """
    known = ["aligned"] * len(clocks) if trace.aligned else clocks
    matches = match(table, trace.groups, trace.matching, known)
    table, alignment, warnings = align_with_jumps(table, matches, clocks, trace.aligned)
    table = table.shifted(alignment.offset, alignment.drift)
    again = match_again(table, matches, trace.groups, trace.matching, alignment.comparable())
    if not trace.aligned and not again.equals(matches):
        alignment = align(table, again, clocks)
        table = table.shifted(alignment.offset, alignment.drift)
        again = match_again(table, again, trace.groups, trace.matching, alignment.comparable())
    warnings = [*again.warnings, *warnings, *_doubts(trace, alignment)]
    return table, _within(again, table, alignment), alignment, warnings


def _doubts(trace: Trace, alignment: Alignment) -> list[str]:
    if not trace.aligned or alignment.largest_error_ns <= LARGE_ERROR_NS:
        return []
    apart = f"{alignment.largest_error_ns / 1e6:.1f} ms"
    return [f"the clocks are said to be aligned, but by the ends of collectives some are off by {apart}"]


def _within(matches: Matches, table: Table, alignment: Alignment) -> Matches:
    """Without communications of clocks that nothing brought together: who waited for whom cannot be told."""
    component = alignment.component[table.rank[matches.rows]]
    low, high = np.full(matches.count, len(component)), np.full(matches.count, -1)
    np.minimum.at(low, matches.comm, component)
    np.maximum.at(high, matches.comm, component)
    across = low < high
    if not (across & matches.complete).any():
        return matches
    return replace(matches, complete=matches.complete & ~across, whole=matches.whole & ~across)
