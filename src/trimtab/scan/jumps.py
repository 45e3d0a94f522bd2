"""Clocks that jump: a host clock that was set while the job ran shifts all later times of its ranks at once.

Drift moves the ends of common collectives apart slowly; a jump does so between one of them and the next. What
one clock saw after that is moved back, and the clocks are aligned as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.scan.align import Alignment, align
from trimtab.scan.arrays import Bools, Floats, Ints
from trimtab.scan.match import Matches
from trimtab.scan.table import Table

NEIGHBOURS = 5
"""Collectives on each side of a possible jump that are compared."""
LEAST_JUMP_NS = 1e6
LEAST_SCALES = 20.0
"""A jump stands out this far from the scatter of the differences between neighbours."""
MOST_JUMPS = 8


@dataclass(frozen=True, slots=True)
class _Jump:
    clock: int
    after: int
    """Last raw time before it, by that clock ..."""
    before: int
    """... and first one after it."""
    size: float


def align_with_jumps(
    table: Table, matches: Matches, clocks: Sequence[str], aligned: bool = False
) -> tuple[Table, Alignment, list[str]]:
    """Align the clocks, taking jumps out first. Returns the table without the jumps, its alignment, warnings."""
    if aligned:
        return table, align(table, matches, clocks, aligned), []
    warnings: list[str] = []
    names = sorted(set(clocks))
    of_rank = np.array([names.index(name) for name in clocks], dtype=np.int64)
    for _ in range(MOST_JUMPS if len(names) > 1 else 0):
        jump = _largest(table, matches, of_rank)
        if jump is None:
            break
        ranks = of_rank == jump.clock
        moment = _moment(table, ranks, jump)
        number = table.steps.numbers[max(0, int((table.steps.begin[ranks][0] < moment).sum()) - 1)]
        table = _moved(table, ranks, moment, round(jump.size))
        warnings.append(
            f"the clock of {names[jump.clock]!r} jumped by {jump.size / 1e6:+.1f} ms in step {number}; "
            "later times were moved back"
        )
    return table, align(table, matches, clocks), warnings


def _largest(table: Table, matches: Matches, of_rank: Ints) -> _Jump | None:
    """The clearest jump: seen by the most collectives' groups of a clock, then the largest."""
    usable = (matches.complete & ~matches.p2p)[matches.comm]
    rows, comm = matches.rows[usable], matches.comm[usable]
    found: dict[int, list[_Jump]] = {}
    for group in np.unique(table.group[rows]):
        mine = table.group[rows] == group
        for jump in _in_group(table, rows[mine], comm[mine], of_rank):
            found.setdefault(jump.clock, []).append(jump)
    if not found:
        return None
    # A jump shows in every group of its own clock, but only in shared ones of another clock.
    jumps = max(found.values(), key=lambda some: (len(some), abs(some[0].size)))
    return max(jumps, key=lambda jump: abs(jump.size))


def _in_group(table: Table, rows: Ints, comm: Ints, of_rank: Ints) -> list[_Jump]:
    clock = of_rank[table.rank[rows]]
    present = np.unique(clock)
    if len(present) < 2:
        return []
    ids = np.unique(comm)
    ends = np.full((len(ids), len(present)), np.nan)
    ends[np.searchsorted(ids, comm), np.searchsorted(present, clock)] = table.end[rows]
    ends = ends[np.isfinite(ends).all(axis=1)]
    ends = ends[np.argsort(ends[:, 0])]
    if len(ends) < 2 * NEIGHBOURS:
        return []
    out: list[_Jump] = []
    for index, name in enumerate(present):
        others = np.median(np.delete(ends, index, axis=1), axis=1)
        at_row, size, scale = _step(ends[:, index] - others)
        if abs(size) > max(LEAST_JUMP_NS, LEAST_SCALES * scale):
            out.append(_Jump(int(name), int(ends[at_row - 1, index]), int(ends[at_row, index]), size))
    return out


def _step(series: Floats) -> tuple[int, float, float]:
    """Where the medians of the neighbours before and after differ most: (first index after, difference, scatter)."""
    middle = np.median(np.lib.stride_tricks.sliding_window_view(series, NEIGHBOURS), axis=1)
    difference = middle[NEIGHBOURS:] - middle[:-NEIGHBOURS]
    steps = np.abs(np.diff(series))
    near = int(np.argmax(np.abs(difference))) + NEIGHBOURS
    window = slice(max(0, near - NEIGHBOURS), near + NEIGHBOURS - 1)
    first_after = window.start + int(np.argmax(steps[window])) + 1
    return first_after, float(difference[near - NEIGHBOURS]), float(np.median(steps))


def _moment(table: Table, ranks: Bools, jump: _Jump) -> int:
    """First time after the jump: behind the largest hole between the recorded times around it."""
    mine = ranks[table.rank]
    times = np.concatenate([table.ready[mine], table.start[mine], table.end[mine]])
    times = np.sort(times[(times >= jump.after) & (times <= jump.before)])
    if jump.size < 0 or len(times) < 2:
        return jump.before
    return int(times[int(np.argmax(np.diff(times))) + 1])


def _moved(table: Table, ranks: Bools, moment: int, jump: int) -> Table:
    """The table with the times of ``ranks`` from ``moment`` on moved back by ``jump``."""

    def move(times: Ints, mine: Bools) -> Ints:
        return np.where(mine & (times >= moment), times - jump, times)

    of_row, of_step = ranks[table.rank], ranks[:, None]
    steps = replace(table.steps, begin=move(table.steps.begin, of_step), end=move(table.steps.end, of_step))
    end = move(table.end, of_row)
    start = np.minimum(move(table.start, of_row), end)
    return replace(table, steps=steps, end=end, start=start, ready=np.minimum(move(table.ready, of_row), end))
