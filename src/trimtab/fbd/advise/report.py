"""Advice as JSON, as a table, and as a plot."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimtab.fbd.advise.advice import Advice
from trimtab.fbd.advise.candidates import Way
from trimtab.fbd.advise.predict import Prediction

SCHEMA: Final = "trimtab.fbd-advice/1"
_SHOWN_OF_EACH: Final = 4
"""Candidates of a way in the table and the plot; JSON has all."""
_COLOURS: Final = {
    Way.ORDINARY: "#5b6770",
    Way.RECOMPUTE: "#7d8992",
    Way.SHIP: "#0072b2",
    Way.SEND_INPUT: "#d55e00",
}
"""Told apart by every eye (Okabe and Ito)."""
_ROW: Final = 26
_LEFT: Final = 420
_WIDTH: Final = 520
_TOP: Final = 64
_FIGURE: Final = 60
"""Width of a bar that has room for its figure."""


def as_json(advice: Advice) -> dict[str, Any]:
    """Everything; throughput in microbatches a second and training device."""
    return {
        "schema": SCHEMA,
        "pays": advice.pays,
        "recommended": advice.best.candidate.name,
        "kappa": advice.training.kappa,
        "microbatches": advice.training.microbatches,
        "reasons": list(advice.reasons),
        "candidates": [_row(advice, one) for one in advice.predictions],
    }


def _row(advice: Advice, one: Prediction) -> dict[str, Any]:
    candidate = one.candidate
    return {
        "name": candidate.name,
        "way": candidate.way.value,
        "pp": candidate.pp,
        "tp": candidate.tp,
        "forward_tp": candidate.forward_tp,
        "forwards": candidate.forwards,
        "backwards": candidate.backwards,
        "helped": candidate.helped if candidate.disaggregated else 0.0,
        "on_helpers": candidate.on_helpers,
        "fits": one.fits,
        "reason": one.reason,
        "gain": advice.gain(one),
        "throughput": one.throughput,
        "step_s": one.step,
        "microbatches": one.microbatches,
        "devices": one.devices,
        "helpers": one.helpers,
        "trainer_bytes": one.trainer_bytes,
        "forward_bytes": one.forward_bytes,
        "shipped_bytes_per_s": one.shipped,
        "busy": one.busy,
    }


def show(advice: Advice, console: Console) -> None:
    """The answer, why, and the best candidates."""
    answer = "pays" if advice.pays else "does not pay"
    console.print(Text(f"Forward/backward disaggregation {answer} here.", "bold"))
    console.print(
        f"Recommended: {advice.best.candidate.name}, {advice.gain(advice.best):.3f} x the throughput per training "
        f"device of the job as it is ({advice.now.candidate.name}).",
        highlight=False,
        soft_wrap=True,
    )
    for reason in advice.reasons:
        console.print(f"- {reason}", highlight=False, soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("candidate", overflow="fold")
    for name in ("gain", "busy", "trainer GB", "forward GB", "sends GB/s"):
        table.add_column(name, justify="right")
    for one in _shown(advice):
        table.add_row(*_cells(advice, one), style=None if one.fits else "dim")
    console.print(table)
    if any(not one.fits for one in _shown(advice)):
        console.print(Text("(x: does not fit)", "dim"))


def _shown(advice: Advice) -> list[Prediction]:
    """The best few of each way, in order of throughput."""
    counts: Counter[Way] = Counter()
    found: list[Prediction] = []
    for one in advice.predictions:
        counts[one.candidate.way] += 1
        if counts[one.candidate.way] <= _SHOWN_OF_EACH:
            found.append(one)
    return found


def _cells(advice: Advice, one: Prediction) -> tuple[str, ...]:
    mark = "" if one.fits else "x "
    return (
        mark + one.candidate.name,
        f"{advice.gain(one):.3f}",
        f"{one.busy:.0%}",
        f"{one.trainer_bytes / 1e9:.3g}",
        f"{one.forward_bytes / 1e9:.3g}" if one.forward_bytes else "",
        f"{one.shipped / 1e9:.3g}" if one.shipped else "",
    )


def svg(advice: Advice) -> str:
    """Throughput per training device of the best candidates, with the job as it is as 1: an SVG document."""
    rows = _shown(advice)
    most = max(1.0, *(advice.gain(one) for one in rows))
    scale = _WIDTH / most
    height = _TOP + _ROW * len(rows) + 40
    total = _LEFT + _WIDTH + 70
    answer = "pays" if advice.pays else "does not pay"
    title = f"Forward/backward disaggregation {answer} (kappa {advice.training.kappa:.2f})"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" width="{total}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{total}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="16" y="46" fill="#444">microbatches a second and training device; the job as it is: 1; '
        f"{advice.training.microbatches} microbatches a pipeline</text>",
    ]
    for number, one in enumerate(rows):
        out += _bar(advice, one, _TOP + number * _ROW, scale)
    x = _LEFT + scale
    out.append(
        f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{height - 30}" stroke="#111" stroke-dasharray="4 3"/>'
    )
    note = "" if all(one.fits for one in rows) else "Dashed: does not fit into the memory. "
    out.append(f'<text x="16" y="{height - 10}" fill="#444">{note}Predicted from times of passes, not measured.</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def _bar(advice: Advice, one: Prediction, y: int, scale: float) -> list[str]:
    gain = advice.gain(one)
    width = max(gain * scale, 1.0)
    colour = _COLOURS[one.candidate.way]
    fill = f'fill="{colour}"' if one.fits else f'fill="none" stroke="{colour}" stroke-dasharray="3 3"'
    inside = one.fits and width > _FIGURE
    at, anchor, ink = (width - 6, "end", "#fff") if inside else (width + 6, "start", "#000")
    return [
        f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(one.candidate.name)}</text>',
        f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 8}" {fill}/>',
        f'<text x="{_LEFT + at:.1f}" y="{y + 16}" text-anchor="{anchor}" fill="{ink}">{gain:.3f}</text>',
    ]
