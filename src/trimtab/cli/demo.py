"""``trimtab demo``: the main job on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.recorded import scan
from trimtab.output import talk


def demo(
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="KIND:KEY=VALUE,...", help="Fault to inject, or none. Default: a rank computes 1.5x slower."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps; the fault begins in the middle.")] = 20,
    layout: Annotated[str | None, typer.Option(metavar="TP2,PP2,DP2", help="Parallel layout.")] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to train on.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything is written.")] = Path("trimtab-demo"),
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open a browser at the end, and serve it until Ctrl-C.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Leave a server for the browser, which ends when nobody looks.")
    ] = True,
) -> int:
    """Train a small GPT on this machine, slow one rank, and let scan find it."""
    from trimtab import demo as demonstration
    from trimtab import demo_scope

    options = demonstration.Options(out=out, fault=fault, steps=steps, data=data, layout=layout)
    demonstration.check_installed()
    if open_browser:
        demo_scope.check_installed()
    planned = demonstration.plan(options, demonstration.count_gpus(), os.environ)
    demonstration.prepare(out)
    for line in demonstration.introduction(planned):
        talk(line)
    with demo_scope.recording(out / "run", steps, planned.environment, talk):
        demonstration.train(planned, out, talk)
    talk("Scanning what the ranks recorded.")
    html, perfetto = out / "report.html", out / "trace.perfetto-trace"
    scan([out / "run"], json=str(out / "report.json"), html=str(html), perfetto=perfetto, save=True)
    talk(f"\nThe report: {html}\nThe trace: {perfetto} (open it in https://ui.perfetto.dev)")
    if open_browser:
        demo_scope.show(out / "run")
    elif page:
        talk(demo_scope.leave_open(out / "run", out / demo_scope.LOG))
    return 0
