"""What several commands share: options, exit codes, and how they read their input."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab import config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.traces.table import Trace

EXIT_USAGE: Final = 2
EXIT_FOUND: Final = 3
EXIT_INTERRUPTED: Final = 130

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration, a TOML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; wins over the file. Can be repeated."),
]
RunId = Annotated[
    str | None, typer.Option("--run", metavar="ID", help="Of several runs, this one. Default: the newest.")
]
Attempt = Annotated[
    int | None, typer.Option(metavar="N", help="Of a run that was started again, this attempt. Default: the last.")
]


class FailOn(StrEnum):
    """What makes a scan exit with 3."""

    FINDING = "finding"


def working(what: str) -> AbstractContextManager[object]:
    """Tell on a terminal what takes a while; nothing is left of it afterwards."""
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(what))


def configuration(file: Path | None, settings: list[str] | None) -> config.Config:
    """From the file, the environment and ``--set``; ValueError, a line for each thing that is wrong."""
    return config.load(file, os.environ, settings or ()).strict()


def read(paths: Sequence[Path], run_id: str | None, attempt: int | None) -> Trace:
    """The recorded run of these files."""
    from trimtab.traces.read import read as read_trace

    return read_trace(*paths, run_id=run_id, attempt=attempt)
