"""Clocks that jump: a host clock that was set while the job ran shifts all later times of its ranks at once.

After the linear fit, the ends of collectives as one clock sees them lie on the others' but for noise. Where the
next few of them lie elsewhere than the last few, the clock jumped; later times are moved back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimtab.scan.align import Alignment, align
from trimtab.scan.arrays import Floats, Ints, medians
from trimtab.scan.match import Matches
from trimtab.scan.table import Table

NEIGHBOURS = 5
"""Anchors on each side of a possible jump that are compared."""
LEAST_JUMP_NS = 1e6
LEAST_SCALES = 20.0
MOST_JUMPS = 8


def align_with_jumps(table: Table, matches: Matches, clocks: Sequence[str]) -> tuple[Table, Alignment, list[str]]:
    """Align the clocks, taking jumps out first. Returns the table without the jumps, its alignment, warnings."""
    warnings: list[str] = []
    alignment = align(table, matches, clocks)
    for _ in range(MOST_JUMPS):
        if len(set(clocks)) < 2:
            break
        found = _largest_jump(table.shifted(alignment.offset, alignment.drift), table, matches, clocks)
        if found is None:
            break
        clock, moment, jump = found
        ranks = np.array([name == clock for name in clocks])
        table = _moved(table, ranks, moment, int(jump))
        step = int(np.searchsorted(table.steps.begin[ranks][0], moment, side="right")) - 1
        number = int(table.steps.numbers[max(0, step)])
        warnings.append(f"the clock of {clock!r} jumped by {jump / 1e6:+.1f} ms in step {number}; it was moved back")
        alignment = align(table, matches, clocks)
    return table, alignment, warnings


def _largest_jump(aligned: Table, raw: Table, matches: Matches, clocks: Sequence[str]) -> tuple[str, int, float] | None:
    """(clock, its raw time, nanoseconds) of the clearest jump, None if no clock jumped."""
    usable = (matches.complete & ~matches.p2p)[matches.comm]
    rows, comm = matches.rows[usable], matches.comm[usable]
    names = sorted(set(clocks))
    clock = np.array([names.index(name) for name in clocks])[aligned.rank[rows]]
    end = aligned.end[rows].astype(np.float64)
    residual = end - medians(comm, end, matches.count)[comm]
    scale = 1.4826 * float(np.median(np.abs(residual))) if len(residual) else 0.0
    best: tuple[str, int, float] | None = None
    for index, name in enumerate(names):
        mine = np.flatnonzero(clock == index)
        mine = mine[np.argsort(end[mine], kind="stable")]
        at, jump = _step(residual[mine])
        if abs(jump) > max(LEAST_JUMP_NS, LEAST_SCALES * scale) and (best is None or abs(jump) > abs(best[2])):
            best = (name, int(raw.end[rows[mine[at]]]), jump)
    return best


def _step(series: Floats) -> tuple[int, float]:
    """Where the medians of the neighbours before and after differ most: (index of the first after, difference)."""
    if len(series) < 2 * NEIGHBOURS:
        return 0, 0.0
    middle = np.median(np.lib.stride_tricks.sliding_window_view(series, NEIGHBOURS), axis=1)
    difference = middle[NEIGHBOURS:] - middle[:-NEIGHBOURS]
    at = int(np.argmax(np.abs(difference)))
    return at + NEIGHBOURS, float(difference[at])


def _moved(table: Table, ranks: np.ndarray, moment: int, jump: int) -> Table:
    """The table with the times of ``ranks`` from ``moment`` on moved back by ``jump``."""

    def move(times: Ints, mine: np.ndarray) -> Ints:
        return np.where(mine & (times >= moment), times - jump, times)

    of_row, of_step = ranks[table.rank], ranks[:, None]
    steps = replace(table.steps, begin=move(table.steps.begin, of_step), end=move(table.steps.end, of_step))
    end = move(table.end, of_row)
    start = np.minimum(move(table.start, of_row), end)
    return replace(table, steps=steps, end=end, start=start, ready=np.minimum(move(table.ready, of_row), end))
