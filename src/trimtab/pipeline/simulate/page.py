"""One self-contained HTML page: the figures, the schedule, and each stage."""

from __future__ import annotations

from html import escape
from typing import Final

from trimtab.pipeline.simulate import svg
from trimtab.pipeline.simulate.result import Result
from trimtab.pipeline.simulate.words import Units, clean, facts, headline

_STYLE: Final = """
body { font-family: system-ui, sans-serif; margin: 1.5rem auto; max-width: 84rem; padding: 0 1rem; color: #1b1b1b;
  background: #fff; }
h1 { font-size: 1.25rem; } h2 { font-size: 1.05rem; margin-top: 1.6rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .15rem .9rem .15rem 0; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } thead th { border-bottom: 1px solid #bbb; }
tbody th { font-weight: normal; color: #555; }
.picture { overflow-x: auto; border: 1px solid #ddd; } .picture svg { display: block; max-width: none; }
"""


def render(result: Result, units: Units, disturbance: str = "none", largest_transfer: float | None = None) -> str:
    """The page as text."""
    title = escape(clean(headline(result, disturbance)))
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(clean(said))}</td></tr>"
        for name, said in facts(result, units, largest_transfer)
    )
    drawn = svg.render(result, units, disturbance, svg.readable_width(result))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<table><tbody>{rows}</tbody></table>\n"
        f'<h2>Schedule</h2>\n<div class="picture">\n{drawn}</div>\n'
        f"<h2>Stages</h2>\n{_stages(result, units)}\n</body>\n</html>\n"
    )


def _stages(result: Result, units: Units) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("stage", "compute", "idle", "peak activation"))
    rows = "".join(
        f'<tr><td class="n">{stage}</td><td class="n">{escape(units.time(load))}</td>'
        f'<td class="n">{100 * idle:.1f} %</td><td class="n">{escape(units.memory(peak))}</td></tr>'
        for stage, (load, idle, peak) in enumerate(zip(result.loads, result.idle, result.peak_activation, strict=True))
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
