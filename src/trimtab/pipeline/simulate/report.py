"""Results as JSON and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.pipeline.simulate.picture import picture
from trimtab.pipeline.simulate.result import Result
from trimtab.pipeline.simulate.study import Row
from trimtab.pipeline.simulate.words import Units, clean, count, facts, headline

SCHEMA: Final = "trimtab.simulation/1"
_MOST_SWITCHES: Final = 5


def as_json(result: Result, disturbance: str, seed: int, largest_transfer: float | None) -> dict[str, Any]:
    """Everything but the actions. Times are in the unit of the costs, ``c_max`` in units of F, as ``--transfer``."""
    shape = result.plan.shape
    return {
        "schema": SCHEMA,
        "order": result.plan.name,
        "policy": result.policy,
        "stages": shape.stages,
        "chunks": shape.chunks,
        "microbatches": shape.microbatches,
        "placement": shape.placement.value,
        "disturbance": disturbance,
        "seed": seed,
        "cap": result.cap,
        "unit": result.unit,
        **figures(result),
        "c_max": None if largest_transfer is None else _number(largest_transfer / result.unit),
        "idle": list(result.idle),
        "loads": list(result.loads),
        "peak_activation_by_stage": list(result.peak_activation),
        "actions": result.actions,
        "deviations": result.deviations,
        "blocked": list(result.blocked),
        "switches": [
            {"time": s.time, "stage": s.stage, "from": s.before, "to": s.after, "reason": s.reason}
            for s in result.switches
        ],
    }


def figures(result: Result) -> dict[str, Any]:
    """What results are compared by."""
    windows = result.windows
    return {
        "makespan": result.makespan,
        "bound": result.bound,
        "ratio": result.ratio,
        "peak_activation": max(result.peak_activation),
        "windows": {
            "pp": _number(windows.pp),
            "pp_least": _number(windows.pp_least),
            "dp": windows.dp,
            "dp_first": windows.dp_first,
        },
    }


def compared_as_json(rows: Sequence[Row], disturbance: str, seed: int, unit: float) -> dict[str, Any]:
    """Rows of a comparison, the fastest first."""
    return {
        "schema": SCHEMA,
        "disturbance": disturbance,
        "seed": seed,
        "unit": unit,
        "compared": [
            {
                "order": row.order,
                "policy": row.policy,
                "chunks": row.chunks,
                "problem": row.problem or None,
                **({} if row.result is None else figures(row.result) | {"cap": row.result.cap}),
                "c_max": None if row.c_max is None else _number(row.c_max / unit),
            }
            for row in rows
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(result: Result, units: Units, disturbance: str, largest_transfer: float | None, console: Console) -> None:
    """Print the figures and the picture."""
    console.print(Text(headline(result, disturbance), "bold"), highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, said in facts(result, units, largest_transfer):
        grid.add_row(name, Text(said))
    for switch in result.switches[:_MOST_SWITCHES]:
        said = f"stage {switch.stage} at {units.time(switch.time)}: {switch.before} to {switch.after}, {switch.reason}"
        grid.add_row("switch", Text(clean(said)))
    if len(result.switches) > _MOST_SWITCHES:
        grid.add_row("", Text(f"and {count(len(result.switches) - _MOST_SWITCHES, 'switch')} more"))
    console.print(grid)
    console.print()
    console.print(picture(result, units, console))


def show_compared(rows: Sequence[Row], units: Units, console: Console, most: int | None = None) -> None:
    """Print a comparison: what is possible in a table, then why the rest is not."""
    done = [row for row in rows if row.result is not None]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    wide = console.width >= 110
    names = ["order", "policy", "chunks", "makespan", "x bound", "peak", "PP window", "DP window"]
    for name in names if wide else names[:6]:
        table.add_column(name, justify="left" if name in ("order", "policy") else "right", no_wrap=True)
    with_c_max = any(row.c_max is not None for row in rows)
    if with_c_max:
        table.add_column("c_max", justify="right", no_wrap=True)
    for row in done[:most]:
        result = row.result
        assert result is not None
        peak = max(result.peak_activation) / (units.microbatch or 1.0)
        cells = [
            row.order,
            row.policy,
            str(row.chunks),
            units.time(result.makespan),
            f"{result.ratio:.3f}",
            f"{peak:.4g}",
        ]
        if wide:
            cells += [units.time(result.windows.pp), units.time(result.windows.dp)]
        if with_c_max:
            cells.append("-" if row.c_max is None else units.time(row.c_max))
        table.add_row(*(Text(clean(cell)) for cell in cells))
    console.print(table)
    console.print(Text("peak: activations in microbatches of a stage, at most", "dim"))
    problems: dict[str, list[str]] = {}
    for row in rows:
        if row.result is None:
            problems.setdefault(row.problem, []).append(f"{row.order} {row.policy}")
    if problems:
        console.print()
    for problem, whose in problems.items():
        orders = sorted({who.split()[0] for who in whose})
        who = ", ".join(orders) if len(whose) > len(orders) else ", ".join(whose)
        console.print(Text(f"not {who}: {clean(problem)}"), highlight=False)
