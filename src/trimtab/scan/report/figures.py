"""The figures of the HTML report, as plain plotly specifications.

Colours are CSS variables (``var(--wait)``), resolved in the browser, so that figures follow the page's theme.
plotly takes a subset of HTML in texts, so whatever comes from a trace is escaped here, too.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trimtab.scan.plots import Category, ReportPlots, Segment
from trimtab.scan.report import wording
from trimtab.scan.report.segments import coarse

_MOST_HEATMAP_RANKS: Final = 512
_MOST_TIMELINE_RANKS: Final = 64
_MOST_SEGMENTS: Final = 20_000
_MOST_BARS: Final = 64
_ROW_PX: Final = 26
"""Height of a rank's row where there are few; more ranks share the height below."""
_TALLEST_PX: Final = 900
_LEAST_SCALE: Final = 0.1
"""The heat map's colours span at least +-10 %, so that noise looks like noise."""

_CATEGORY_NAMES: Final = {
    Category.FORWARD: "forward",
    Category.BACKWARD: "backward",
    Category.WGRAD: "backward for the weights",
    Category.OPTIMIZER: "optimizer",
    Category.KERNEL: "kernels",
    Category.OTHER: "other work",
    Category.TRANSFER: "communication, transfer",
    Category.WAIT: "communication, waiting",
    Category.GAP: "nothing known",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A plotly figure with what a reader needs to understand it."""

    name: str
    """Element id."""
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height_px: int


def figures(plots: ReportPlots) -> list[Figure]:
    """The figures that ``plots`` has data for, in the order of the report."""
    drawn = (heatmap(plots), timeline(plots), lost(plots), step_times(plots), clock_error(plots))
    return [figure for figure in drawn if figure is not None]


def heatmap(plots: ReportPlots) -> Figure | None:
    """Rank x step: compute time in excess of the peers'."""
    values = plots.heatmap
    if not values.size:
        return None
    worst = np.where(np.isfinite(values), values, -np.inf).max(axis=1)
    rows = _worst_rows(worst, _MOST_HEATMAP_RANKS)
    shown = values[rows]
    finite = np.abs(shown[np.isfinite(shown)])
    scale = max(_LEAST_SCALE, float(finite.max()) if finite.size else 0.0)
    trace = {
        "type": "heatmap",
        "x": [str(step) for step in plots.heatmap_steps],
        "y": [str(plots.heatmap_ranks[row]) for row in rows],
        "z": [[_rounded(100 * value) for value in row] for row in shown.tolist()],
        "zmin": -100 * scale,
        "zmax": 100 * scale,
        "colorscale": [[0, "var(--faster)"], [0.5, "var(--neutral)"], [1, "var(--slower)"]],
        "colorbar": {"title": {"text": "excess"}, "ticksuffix": " %", "thickness": 14, "outlinewidth": 0},
        "hovertemplate": "rank %{y}, step %{x}<br>%{z:+.1f} % against its peers<extra></extra>",
        "xgap": 1 if shown.shape[1] <= 200 else 0,
        "ygap": 1 if shown.shape[0] <= 100 else 0,
        "hoverongaps": False,
    }
    caption = (
        "Each cell is one rank in one step: how much longer its computations took than those of its peers. Pale cells "
        "are as fast as the peers, red ones slower, blue ones faster, empty ones unknown. A red row is a slow rank, "
        "a red column a slow step, a block that starts somewhere an onset. Time spent waiting is not in it."
    )
    caption += _left_out(len(rows), len(plots.heatmap_ranks), "ranks with the largest excess")
    layout = {"xaxis": _axis("step", type="category"), "yaxis": _rank_axis(len(rows))}
    return Figure("heatmap", "Compute time against the peers", caption, [trace], layout, _height(len(rows)))


def timeline(plots: ReportPlots) -> Figure | None:
    """What each rank did in one step."""
    if not plots.timeline:
        return None
    ranks = sorted({segment.rank for segment in plots.timeline})
    if len(ranks) > _MOST_TIMELINE_RANKS:
        costly = sorted(ranks, key=lambda rank: (-plots.lost_by_rank.get(rank, 0.0), rank))
        ranks = sorted(costly[:_MOST_TIMELINE_RANKS])
    kept = set(ranks)
    segments = coarse([segment for segment in plots.timeline if segment.rank in kept])
    shown = sorted(segments, key=lambda segment: segment.start_s - segment.end_s)[:_MOST_SEGMENTS]
    traces = [_segments(category, [s for s in shown if s.category is category]) for category in Category]
    step = "the worst step" if plots.timeline_step is None else f"step {plots.timeline_step}, the longest concerned"
    caption = (
        f"What each rank did in {step}. The slow rank is the one whose row is full of work while the others wait for "
        "it. Drag to zoom in, double-click to zoom out, click on the legend to hide a kind of work."
    )
    caption += _left_out(len(ranks), len({s.rank for s in plots.timeline}), "ranks that cost most")
    caption += _left_out(len(shown), len(segments), "longest stretches")
    layout = {
        "barmode": "overlay",
        "bargap": 0.18,
        "xaxis": _axis("milliseconds from the start of the step", zeroline=False),
        "yaxis": {**_rank_axis(len(ranks)), "categoryarray": [str(rank) for rank in ranks]},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    title = "Timeline of the worst step"
    used = [trace for trace in traces if trace["x"]]
    return Figure("timeline", title, caption, used, layout, _height(len(ranks)) + 40)


def _segments(category: Category, segments: Sequence[Segment]) -> dict[str, Any]:
    name = _CATEGORY_NAMES[category]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": [_rounded(1e3 * (segment.end_s - segment.start_s)) for segment in segments],
        "base": [_rounded(1e3 * segment.start_s) for segment in segments],
        "y": [str(segment.rank) for segment in segments],
        "text": [_escaped(segment.label) for segment in segments],
        "textposition": "none",
        # kernels lie so close that there would be more outline than kernel
        "marker": {
            "color": f"var(--{category.value})",
            "line": {"width": 0 if category is Category.KERNEL else 0.5, "color": "var(--panel)"},
        },
        "hovertemplate": f"rank %{{y}}, {name}<br>%{{text}}<br>%{{x:.3f}} ms from %{{base:.3f}} ms<extra></extra>",
    }


def lost(plots: ReportPlots) -> Figure | None:
    """How much longer than its peers each rank holds up the job, beside all that it waits for others."""
    if not any(value > 0 for value in (*plots.lost_by_rank.values(), *plots.waited_by_rank.values())):
        return None
    every = sorted(plots.lost_by_rank.keys() | plots.waited_by_rank.keys())
    costs = np.array([plots.lost_by_rank.get(rank, 0.0) for rank in every])
    ranks = [every[row] for row in _worst_rows(costs, _MOST_BARS)]
    traces = [_bars("excess on the critical path", "var(--slower)", ranks, plots.lost_by_rank, 1e3, "ms a step")]
    if plots.waited_by_rank:
        traces.append(_bars("waiting, all of it", "var(--wait)", ranks, plots.waited_by_rank, 1e3, "ms a step"))
    caption = (
        "Red is time on the critical path that a rank's peers do not need. Without it other work comes to be critical, "
        "so that a step gains less: what a replay gains is with the finding. Amber is all waiting for whatever reason; "
        "what of it a finding causes is with its victims. A rank with much amber and no red is a victim, however late "
        "it looks."
    )
    caption += _left_out(len(ranks), len(every), "ranks that cost most")
    layout = {
        "barmode": "group",
        "xaxis": _axis("rank", type="category"),
        "yaxis": _axis("milliseconds a step", rangemode="tozero"),
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    return Figure("lost", "Time lost by rank", caption, traces, layout, 320)


def step_times(plots: ReportPlots) -> Figure | None:
    """Step time over the run."""
    if len(plots.step_time_s) < 2:
        return None
    steps = sorted(plots.step_time_s)
    trace = {
        "type": "scatter",
        "mode": "lines+markers" if len(steps) <= 200 else "lines",
        "x": steps,
        "y": [_rounded(1e3 * plots.step_time_s[step]) for step in steps],
        "line": {"color": "var(--forward)", "width": 2},
        "hovertemplate": "step %{x}: %{y:.2f} ms<extra></extra>",
    }
    caption = (
        "How long each judged step took; the first steps of a run are often longer and left out. A jump that stays is "
        "an onset."
    )
    layout = {
        "xaxis": _axis("step"),
        "yaxis": _axis("milliseconds", rangemode="tozero"),
        "showlegend": False,
    }
    return Figure("step-times", "Step time over the run", caption, [trace], layout, 280)


def clock_error(plots: ReportPlots) -> Figure | None:
    """How far each rank's clock may be off."""
    errors = {rank: error for rank, error in plots.clock_error_us_by_rank.items() if math.isfinite(error)}
    if not any(errors.values()):  # none, or all ranks read one clock
        return None
    every = sorted(errors)
    ranks = [every[row] for row in _worst_rows(np.array([errors[rank] for rank in every]), _MOST_BARS)]
    caption = (
        "What is left between a rank's clock and the others' after alignment. Effects smaller than this cannot be told "
        "apart from clock error and are not judged."
    )
    caption += _left_out(len(ranks), len(every), "ranks with the largest error")
    layout = {
        "xaxis": _axis("rank", type="category"),
        "yaxis": _axis("microseconds", rangemode="tozero"),
        "showlegend": False,
    }
    traces = [_bars("clock error", "var(--transfer)", ranks, errors, 1.0, "us")]
    return Figure("clock-error", "Clock error by rank", caption, traces, layout, 260)


def _bars(
    name: str, colour: str, ranks: Iterable[int], values: Mapping[int, float], scale: float, unit: str
) -> dict[str, Any]:
    listed = list(ranks)
    return {
        "type": "bar",
        "name": name,
        "x": [str(rank) for rank in listed],
        "y": [_rounded(scale * values.get(rank, 0.0)) for rank in listed],
        "marker": {"color": colour},
        "hovertemplate": f"rank %{{x}} {name}: %{{y:.3g}} {unit}<extra></extra>",
    }


def _worst_rows(worst: np.ndarray[Any, Any], most: int) -> list[int]:
    """Indices of the ``most`` largest values, in ascending order of index."""
    order = np.argsort(-worst, kind="stable")[:most]
    return sorted(int(row) for row in order)


def _left_out(shown: int, total: int, which: str) -> str:
    return f" Shown are the {shown:,} {which} of {total:,}." if shown < total else ""


def _height(rows: int) -> int:
    return min(_TALLEST_PX, 130 + _ROW_PX * rows)


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **more}


def _rank_axis(rows: int) -> dict[str, Any]:
    axis = _axis("rank", type="category", autorange="reversed", categoryorder="array", showgrid=False)
    return axis if rows > 40 else {**axis, "tickmode": "linear", "dtick": 1}


def _rounded(value: float) -> float | None:
    """Four decimals are enough for a picture, and JSON knows no NaN."""
    return round(float(value), 4) if math.isfinite(value) else None


def _escaped(text: str) -> str:
    return html.escape(wording.clean(text))
