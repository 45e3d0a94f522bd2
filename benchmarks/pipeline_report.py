"""What ``benchmarks/pipeline.py`` has measured, as Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pipeline import Row

_T = TypeVar("_T")
STATIC = ("1f1b", "interleaved v2", "zb-v")
OURS = ("hint (zb-v)", "auto (zb-v)", "auto, planned anew")
BLOCKING = "1f1b, blocking sends"
CALM = ("plain", "slow stage x1.5")
"""Where order cannot help: at most 1 % behind the best static order."""
DISTURBED = ("link c=.5", "link c=1", "5 % tail x3", "transient link c=4")
"""Where it has to be ahead."""


def report(rows: Sequence[Row], stages: int) -> str:
    """All tables."""
    if not any(row.seconds for row in rows):
        return "nothing measured"
    parts: list[str] = []
    for microbatches, extra in sorted({(row.microbatches, row.extra) for row in rows}):
        some = [row for row in rows if (row.microbatches, row.extra) == (microbatches, extra)]
        memory = f"dynamic ones hold at most {stages + extra} M_B"
        parts.append(f"P={stages}, m={microbatches}, {memory}: T / largest load (over the simulator)\n")
        parts.append(times(some) + "\n")
    parts.append("Against the goals (medians of the rounds' ratios)\n")
    parts.append(goals(rows) + "\n")
    parts.append(checks(rows))
    return "\n".join(parts)


def times(rows: Sequence[Row]) -> str:
    """A line for each contender."""
    conditions, contenders = _unique(row.condition for row in rows), _unique(row.contender for row in rows)
    found = {(row.contender, row.condition): row for row in rows}
    lines = [_line(["order, policy", *conditions, "peak"]), _line(["---"] * (len(conditions) + 2))]
    for contender in contenders:
        cells = [_cell(found.get((contender, condition))) for condition in conditions]
        peak = max(row.peak for row in rows if row.contender == contender)
        lines.append(_line([contender, *cells, f"{peak:g}"]))
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None or not row.seconds:
        return ""
    ratio = _median(row, row.bound)
    return f"{ratio:.3f} ({100 * (_median(row, row.predicted) - 1):+.1f} %)"


def goals(rows: Sequence[Row]) -> str:
    """How far ours are behind (+) or ahead (-) of the best static order, and how much faster than blocking sends."""
    found = {row.key: row for row in rows}
    header = ["m", "memory", "condition", "best static order"]
    header += [f"{name}: {what}" for name in OURS for what in ("over it", "1f1b blocking over it")]
    lines = [_line([*header, "goal"]), _line(["---"] * (len(header) + 1))]
    for microbatches, extra, condition in _unique((r.microbatches, r.extra, r.condition) for r in rows):
        of = _finder(found, microbatches, condition)
        statics = [row for row in map(of, STATIC) if row]
        ours = [of(name, extra) for name in OURS]
        if not statics or not any(ours):
            continue
        best = min(statics, key=lambda row: statistics.median(row.seconds))
        cells = [str(microbatches), f"+{extra}", condition, best.contender]
        behind: list[float] = []
        for row in ours:
            if row is None:
                cells += ["", ""]
                continue
            behind.append(100 * (_median(row, best.seconds) - 1))
            blocking = of(BLOCKING)
            cells += [f"{behind[-1]:+.1f} %", f"x {1 / _median(row, blocking.seconds):.2f}" if blocking else ""]
        lines.append(_line([*cells, _goal(condition, behind)]))
    return "\n".join(lines)


def _finder(found: dict[str, Row], microbatches: int, condition: str) -> Callable[..., Row | None]:
    def of(contender: str, extra: int = 0) -> Row | None:
        return found.get(f"m={microbatches} cap=+{extra} {condition}: {contender}")

    return of


def _goal(condition: str, behind: Sequence[float]) -> str:
    if condition in CALM:
        return "at most +1 %: " + ("met" if max(behind) <= 1.0 else "missed")
    if condition in DISTURBED:
        return "below 0: " + ("met" if max(behind) < 0.0 else "missed")
    return ""


def checks(rows: Sequence[Row]) -> str:
    """Whether the figures can be trusted, and what a decision costs."""
    measured = [row for row in rows if row.seconds]
    off = {row.key: 100 * (_median(row, row.predicted) - 1) for row in measured}
    worst = max(off, key=lambda key: abs(off[key]))
    within = sum(abs(one) <= 5 for one in off.values())
    over = [row.key for row in measured if row.cap is not None and row.peak > row.cap * (1 + 1e-9)]
    overhead = [one for row in measured for one in row.overhead]
    late = 100 * max(row.late for row in measured)
    return "\n".join(
        [
            f"- within 5 % of the simulator: {within} of {len(off)}; median {statistics.median(off.values()):+.1f} %, "
            f"furthest {off[worst]:+.1f} % ({worst})",
            f"- peak over the cap: {', '.join(over) or 'none'}",
            f"- emulated actions took longer than they should by at most {late:.1f} % of an iteration",
            f"- beside its own work an action costs {1e6 * statistics.median(overhead):.0f} us (median of iterations)",
        ]
    )


def _median(row: Row, against: Sequence[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(row.seconds, against, strict=False))


def _unique(values: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(values))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
