"""``show``: what was recorded, without the job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trimtab.output import talk
from trimtab.scope.commands.common import Json, number, say, say_json, table, wants_json

if TYPE_CHECKING:
    from trimtab.scope.recording.reader import Recording
    from trimtab.scope.recording.series import Series

_COLUMNS: Final = ("mean", "std", "rms", "absmax", "min", "max", "nan", "inf")
_MOST_LINES: Final = 40


def show(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="RUN_DIR, or a file *.ttscope in it.")],
    tap: Annotated[str | None, typer.Option(metavar="PATTERN", help="Show these. Default: list what there is.")] = None,
    what: Annotated[str | None, typer.Option(help="Of several kinds, this one.")] = None,
    name: Annotated[
        str | None, typer.Option("--recording", metavar="NAME", help="Of several. Default: the last.")
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only of this one; of a paired run: d-1a2b.clean, d-1a2b.disturbed."),
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="FIRST-LAST", help="Only these.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All steps, however many.")] = False,
    notices: Annotated[bool, typer.Option("--notices", help="What was said, too.")] = False,
    json: Json = None,
    npz: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all arrays to it, for numpy.")] = None,
) -> None:
    """Show a recording: what is in it, or statistics and arrays of chosen taps. The job may be over."""
    from trimtab.scope.recording.reader import FOREVER, open_recording, open_recordings
    from trimtab.scope.subscription import step_range

    as_json = wants_json(json)
    first, last = step_range(steps) if steps is not None else (-1, None)
    until = FOREVER if last is None else last
    found = open_recording(recording, name)
    cut = [f"{path}: ends in the middle of a record: its writer has died, or is at it" for path in found.cut]
    for warning in (*found.warnings, *cut):
        talk(f"trimtab: {warning}")
    if tap is None:
        _list(open_recordings(recording) if recording.is_dir() and name is None else [found], as_json=as_json)
    else:
        _show(found, tap, what, first, until, subscription, every=every, as_json=as_json, npz=npz)
    if notices:
        for said in found.notices(first, until):
            if as_json:
                say_json({"event": "notice", **said})
            else:
                say(f"step {said.get('step')}: {said.get('kind')}: {said.get('text')}")


def _list(recordings: Sequence[Recording], *, as_json: bool) -> None:
    for recording in recordings:
        span = recording.span
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recording.unix_ns / 1e9))
        if as_json:
            say_json(
                {
                    "recording": recording.name,
                    "label": recording.label,
                    "unix_ns": recording.unix_ns,
                    "steps": None if span is None else list(span),
                    "bytes": recording.bytes,
                    "taps": [list(one) for one in recording.taps()],
                    "subscriptions": recording.subscriptions(),
                    "warnings": recording.warnings,
                }
            )
            continue
        label = f" ({recording.label})" if recording.label else ""
        reach = "no frames" if span is None else f"steps {span[0]} to {span[1]}"
        say(f"{recording.name}{label}: begun {began}, {reach}, {recording.bytes / 1e6:.1f} MB")
        for line in table(("  tap", "what"), [(f"  {tap}", what) for tap, what in recording.taps()]):
            say(line)


def _show(
    recording: Recording,
    tap: str,
    what: str | None,
    first: int,
    last: int,
    subscription: str | None,
    *,
    every: bool,
    as_json: bool,
    npz: Path | None,
) -> None:
    from trimtab.scope.commands import pictures
    from trimtab.scope.names import Pattern, no_match
    from trimtab.scope.recording.series import series
    from trimtab.scope.shards import SUMMED

    pattern = Pattern(tap)
    chosen = [(name, kind) for name, kind in recording.taps() if pattern.matches(name) and what in (None, kind)]
    if not chosen:
        raise ValueError(no_match(tap, [name for name, _ in recording.taps()]))
    for name, kind in chosen:
        if kind in SUMMED:
            _series(
                name,
                series(recording, name, first, last, what=kind, subscription=subscription),
                every=every,
                as_json=as_json,
            )
            continue
        for merged in recording.merged(name, kind, first, last, subscription=subscription):
            if as_json:
                say_json(pictures.as_json(merged))
            else:
                for line in pictures.block(merged):
                    say(line)
    if npz is not None:
        which = {"subscription": subscription}
        kept = [merged for name, kind in chosen for merged in recording.merged(name, kind, first, last, **which)]
        talk(f"{npz}: {pictures.write_npz(npz, kept)} arrays")


def _series(name: str, found: Series, *, every: bool, as_json: bool) -> None:
    columns = {column: found.column(column) for column in _COLUMNS}
    if as_json:
        for row, (step, microbatch) in enumerate(zip(found.step.tolist(), found.microbatch.tolist(), strict=True)):
            values = {column: float(values[row]) for column, values in columns.items()}
            say_json({"event": "statistics", "tap": name, "step": step, "microbatch": microbatch, **values})
        return
    count = len(found.step)
    stride = 1 if every else max(-(-count // _MOST_LINES), 1)
    rows: list[list[str]] = []
    for row in range(0, count, stride):
        values = [number(float(columns[column][row])) for column in _COLUMNS]
        microbatch = int(found.microbatch[row])
        rows.append([str(found.step[row]), "-" if microbatch < 0 else str(microbatch), *values])
    say(name + (f" (every {stride}th of {count} moments)" if stride > 1 else ""))
    for line in table(("step", "mb", *_COLUMNS), rows):
        say(line)
