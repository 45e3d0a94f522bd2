"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.scan.model import Finding, Report, Verdict, WhatIf
from trimtab.scan.report import wording
from trimtab.scan.report.wording import clean, percent, seconds, times

_COLOURS: Final = {
    Verdict.HEALTHY: "bold white on green",
    Verdict.STRAGGLER: "bold white on red",
    Verdict.IMBALANCE: "bold black on yellow",
    Verdict.INCONCLUSIVE: "bold white on blue",
}
_MOST_ROWS: Final = 8
"""Victims and fixes shown; the JSON report has all."""


def render(report: Report, console: Console) -> None:
    """Print ``report``; text that comes from traces is shown literally (no markup, no control characters)."""
    banner = Text()
    banner.append(f" {report.verdict.value.upper()} ", _COLOURS[report.verdict])
    banner.append(f" {wording.headline(report)}", "bold")
    _print(console, banner)
    detectable = wording.detectable(report)
    if detectable:
        _print(console, Text(detectable))
    console.print()
    console.print(_facts(report))
    for number, finding in enumerate(report.findings, start=1):
        console.print()
        _finding(number, finding, console)
    _what_if(report, console)
    _victims(report, console)
    _warnings(report, console)


def _print(console: Console, text: Text, indent: int = 0) -> None:
    console.print(Padding(text, (0, 0, 0, indent), expand=False), highlight=False)


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _facts(report: Report) -> Table:
    grid = _grid()
    job, step = report.job, report.step_time_s
    device = {"cpu": "CPU", "cuda": "GPU", "emulated": "emulated devices (compute padded to a set time)"}
    shown = device.get(job.device, clean(job.device))
    ranks = f"{job.world_size} rank{'s' if job.world_size > 1 else ''}"
    grid.add_row("job", Text(f"{ranks} ({wording.layout(job)}), {job.steps} steps judged, {shown}"))
    grid.add_row(
        "step time",
        Text(
            f"{seconds(step.actual)} measured, {seconds(step.replayed)} replayed, {seconds(step.ideal)} ideal; "
            f"slowdown {times(report.slowdown)}"
        ),
    )
    grid.add_row("clocks", Text(wording.clocks(report.clock)))
    matching = report.matching
    grid.add_row(
        "matching",
        Text(
            f"{matching.matched} communications matched{wording.matched(matching)}, {matching.unmatched} not; "
            f"{percent(matching.confidence)} complete and sure"
        ),
    )
    if report.windows.pp_send_s is not None:
        grid.add_row("PP send window", Text(f"{seconds(report.windows.pp_send_s)} on average"))
    if report.windows.dp_reduce_s is not None:
        grid.add_row("DP reduce window", Text(f"{seconds(report.windows.dp_reduce_s)} on average"))
    return grid


def _finding(number: int, finding: Finding, console: Console) -> None:
    head = Text()
    head.append(f"{number}. {wording.title(finding)}", "bold")
    head.append(f"  [{finding.kind.value}]", "dim")
    _print(console, head)
    grid = _grid()
    cost = f"{seconds(finding.seconds_lost_per_step)} a step, {percent(finding.share_of_slowdown)} of what is lost"
    grid.add_row("costs", Text(cost))
    grid.add_row("when", Text(wording.when(finding)))
    if finding.host:
        grid.add_row("host", Text(clean(finding.host)))
    if finding.ops:
        grid.add_row("in", Text(", ".join(clean(op) for op in finding.ops)))
    grid.add_row("sure", Text(wording.sureness(finding.confidence)))
    for index, line in enumerate(finding.evidence):
        grid.add_row("" if index else "evidence", Text(clean(line)))
    console.print(Padding(grid, (0, 0, 0, 3), expand=False))


def _what_if(report: Report, console: Console) -> None:
    asked = [row for row in report.what_if if row.asked]
    _fixes("What would be", asked, console)
    for row in asked:
        if row.detail:
            _print(console, Text(f"{clean(row.fix)}: {clean(row.detail)}", "dim"), 1)
    _fixes("What a fix would give back", [row for row in report.what_if if not row.asked][:_MOST_ROWS], console)


def _fixes(title: str, rows: Sequence[WhatIf], console: Console) -> None:
    if not rows:
        return
    table = Table("change", "step time", "saved a step", title=title, title_justify="left", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(Text(clean(row.fix)), seconds(row.step_time_s), seconds(row.seconds_saved_per_step))
    console.print()
    console.print(table)


def _victims(report: Report, console: Console) -> None:
    if not report.victims:
        return
    console.print()
    _print(console, Text("Waiting for others, and doing nothing wrong", "italic"))
    groups = wording.waiting(report.victims)
    for group in groups[:_MOST_ROWS]:
        who, verb = wording.ranks_named(group.ranks), "wait" if len(group.ranks) > 1 else "waits"
        _print(console, Text(f"{who} {verb} {group.waits} a step for {wording.ranks_named(group.waits_for)}"), 3)
    if len(groups) > _MOST_ROWS:
        left = sum(len(group.ranks) for group in groups[_MOST_ROWS:])
        _print(console, Text(f"and {left} more"), 3)


def _warnings(report: Report, console: Console) -> None:
    lines = wording.cautions(report)
    if lines:
        console.print()
    for line in lines:
        text = Text("warning: ", "yellow")
        text.append(line, "default")
        _print(console, text)
