"""``trimtab scope open`` and ``close``: the page of a run in a browser."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from trimtab.output import talk
from trimtab.run_directory import check_directory
from trimtab.scope.commands.common import ConfigFile, RunDirectory, Settings
from trimtab.scope.commands.serve import (
    ANY_PORT,
    AllowHost,
    AllowPerturb,
    Bind,
    Directories,
    IdleMinutes,
    Live,
    Record,
    Watch,
    run,
)

VIEWS: Final = (
    *("ranks", "layers", "histogram", "scan"),
    *("tensors", "attention", "text", "pca"),
    *("compare", "disturb"),
)
"""Of the page, by the names that its address has for them."""


def open_run(
    directories: Directories,
    view: Annotated[str | None, typer.Option(metavar="VIEW", help=f"To begin with: {', '.join(VIEWS)}.")] = None,
    recording: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Recording to show. Default: the newest.")
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="Step to show. Default: the last.")] = None,
    tap: Annotated[str | None, typer.Option(metavar="NAME", help="Tensor to show.")] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser, or print the link only.")
    ] = True,
    bind: Bind = ANY_PORT,
    allow_perturb: AllowPerturb = False,
    allow_host: AllowHost = None,
    live: Live = True,
    record: Record = True,
    watch: Watch = True,
    idle_minutes: IdleMinutes = 0.0,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Open a run in the browser: at its server, if one runs already, else at one that ends with Ctrl-C."""
    from trimtab.scope.collector.ending import has_ended
    from trimtab.scope.server import visiting

    if view is not None and view not in VIEWS:
        raise ValueError(f"--view {view}: there is no such view; one of {', '.join(VIEWS)}")
    wanted = {"view": view, "run": recording, "step": step, "tap": tap}
    query = {name: str(value) for name, value in wanted.items() if value is not None}

    def show(link: str) -> None:
        address = visiting.with_query(link, query)
        typer.echo(address)
        if browser:  # which may take its time to start, and asks for the page then
            threading.Thread(target=visiting.browse, args=(address, os.environ, talk)).start()

    directory = directories[0]
    visiting.check_run(directory)
    server = visiting.running(directory)
    if server is not None:
        if allow_perturb or len(directories) > 1 or bind != ANY_PORT:
            talk(f"trimtab: {server.url} serves {directory} already, with options of its own (process {server.pid})")
        show(server.link)
        return
    from trimtab.scope.server.serve import Options

    if recording is not None:
        _check_recording(directories, recording)
    options = Options(
        tuple(directories),
        bind,
        allow_perturb,
        tuple(allow_host or ()),
        live=live and not has_ended(directory),
        record=record,
        watch=watch,
        idle_minutes=idle_minutes,
    )
    run(options, config_file, settings, show)


def _check_recording(directories: Sequence[Path], name: str) -> None:
    from trimtab.scope.server.answers import Problem
    from trimtab.scope.server.runs import Runs

    try:
        Runs(directories, live=directories[0]).get(name, readable=False)
    except Problem as problem:
        raise ValueError(f"--run {name}: {problem.text}") from None


def close_run(run_directory: RunDirectory) -> None:
    """End the server of a run, whoever started it."""
    from trimtab.scope.server import visiting

    closed = visiting.close(_there(run_directory))
    talk(f"scope: the server of {run_directory} has ended" if closed else f"scope: no server of {run_directory} runs")


def _there(directory: Path) -> Path:
    check_directory(directory, "give record.dir of a job")
    return directory
