"""``trimtab run``, ``window`` and ``watch``: a job that is to run, or that runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import EXIT_FOUND, ConfigFile, FailOn, Settings, configuration
from trimtab.output import STDOUT, console, talk, write_text


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT ...", help="The script, and all its arguments.")],
    config_file: ConfigFile = None,
    settings: Settings = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
) -> Callable[[], None]:
    """Run a training script with trimtab attached (under torchrun: torchrun ... -m trimtab run SCRIPT ...)."""
    from trimtab import launch

    if not module and not Path(script).is_file():
        raise ValueError(f"{script}: no such file; give a script to run, or -m and the name of a module")
    arguments = list(context.args)
    return lambda: launch.run(script, arguments, module=module, config=config_file, settings=tuple(settings or ()))


def window(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory into which the job records.")],
    steps: Annotated[int, typer.Option(help="Steps of the window.")] = 3,
    ranks: Annotated[str, typer.Option(metavar="RANKS", help="Ranks that open it: 0, or 0,8-15, or all.")] = "0",
    after: Annotated[
        float, typer.Option(metavar="SECONDS", help="Until it opens: all ranks must have seen the request by then.")
    ] = 15.0,
) -> None:
    """Ask the ranks of a running job for a window of torch.profiler; see [record.window] for planned ones."""
    import time

    from trimtab.events import FILE_SUFFIX
    from trimtab.record.windows.window_files import Request, write_request

    if not any(directory.glob(f"rank*{FILE_SUFFIX}")):
        raise ValueError(f"{directory}: no rank records here; give record.dir of the job, on each node if it is local")
    now = time.time_ns()
    request = Request(now, now + int(max(after, 0.0) * 1e9), steps, ranks)
    talk(f"{write_request(directory, request)}: {steps} steps of rank {ranks}, from the first in {after:g} s on")


def watch(
    target: Annotated[
        str | None, typer.Argument(metavar="DIR|ADDRESS", help="Directory into which the job records, or its hub.")
    ] = None,
    prometheus: Annotated[
        str, typer.Option(metavar="[HOST:]PORT", help="Serve metrics there; without HOST on this host only.")
    ] = "",
    grafana: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a dashboard for these metrics (-: to stdout), and end.")
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Between pictures, or lines.")] = 0.0,
    json: Annotated[str | None, typer.Option(metavar="-", help="Write lines of JSON to stdout.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Show how it stands once that is known, and end.")] = False,
    window: Annotated[
        bool, typer.Option("--window/--no-window", help="An alarm opens a profiler window on suspect and peers.")
    ] = True,
    patience: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Without progress until the job is said to hang.")
    ] = None,
    fail_on: Annotated[FailOn | None, typer.Option(help="Exit with 3 if something was found.")] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> int:
    """Watch a running job: who is slow, since when, what it costs; and who is missing when it hangs."""
    if grafana is not None:
        import json as encoder

        from trimtab.watch.grafana import dashboard

        write_text(grafana, encoder.dumps(dashboard(), indent=2) + "\n")
        return 0
    if target is None:
        raise ValueError("give record.dir of the job, or host:port of a hub (see trimtab watch --help)")
    if json not in (None, STDOUT):
        raise ValueError(f"--json {json}: lines are written as they come, so give - and redirect stdout")
    settled = configuration(config_file, settings)
    from trimtab.watch.command import Options
    from trimtab.watch.command import watch as watch_job

    options = Options(
        target, prometheus, max(every, 0.0), json=json is not None, once=once, window=window, patience=patience
    )
    found = watch_job(options, settled, os.environ, console(), talk)
    return EXIT_FOUND if fail_on is FailOn.FINDING and found else 0
