"""The schedule in a terminal: a row a stage, a letter for what it did most of the time that a column stands for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from trimtab.pipeline.actions import Work
from trimtab.pipeline.simulate.result import Ran, Result
from trimtab.pipeline.simulate.words import Units, letters, ticks

_HUES: Final = (
    ("#9ecbff", "#2f7fd6", "#1b4a80"),
    ("#ffd28a", "#d98a1f", "#87520b"),
    ("#a6e3b0", "#2f9e4f", "#1c5f30"),
    ("#e5b8f0", "#a24fc0", "#602a75"),
)
"""By chunk: F, B, W from bright to dark."""
_DARK: Final = {Work.F: 0, Work.B: 1, Work.BW: 1, Work.W: 2}
_LABEL: Final = 4
_FEWEST: Final = 16
_MOST_ROWS: Final = 32
_TICKS: Final = 16
"""Columns between two marks of the axis, at least."""

Cell = tuple[Work, int] | None
"""What most of a column's time went to: kind and chunk; None: nothing."""


def picture(result: Result, units: Units, console: Console) -> RenderableType:
    """Rows of all stages (of many, some), an axis and a legend, as wide as the console."""
    width = max(console.width - _LABEL - 1, _FEWEST)
    named = letters(result.plan)
    idle = "·" if console.encoding.startswith("utf") else "."
    chunks = result.plan.shape.chunks
    stages = _shown(len(result.ran))
    parts: list[Text] = []
    for stage in stages:
        row = cells(result.ran[stage], result.makespan, width)
        parts.append(_line(str(stage), ((_letter(c, named, idle), _style(c)) for c in row)))
        if chunks > 1:
            parts.append(_line("", ((" " if c is None else _digit(c[1]), "dim") for c in row)))
    parts.append(_axis(result.makespan, width, units))
    parts += _legend(named, chunks, idle)
    if len(stages) < len(result.ran):
        parts.append(Text(f"{len(stages)} of {len(result.ran)} stages are shown", "dim"))
    return Group(*parts)


def cells(ran: Sequence[Ran], makespan: float, width: int) -> list[Cell]:
    """What a stage did most in each of ``width`` equal parts of the time."""
    shares: list[dict[tuple[Work, int], float]] = [defaultdict(float) for _ in range(width)]
    step = makespan / width if makespan > 0 else 1.0
    for action, start, end in ran:
        at = min(int(start / step), width - 1)
        while at < width and at * step < end:
            shares[at][action.work, action.chunk] += min(end, (at + 1) * step) - max(start, at * step)
            at += 1
    return [_most(share, step) for share in shares]


def _most(share: dict[tuple[Work, int], float], step: float) -> Cell:
    if sum(share.values()) < step / 2:
        return None
    return max(share, key=share.__getitem__)


def _shown(stages: int) -> list[int]:
    if stages <= _MOST_ROWS:
        return list(range(stages))
    return sorted({round(number * (stages - 1) / (_MOST_ROWS - 1)) for number in range(_MOST_ROWS)})


def _line(label: str, marks: Iterable[tuple[str, str]]) -> Text:
    text = Text(f"{label:>{_LABEL}} ", no_wrap=True, overflow="crop")
    for mark, style in marks:
        text.append(mark, style)
    return text


def _letter(cell: Cell, named: dict[Work, tuple[str, str]], idle: str) -> str:
    return idle if cell is None else named[cell[0]][0]


def _digit(chunk: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[chunk] if chunk < 36 else "+"


def _style(cell: Cell) -> str:
    if cell is None:
        return "dim"
    dark = _DARK[cell[0]]
    return f"{'black' if dark == 0 else 'white'} on {_HUES[cell[1] % len(_HUES)][dark]}"


def _axis(makespan: float, width: int, units: Units) -> Text:
    line = [" "] * (width + 1)
    for at in ticks(makespan, units.f or 1.0, max(1, width // _TICKS)):
        said = "0" if at == 0 else units.time(at)
        column = round(at / makespan * width) if makespan > 0 else 0
        begin = min(column, width - len(said))
        if begin >= 0 and line[max(0, begin - 1)] == " ":
            line[begin : begin + len(said)] = said
    return Text(" " * (_LABEL + 1) + "".join(line[:width]), "dim", no_wrap=True, overflow="crop")


def _legend(named: dict[Work, tuple[str, str]], chunks: int, idle: str) -> list[Text]:
    indent = " " * (_LABEL + 1)
    said = [f"{letter} {name}" for letter, name in named.values()]
    lines = [Text(f"{indent}{', '.join(said)}, {idle} idle", "dim")]
    if chunks > 1:
        under = Text(f"{indent}under it the chunk: ", "dim")
        for chunk in range(min(chunks, len(_HUES))):
            under.append(f" {_digit(chunk)} ", _style((Work.F, chunk))).append(" ")
        lines.append(under)
    return lines
