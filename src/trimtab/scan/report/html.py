"""The report as one self-contained HTML file: no network, no other files, light and dark.

plotly.js is written into the page, together with its licence (MIT). A content security policy
in the page forbids every connection, so a hostile trace cannot make a reader's browser talk to anyone.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any, Final

from trimtab.scan.model import Finding, Report
from trimtab.scan.plots import ReportPlots
from trimtab.scan.report import wording
from trimtab.scan.report.figures import Figure, figures
from trimtab.scan.report.wording import clean, percent, seconds, times

_HOLE: Final = re.compile(r"@@([a-z]+)@@")
_MOST_SOURCES: Final = 64
_MOST_VICTIMS: Final = 32

_DEVICES: Final = {"cpu": "CPU", "cuda": "GPU", "emulated": "emulated (compute padded to a set time)"}


def render(report: Report, plots: ReportPlots | None = None) -> str:
    """The page as text; raises ValueError where plotly is not installed."""
    drawn = figures(plots or ReportPlots())
    parts = {
        "title": _text(f"trimtab: {report.verdict.value}"),
        "verdict": _text(report.verdict.value),
        "banner": _banner(report),
        "findings": _findings(report.findings),
        "figures": "".join(_figure(figure) for figure in drawn),
        "tables": _what_if(report) + _victims(report) + _warnings(report),
        "facts": _facts(report),
        "glossary": "".join(f"<dt>{_text(term)}</dt><dd>{_text(what)}</dd>" for term, what in wording.GLOSSARY),
        "style": _asset("page.css"),
        "script": _script(_asset("page.js")),
        "plotly": _script(_plotly_js()) if drawn else "",
        "licence": _asset("plotly-licence.txt") if drawn else "no other software in this page",
        "data": _json([{"name": f.name, "traces": f.traces, "layout": f.layout} for f in drawn]),
    }
    return _HOLE.sub(lambda hole: parts[hole[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("trimtab.scan.report").joinpath("assets", name).read_text("utf-8")


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise ValueError("the HTML report needs plotly: pip install 'trimtab[scan]'") from None
    return get_plotlyjs()


def _script(source: str) -> str:
    """JavaScript that cannot end its own element."""
    return re.sub(r"</(script)", r"<\\/\1", source, flags=re.IGNORECASE)


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(text: object) -> str:
    return html.escape(clean(text))


def _banner(report: Report) -> str:
    step = report.step_time_s
    lost = step.replayed - step.ideal
    cards = (
        ("step time", seconds(step.actual), "as measured"),
        ("replayed", seconds(step.replayed), "the recorded work, run again over its dependencies"),
        ("ideal", seconds(step.ideal), "with all work spread evenly"),
        ("slowdown", times(report.slowdown), f"{seconds(lost)} lost a step"),
    )
    tiles = "".join(
        f'<div class="tile"><span>{_text(name)}</span><strong>{_text(value)}</strong><small>{_text(note)}</small></div>'
        for name, value, note in cards
    )
    detectable = wording.detectable(report)
    note = f"<p>{_text(detectable)}</p>" if detectable else ""
    return (
        f'<section class="banner {report.verdict.value}"><span class="verdict">{_text(report.verdict.value)}</span>'
        f"<h1>{_text(wording.headline(report))}</h1>{note}</section>"
        f'<section class="tiles">{tiles}</section>'
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    return '<section id="findings"><h2>Findings</h2>' + "".join(map(_finding, findings)) + "</section>"


def _finding(finding: Finding) -> str:
    facts = [
        ("costs", f"{seconds(finding.seconds_lost_per_step)} a step"),
        ("share of what is lost", percent(finding.share_of_slowdown)),
        ("when", wording.when(finding)),
        ("confidence", wording.sureness(finding.confidence)),
    ]
    if math.isfinite(finding.ratio):
        facts.append(("time taken over time expected", times(finding.ratio)))
    if finding.ops:
        facts.append(("in", ", ".join(finding.ops)))
    if finding.stage is not None:
        facts.append(("pipeline stage", str(finding.stage)))
    if finding.host:
        facts.append(("host", finding.host))
    listed = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts)
    evidence = "".join(f"<li>{_text(line)}</li>" for line in finding.evidence)
    return (
        f'<article class="finding"><h3>{_text(wording.title(finding))} <code>{finding.kind.value}</code></h3>'
        f'<dl class="facts">{listed}</dl>' + (f"<ul>{evidence}</ul>" if evidence else "") + "</article>"
    )


def _figure(figure: Figure) -> str:
    return (
        f"<figure><h2>{_text(figure.title)}</h2>"
        f'<div class="plot" id="{figure.name}" style="height:{figure.height_px}px"></div>'
        f"<figcaption>{_text(figure.caption)}</figcaption></figure>"
    )


def _table(title: str, note: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    if not body:
        return ""
    heads = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    return (
        f"<section><h2>{_text(title)}</h2><p>{_text(note)}</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def _what_if(report: Report) -> str:
    asked, found = ([row for row in report.what_if if row.asked == wanted] for wanted in (True, False))
    return _table(
        "What would be",
        "Asked for. Each row replays the job with the change made.",
        ("change", "step time then", "saved a step", ""),
        ((row.fix, seconds(row.step_time_s), seconds(row.seconds_saved_per_step), row.detail) for row in asked),
    ) + _table(
        "What a fix would give back",
        "Each row replays the job with one cause taken away; savings of several fixes need not add up.",
        ("fix", "step time then", "saved a step"),
        ((row.fix, seconds(row.step_time_s), seconds(row.seconds_saved_per_step)) for row in found),
    )


def _victims(report: Report) -> str:
    groups = wording.waiting(report.victims)
    note = "Ranks that wait for others. They look late in their communications, but nothing is wrong with them."
    left = sum(len(group.ranks) for group in groups[_MOST_VICTIMS:])
    return _table(
        "Victims",
        note + (f" {left:,} more ranks are in report.json." if left else ""),
        ("ranks", "wait for", "and so long a step"),
        (
            (wording.rank_list(group.ranks, 32), wording.rank_list(group.waits_for), group.waits)
            for group in groups[:_MOST_VICTIMS]
        ),
    )


def _warnings(report: Report) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in wording.cautions(report))
    return f'<section class="warnings"><h2>Warnings</h2><ul>{lines}</ul></section>' if lines else ""


def _facts(report: Report) -> str:
    job, matching, windows = report.job, report.matching, report.windows
    rows = [
        ("run", job.run_id or "unnamed"),
        ("ranks", f"{job.world_size} ({wording.layout(job)})"),
        ("steps judged", str(job.steps)),
        ("devices", _DEVICES.get(job.device, job.device)),
        ("clocks", wording.clocks(report.clock)),
        ("communications matched", f"{matching.matched:,}{wording.matched(matching)}, {matching.unmatched:,} not"),
        ("complete and sure", percent(matching.confidence)),
        ("PP send window", seconds(windows.pp_send_s) if windows.pp_send_s is not None else "not measured"),
        ("DP reduce window", seconds(windows.dp_reduce_s) if windows.dp_reduce_s is not None else "not measured"),
    ]
    listed = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in rows)
    sources = "".join(f"<li>{_text(source)}</li>" for source in job.sources[:_MOST_SOURCES])
    left = len(job.sources) - _MOST_SOURCES
    more = f"<li>and {left} more</li>" if left > 0 else ""
    files = f"<details><summary>{len(job.sources)} files</summary><ul>{sources}{more}</ul></details>" if sources else ""
    return f'<dl class="facts">{listed}</dl>{files}'
