"""``trimtab doctor`` and ``trimtab compile``: the installation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.options import EXIT_USAGE, ConfigFile, Settings
from trimtab.output import STDOUT, console, talk, write_text

if TYPE_CHECKING:
    from trimtab.doctor import Check


def doctor(
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the findings as JSON (-: to stdout).")] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> int:
    """Say what is installed, what trimtab can attach to, and whether a configuration is right (exit 2 if not)."""
    from trimtab import doctor as examination

    diagnosis = examination.examine(config_file, settings or (), os.environ)
    if json is not None:
        import json as encoder

        write_text(json, encoder.dumps(diagnosis.as_dict(), indent=2) + "\n")
    if json != STDOUT:
        _show_checks(diagnosis.checks)
    for problem in diagnosis.problems:
        talk(f"trimtab: {problem.detail}")
    return EXIT_USAGE if diagnosis.problems else 0


def _show_checks(checks: Sequence[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    marks = {"ok": ("ok", "green"), "note": ("-", "yellow"), "problem": ("wrong", "bold red")}
    table = Table.grid(padding=(0, 2))
    section = ""
    for check in checks:
        if check.section != section:
            section = check.section
            table.add_row(Text(section, "bold"))
        word, style = marks[check.state.value]
        table.add_row(Text(f"  {word}", style), Text(check.name), Text(check.detail, overflow="fold"))
    console().print(table)


def compile_kernels() -> None:
    """Compile what intercepts communication (which jobs do in the background else) and what measures tensors on a CPU
    (which PyTorch does else), once for an installation."""
    from trimtab.record.communication import native
    from trimtab.record.compiled import cache_directory
    from trimtab.scope.device.native import build as build_statistics

    build_statistics()
    cache = cache_directory(os.environ)
    if cache is None or not (native.load(cache) or (native.build(cache) and native.load(cache))):
        raise ValueError(
            "the kernels cannot be compiled here; that takes a C++ compiler (c++, g++ or $CXX), Python's headers and a "
            "cache directory to keep them in ($XDG_CACHE_HOME or ~/.cache); without them communication is intercepted "
            "in Python"
        )
    talk(f"compiled for this environment, in {cache}")
