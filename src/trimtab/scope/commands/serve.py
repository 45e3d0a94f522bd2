"""``trimtab scope serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def serve(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR [RECORDINGS...]",
            help="Directory into which a job records, running or not; and others whose recordings are shown beside it.",
        ),
    ],
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; this host only by default, port 0: any.")
    ] = "127.0.0.1:0",
    allow_perturb: Annotated[
        bool, typer.Option("--allow-perturb", help="Who shows the control token may disturb the job.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name by which browsers reach this server. Can be repeated."),
    ] = None,
    live: Annotated[bool, typer.Option("--live/--no-live", help="Join the job that records into RUN_DIR.")] = True,
    record: Annotated[
        bool, typer.Option("--record/--no-record", help="Record what a running job sends, into RUN_DIR/scope.")
    ] = True,
    watch: Annotated[
        bool, typer.Option("--watch/--no-watch", help="Watch the ranks of a running job, as trimtab watch does.")
    ] = True,
    link_hours: Annotated[float, typer.Option(metavar="HOURS", help="For which the link is good.")] = 168.0,
    parent_pipe: Annotated[
        bool, typer.Option("--parent-pipe", help="End when the standard input is closed, with the process behind it.")
    ] = False,
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration, a TOML file.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; wins over the file.")
    ] = None,
) -> None:
    """Serve a browser and programs: what a job sends and what was recorded of it. Prints the link to open."""
    from trimtab import config
    from trimtab.output import talk
    from trimtab.scope.server.serve import Options
    from trimtab.scope.server.serve import serve as serve_runs

    settled = config.load(config_file, os.environ, settings or ()).strict()
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
    )
    serve_runs(options, settled.control, os.environ, talk)
