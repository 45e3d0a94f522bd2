"""What the commands share: options, the way into a job, numbers as text."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from trimtab.output import STDOUT, talk
from trimtab.signals import ended_by_signal

if TYPE_CHECKING:
    from trimtab.scope.collector.collector import Collector

RunDirectory = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory into which the job records.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration, a TOML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; wins over the file. Can be repeated."),
]
Json = Annotated[str | None, typer.Option(metavar="-", help="Write JSON to stdout instead of text.")]
Wait = Annotated[float, typer.Option(metavar="SECONDS", help="For the ranks of the job, at most.")]
WAIT_SECONDS: Final = 15.0
_PATIENCE_SECONDS: Final = 2.0
_ENDED: Final = "the job has ended; trimtab scope show reads what was recorded of it"


@contextlib.contextmanager
def opened(
    run_directory: Path, config_file: Path | None, settings: Sequence[str] | None, wait: float = WAIT_SECONDS
) -> Generator[Collector, None, None]:
    """The collector of the job, once its ranks have been heard of. ValueError, in one line, where there is no job."""
    from trimtab import config
    from trimtab.control.endpoint import Complaints
    from trimtab.scope.collector.opening import open_scope

    settled = config.load(config_file, os.environ, settings or ()).strict()
    complaints = Complaints(lambda text: talk(f"trimtab: {text}"))
    with ended_by_signal(), open_scope(run_directory, settled.control, os.environ, complaints=complaints) as scope:
        _await_ranks(scope, run_directory, wait)
        yield scope


def _await_ranks(scope: Collector, run_directory: Path, wait: float) -> None:
    from trimtab.scope.collector.ending import has_ended

    first = min(_PATIENCE_SECONDS, wait)
    if not scope.wait(lambda ranks: ranks.showing, first) and wait > first:
        # Whoever waits for longer than usual waits for another job to begin there.
        if wait <= WAIT_SECONDS and scope.ranks.state == "waiting" and has_ended(run_directory):
            raise ValueError(f"{run_directory}: {_ENDED}")
        talk(f"waiting for ranks of the job in {run_directory}")
        scope.wait(lambda ranks: ranks.showing, wait - first)
    ranks = scope.ranks
    if ranks.state == "waiting":
        raise ValueError(
            f"{run_directory}: no rank of a job has answered within {wait:g} s; is it running, with trimtab attached, "
            "and is this its record.dir?"
        )
    if ranks.state == "ended":
        raise ValueError(f"{run_directory}: {_ENDED}")
    if ranks.missing:
        shown = ", ".join(map(str, ranks.missing[:16]))
        talk(f"trimtab: {len(ranks.missing)} of {ranks.world_size} ranks have not answered: {shown}")


def at_least_one(for_many: int | None, what: str) -> None:
    """ValueError where ``--for`` asks for less."""
    if for_many is not None and for_many < 1:
        raise ValueError(f"--for {for_many}: at least 1 {what}")


def wants_json(json: str | None) -> bool:
    """ValueError for anything but ``-``."""
    if json not in (None, STDOUT):
        raise ValueError(f"--json {json}: it is written as it comes, so give - and redirect stdout")
    return json is not None


def say(text: str) -> None:
    """A line of the result; what others wrote in it does nothing to the terminal."""
    clean = "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.echo(clean.encode(encoding, "replace").decode(encoding))


def say_json(value: Any) -> None:
    """A line of JSON; what is no number there is null."""
    import json

    typer.echo(json.dumps(finite(value), separators=(",", ":"), allow_nan=False))


def finite(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in cast("list[Any]", value)]
    return value


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of columns two spaces apart, numbers to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = [
        column > 0 and all(_is_number(line[column]) for line in lines[1:]) and len(lines) > 1
        for column in range(len(head))
    ]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]


def number(value: float | int | None) -> str:
    """Four digits of it, and no more than nine characters."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}"


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,8``."""
    spans: list[list[int]] = []
    for one in sorted(numbers):
        if spans and one == spans[-1][1] + 1:
            spans[-1][1] = one
        else:
            spans.append([one, one])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _is_number(text: str) -> bool:
    return (
        text in ("-", "inf", "-inf", "")
        or text.lstrip("-").replace(".", "", 1).replace("e", "", 1).replace("+", "").replace("-", "").isdecimal()
    )
