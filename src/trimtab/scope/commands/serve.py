"""``trimtab scope serve``, and the options that it shares with ``open``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.scope.commands.common import ConfigFile, Settings

if TYPE_CHECKING:
    from trimtab.scope.server.serve import Options

Directories = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN_DIR [RECORDINGS...]",
        help="Directory into which a job records, running or not; and others whose recordings are shown beside it.",
    ),
]
Bind = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Where to listen; this host only by default, port 0: any.")
]
AllowPerturb = Annotated[bool, typer.Option("--allow-perturb", help="Who shows the control token may disturb the job.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A name by which browsers reach this server. Can be repeated."),
]
Live = Annotated[bool, typer.Option("--live/--no-live", help="Join the job that records into RUN_DIR.")]
Record = Annotated[
    bool, typer.Option("--record/--no-record", help="Record what a running job sends, into RUN_DIR/scope.")
]
Watch = Annotated[
    bool, typer.Option("--watch/--no-watch", help="Watch the ranks of a running job, as trimtab watch does.")
]
IdleMinutes = Annotated[
    float, typer.Option(metavar="MINUTES", help="End when nobody has looked for so long; 0: never.")
]
ANY_PORT: Final = "127.0.0.1:0"


def serve(
    directories: Directories,
    bind: Bind = ANY_PORT,
    allow_perturb: AllowPerturb = False,
    allow_host: AllowHost = None,
    live: Live = True,
    record: Record = True,
    watch: Watch = True,
    link_hours: Annotated[float, typer.Option(metavar="HOURS", help="For which the link is good.")] = 168.0,
    idle_minutes: IdleMinutes = 0.0,
    parent_pipe: Annotated[
        bool, typer.Option("--parent-pipe", help="End when the standard input is closed, with the process behind it.")
    ] = False,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Serve a browser and programs: what a job sends and what was recorded of it. Prints the link to open."""
    from trimtab.scope.server.serve import Options

    options = Options(
        tuple(directories),
        bind,
        allow_perturb,
        tuple(allow_host or ()),
        live=live,
        record=record,
        watch=watch,
        parent_pipe=parent_pipe,
        link_hours=link_hours,
        idle_minutes=idle_minutes,
    )
    run(options, config_file, settings)


def run(
    options: Options,
    config_file: Path | None,
    settings: Sequence[str] | None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve, with the configuration that the command line says."""
    from trimtab import config
    from trimtab.output import talk
    from trimtab.scope.server.serve import serve as serve_runs

    settled = config.load(config_file, os.environ, settings or ()).strict()
    serve_runs(options, settled.control, os.environ, talk, ready)
