"""The schedule as SVG: a row a stage, a box an action, lines for messages where there are few."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from trimtab.pipeline.actions import Work
from trimtab.pipeline.simulate.result import Ran, Result, Sent
from trimtab.pipeline.simulate.words import Units, clean, count, headline, letters, ticks

_COLOURS: Final = {Work.F: (0, 114, 178), Work.B: (0, 158, 115), Work.BW: (0, 158, 115), Work.W: (230, 159, 0)}
"""Blue, green and orange: told apart by every eye (Okabe and Ito)."""
_LIGHTER: Final = (0.0, 0.5, 0.25, 0.7)
"""By chunk: how far the colour is mixed with white."""
_LEFT: Final = 64
WIDTH: Final = 1200
MOST_WIDTH: Final = 6000
_TOP: Final = 62
_ROW: Final = 24
_GAP: Final = 6
_DIGIT: Final = 6.4
"""Width of a digit."""
_BOX: Final = 2 * _DIGIT + 3
"""Width of a box with a number of two digits."""
_MOST_ACTIONS: Final = 20_000
_MOST_MESSAGES: Final = 300
_MOST_PLAIN: Final = 4000
"""With more actions the boxes have no titles."""


def readable_width(result: Result) -> int:
    """A width in which most numbers of microbatches fit into their boxes, as far as that is not absurd."""
    return min(MOST_WIDTH, max(WIDTH, round(_BOX * max(map(len, result.ran)))))


def render(result: Result, units: Units, disturbance: str = "none", width: int = WIDTH) -> str:
    """An SVG document. Of very many actions the first are drawn, and that is said.

    ``width`` is that of the schedule, in pixels.
    """
    until = _until(result)
    scale = width / until if until > 0 else 1.0
    stages = len(result.ran)
    height = _TOP + stages * (_ROW + _GAP) + 58
    total = _LEFT + width + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" width="{total}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{_text(headline(result, disturbance))}</title>",
        f'<rect width="{total}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">{_text(headline(result, disturbance))}</text>',
        f'<text x="{_LEFT}" y="42" fill="#444">{_text(_figures(result, units))}</text>',
    ]
    for stage, row in enumerate(result.ran):
        y = _y(stage)
        out.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">stage {stage}</text>')
        out.append(f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_ROW}" fill="#f0f0f0"/>')
        out += _boxes(row, y, scale, until, units, titled=result.actions <= _MOST_PLAIN)
    if len(result.sent) <= _MOST_MESSAGES:
        out += _messages(result.sent, scale, until)
    out += _axis(until, scale, units, height)
    out += _legend(result, height, until, numbered=any("pointer-events" in line for line in out))
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _until(result: Result) -> float:
    """Up to when is drawn."""
    starts = sorted(one.start for row in result.ran for one in row)
    return result.makespan if len(starts) <= _MOST_ACTIONS else starts[_MOST_ACTIONS]


def _figures(result: Result, units: Units) -> str:
    return (
        f"makespan {units.time(result.makespan)}, {result.ratio:.3f} x the bound; "
        f"peak {units.memory(max(result.peak_activation))}"
    )


def _boxes(row: tuple[Ran, ...], y: int, scale: float, until: float, units: Units, *, titled: bool) -> Iterator[str]:
    for action, start, end in row:
        if start >= until:
            continue
        x, width = _LEFT + start * scale, (min(end, until) - start) * scale
        number = str(action.microbatch)
        box = (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{_colour(action.work, action.chunk)}"'
        )
        if width > 3:
            box += ' stroke="#fff" stroke-width="0.6"'
        if titled:
            when = f"{units.time(start)} to {units.time(end)}"
            told = f"{action.work.name}, chunk {action.chunk}, microbatch {number}: {when}"
            box += f"><title>{_text(told)}</title></rect>"
        else:
            box += "/>"
        yield box
        if width >= _DIGIT * len(number) + 2:
            ink = "#fff" if action.work is not Work.W and action.chunk % 4 in (0, 2) else "#000"
            yield (
                f'<text x="{x + width / 2:.2f}" y="{y + 16}" text-anchor="middle" font-size="11" fill="{ink}" '
                f'pointer-events="none">{number}</text>'
            )


def _messages(sent: tuple[Sent, ...], scale: float, until: float) -> Iterator[str]:
    for source, target, _, ready, _, arrival in sent:
        if arrival > until:
            continue
        down = target > source
        y1, y2 = _y(source) + (_ROW if down else 0), _y(target) + (0 if down else _ROW)
        yield (
            f'<line x1="{_LEFT + ready * scale:.2f}" y1="{y1}" x2="{_LEFT + arrival * scale:.2f}" y2="{y2}" '
            'stroke="#555" stroke-width="0.7" opacity="0.6"/>'
        )


def _axis(until: float, scale: float, units: Units, height: int) -> Iterator[str]:
    y = height - 44
    for at in ticks(until, units.f or 1.0):
        x = _LEFT + at * scale
        yield f'<line x1="{x:.2f}" y1="{y - 8}" x2="{x:.2f}" y2="{y - 2}" stroke="#888"/>'
        said = "0" if at == 0 else units.time(at)
        yield f'<text x="{x:.2f}" y="{y + 10}" text-anchor="middle" font-size="11" fill="#444">{_text(said)}</text>'


def _legend(result: Result, height: int, until: float, *, numbered: bool) -> Iterator[str]:
    x, y = _LEFT, height - 20
    chunks = result.plan.shape.chunks
    for work, (_, name) in letters(result.plan).items():
        for chunk in range(min(chunks, len(_LIGHTER))):
            yield f'<rect x="{x}" y="{y}" width="14" height="12" fill="{_colour(work, chunk)}"/>'
            x += 15
        which = f", chunk {' '.join(map(str, range(min(chunks, len(_LIGHTER)))))}" if chunks > 1 else ""
        yield f'<text x="{x + 4}" y="{y + 10}">{name}{which}</text>'
        x += 24 + round(6.4 * len(name + which))
    said = "numbers are microbatches" if numbered else ""
    if until < result.makespan:
        said = f"the first {count(_MOST_ACTIONS, 'action')} are drawn"
    yield f'<text x="{x}" y="{y + 10}" fill="#444">{said}</text>'


def _y(stage: int) -> int:
    return _TOP + stage * (_ROW + _GAP)


def _colour(work: Work, chunk: int) -> str:
    share = _LIGHTER[chunk % len(_LIGHTER)]
    red, green, blue = (round(part + (255 - part) * share) for part in _COLOURS[work])
    return f"#{red:02x}{green:02x}{blue:02x}"


def _text(said: str) -> str:
    return escape(clean(said))
