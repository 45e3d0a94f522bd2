"""The picture in the terminal, and its one-line form. All names were written by others, and are shown literally."""

from __future__ import annotations

import math
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.scan.online.alarm import sentence
from trimtab.scan.online.hang_words import lines
from trimtab.scan.report.wording import clean, ranks_named, seconds
from trimtab.watch.grid import LEVELS, Row, rows_of
from trimtab.watch.watcher import Event, Watcher

_SHADES: Final = ("·", "░", "▒", "▓", "█")
_ASCII: Final = (".", "-", "+", "*", "#")
_COLOURS: Final = ("grey50", "#4c9be8", "#e8c33c", "#e8862e", "#d1402f")
"""From cold to hot, by brightness too, so that they differ for every eye; the shade alone says the same."""
_NOTHING: Final = " "
_MOST_ALARMS: Final = 4
_LABEL: Final = 16
_FEWEST_CELLS: Final = 10
_AROUND: Final = 14
"""Lines of the picture beside the rows."""
_FEWEST_ROWS: Final = 4
_MARKS: Final = {"alarm": ("ALARM", "bold white on red"), "hang": ("HANGS", "bold white on red")}


def picture(watcher: Watcher, console: Console, now: str = "", notes: tuple[str, ...] = ()) -> RenderableType:
    """Everything, for a terminal of the console's size."""
    parts: list[RenderableType] = [_head(watcher, now)]
    detector = watcher.detector
    if detector is not None:
        rows = max(console.height - _AROUND, _FEWEST_ROWS)
        cells = max(console.width - _LABEL - 16, _FEWEST_CELLS)
        parts += [Text(), _grid(rows_of(detector, rows, cells), watcher, _shades(console), cells), _legend(console)]
    parts += [Text(), *_state(watcher)]
    parts += [Text(note, "dim", overflow="fold") for note in notes]
    return Group(*parts)


def line(watcher: Watcher) -> str:
    """The same in one line."""
    if watcher.detector is None:
        return "waiting for the ranks to say something"
    said = f"step {_step(watcher)}, {_ranks(watcher)}, {_pace(watcher)}"
    if watcher.diagnosis is not None:
        return f"{said}; the job hangs"
    if watcher.alarms:
        blamed = {rank for alarm in watcher.alarms for rank in alarm.ranks}
        return f"{said}; {ranks_named(sorted(blamed)) if blamed else 'the whole job'} slow"
    return f"{said}; {_calm(watcher)}"


def told(event: Event) -> Text:
    """A change, for a log on the terminal."""
    return _badge(event.kind).append(event.text)


def _badge(kind: str) -> Text:
    mark, style = _MARKS.get(kind, (kind, "bold"))
    return Text(overflow="fold").append(f" {mark} ", style).append(" ")


def _head(watcher: Watcher, now: str) -> Text:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append("trimtab watch  ", "bold")
    if watcher.detector is None:
        head.append("waiting for the ranks to say something")
        return head
    attempt = f" (attempt {watcher.attempt})" if watcher.attempt else ""
    head.append(f"{clean(watcher.run_id)}{attempt}  step {_step(watcher)}  {_pace(watcher)}  {_ranks(watcher)}  {now}")
    return head


def _step(watcher: Watcher) -> str:
    """The newest step that anything is known of."""
    judged = -1 if watcher.detector is None else watcher.detector.step
    newest = max((beat.step for beat in watcher.progress.beats.values()), default=-1)
    return str(max(judged, newest)) if max(judged, newest) >= 0 else "-"


def _pace(watcher: Watcher) -> str:
    took = watcher.step_seconds
    return f"{seconds(took)} a step" if math.isfinite(took) else "no step yet"


def _ranks(watcher: Watcher) -> str:
    heard, world = watcher.heard, watcher.world_size
    return f"{world} ranks" if heard == world else f"{heard} of {world} ranks heard"


def _shades(console: Console) -> tuple[str, ...]:
    return _SHADES if console.encoding.startswith("utf") else _ASCII


def _grid(rows: list[Row], watcher: Watcher, shades: tuple[str, ...], cells: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=_LABEL)
    grid.add_column(no_wrap=True, width=cells)
    grid.add_column(no_wrap=True, justify="right")
    blamed = {rank for alarm in watcher.alarms for rank in alarm.ranks}
    if watcher.diagnosis is not None:
        blamed |= set(watcher.diagnosis.suspects)
    for row in rows:
        hot = not blamed.isdisjoint(row.ranks)
        label = Text(("> " if hot else "  ") + clean(row.label), "bold" if hot else "")
        grid.add_row(label, _cells(row, shades), _excess(row, hot))
    return grid


def _cells(row: Row, shades: tuple[str, ...]) -> Text:
    text = Text()
    for cell in row.cells:
        text.append(*((_NOTHING, "") if cell < 0 else (shades[cell], _COLOURS[cell])))
    return text


def _excess(row: Row, hot: bool) -> Text:
    if not math.isfinite(row.excess):
        return Text("-", "dim")
    who = f" ({row.worst})" if len(row.ranks) > 1 else ""
    shown = 100 * math.expm1(row.excess) if row.excess >= LEVELS[0] else 0.0
    return Text(f"+{shown:.0f} %{who}" if shown else "ok", "bold" if hot else "dim")


def _legend(console: Console) -> Text:
    text = Text("  " + " " * _LABEL, no_wrap=True, overflow="crop", style="dim")
    shades = _shades(console)
    limits = ("usual", *(f"+{100 * math.expm1(level):.0f} %" for level in LEVELS))
    for shade, colour, limit in zip(shades, _COLOURS, limits, strict=True):
        text.append(shade, colour).append(f" {limit}  ")
    return text.append("over peers")


def _state(watcher: Watcher) -> list[Text]:
    """The culprit, or that there is none."""
    said: list[Text] = []
    if watcher.diagnosis is not None:
        said.append(_badge("hang"))
        said += [Text(text, overflow="fold") for text in lines(watcher.diagnosis)]
    for alarm in watcher.alarms[:_MOST_ALARMS]:
        said.append(_badge("alarm").append(f"{sentence(alarm)}."))
    if len(watcher.alarms) > _MOST_ALARMS:
        said.append(Text(f"and {len(watcher.alarms) - _MOST_ALARMS} more alarms"))
    return said or [Text(_calm(watcher)[:1].upper() + _calm(watcher)[1:] + ".", "green" if _ready(watcher) else "")]


def _ready(watcher: Watcher) -> bool:
    return watcher.detector is not None and watcher.detector.ready


def _calm(watcher: Watcher) -> str:
    if watcher.progress.over:
        return "all ranks have left"
    if _ready(watcher):
        return "no rank stands out"
    return "learning what is usual"
