"""``trimtab scan`` and ``trimtab convert``: what can be done with a recorded job."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.options import (
    EXIT_FOUND,
    Attempt,
    ConfigFile,
    FailOn,
    RunId,
    Settings,
    configuration,
    read,
    working,
)
from trimtab.output import STDOUT, console, talk, write_text

if TYPE_CHECKING:
    from trimtab.traces.table import Trace


class EngineName(StrEnum):
    """Where the files of a large run are read."""

    LOCAL = "local"
    RAY = "ray"


def scan(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directory of a run's files, or one file; one a node, too.")
    ],
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as JSON (-: to stdout).")] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write the report as one HTML page.")] = None,
    perfetto: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result in the (first) DIR, where trimtab scope shows it.")
    ] = False,
    run_id: RunId = None,
    attempt: Attempt = None,
    summaries: Annotated[
        bool, typer.Option("--summaries", help="Step times of the whole run, from summaries.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHANGE",
            help='The step time that would be: "fix rank 3", "fix stage 1", "link 0-1 at 50 GB/s"; several with '
            '"and", or the option again.',
        ),
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="Where the files of a large run are read.")] = EngineName.LOCAL,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster. Default: RAY_ADDRESS, or that of this machine.")
    ] = None,
    fail_on: Annotated[FailOn | None, typer.Option(help="Exit with 3 if something was found.")] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> int:
    """Find what slows a recorded job, why, and what it costs."""
    settled = configuration(config_file, settings)
    from trimtab.scan import analyze
    from trimtab.scan.fold import engines
    from trimtab.scan.fold.load import load
    from trimtab.scan.report import keeping, schema, terminal
    from trimtab.scan.report.html import render as html_page
    from trimtab.scan.whatif import parse

    questions = [parse(text) for text in what_if or ()]
    if summaries:
        _only_shown(json=json, html=html, perfetto=perfetto, save=save, what_if=what_if)
        with working(f"reading {directories[0]}"):
            trace = read(directories, run_id, attempt)
        _show_history(trace)
        return 0
    if save:
        keeping.check(directories[0])
    with working(f"reading {directories[0]}"):
        reader = engines.Ray(ray_address) if engine is EngineName.RAY else engines.Local()
        trace, folded = load(directories, settled.scan, questions, run_id=run_id, attempt=attempt, engine=reader)
    try:
        with working(f"scanning {len(trace.events):,} events of {len(trace.ranks)} ranks"):
            analysis = analyze(trace, settled.scan, questions, folded)
    except ValueError:  # no report: what is wrong with the files may be why
        for warning in trace.warnings:
            talk(f"trimtab: {warning}")
        raise
    report = analysis.report
    if json is not None:
        write_text(json, schema.to_json(report))
    if html is not None:
        write_text(html, html_page(report, analysis.plots))
    if perfetto is not None:
        from trimtab.traces.perfetto import write_perfetto

        write_perfetto(trace, perfetto)
    if save:
        keeping.keep(directories[0], report, analysis.plots)
    if STDOUT not in (json, html):
        terminal.render(report, console())
    return EXIT_FOUND if fail_on is FailOn.FINDING and report.findings else 0


def convert(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run's files, or one file.")],
    target: Annotated[Path, typer.Argument(metavar="FILE", help="Its ending says in which format it is written.")],
    steps: Annotated[
        str | None, typer.Option(metavar="FIRST-LAST", help="Steps to write. Viewers get the slowest ones by default.")
    ] = None,
    run_id: RunId = None,
    attempt: Attempt = None,
) -> None:
    """Write a recorded job for other programs: .perfetto-trace, .json (Chrome, also .json.gz) or .parquet."""
    from trimtab.traces import convert as conversion

    chosen = _step_range(steps) if steps else None
    conversion.writer_for(target)
    trace = read([source], run_id, attempt)
    written = conversion.write(trace, target, chosen)
    which = "all steps" if written.steps is None else f"steps {written.steps[0]} to {written.steps[1]}"
    talk(f"{target}: {written.events} events, {which}")


def _only_shown(**wanted: object) -> None:
    """Step times from summaries are no report, so nothing can be made of them but the lines that are shown."""
    for name, value in wanted.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} takes a scan's report, and --summaries shows step times alone: leave one out")


def _step_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True)):
        raise ValueError(f"--steps {text!r}: expected a step or FIRST-LAST, for example 5-8")
    return int(first), int(last or first)


def _show_history(trace: Trace) -> None:
    """Step times as the summaries have them."""
    from trimtab.scan.history import history
    from trimtab.traces.summaries import read_summaries

    if not trace.summaries:
        raise ValueError("no summaries here: a recorder begins to write them after a minute")
    found = read_summaries(trace.summaries)
    for warning in (*trace.warnings, *found.warnings):
        talk(f"trimtab: {warning}")
    for line in history(found).lines():
        typer.echo(line)
