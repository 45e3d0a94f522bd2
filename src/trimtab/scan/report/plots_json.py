"""``report-plots.json``: what the figures are drawn from, beside ``report.json``, for other programs.

Schema ``trimtab.plots/1``; the JSON schema beside this file is its contract. However large the job was, the document
stays below some megabytes: what a screen could not show is summed up, and how much that was is said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.scan.plots import Category, ReportPlots
from trimtab.scan.report.segments import coarse
from trimtab.scan.report.wording import clean

SCHEMA: Final = "trimtab.plots/1"
MOST_CELLS: Final = 1 << 18
"""Numbers in the heat map."""
MOST_HEATMAP_RANKS: Final = 1024
MOST_SEGMENTS: Final = 20_000
MOST_RANKS: Final = 16_384
"""Of which it is told what they lost and waited."""
MOST_STEP_TIMES: Final = 16_384
LONGEST_LABEL: Final = 200
_SCREENS: Final = 8
"""Stretches are kept so fine that the timeline can be enlarged so many times."""

Columns = list[tuple[int, int]]
"""For each column the places of its first step and of the one after its last."""


def json_schema() -> dict[str, Any]:
    """The JSON schema of ``trimtab.plots/1`` (draft 2020-12), as it is shipped."""
    text = resources.files(__package__ or "trimtab.scan.report").joinpath("plots.schema.json").read_text("utf-8")
    return json.loads(text)


def to_json(plots: ReportPlots) -> str:
    """``plots`` as compact JSON text, plain ASCII with a closing newline; what is unknown is null."""
    return json.dumps(as_dict(plots), separators=(",", ":"), allow_nan=False) + "\n"


def as_dict(plots: ReportPlots) -> dict[str, Any]:
    """Plain containers, ready for JSON. A part of which there is nothing is null."""
    return {
        "schema": SCHEMA,
        "heatmap": _heatmap(plots),
        "timeline": _timeline(plots),
        "by_rank": _by_rank(plots),
        "step_time": _step_time(plots.step_time_s),
    }


def _heatmap(plots: ReportPlots) -> dict[str, Any] | None:
    """Of too many ranks the worst; of too many steps as many a column as it takes, by the value furthest from 0."""
    values = plots.heatmap
    if not values.size:
        return None
    worst = np.where(np.isfinite(values), values, -np.inf).max(axis=1)
    rows = np.sort(np.argsort(-worst, kind="stable")[:MOST_HEATMAP_RANKS])
    columns = _columns(len(plots.heatmap_steps), max(1, MOST_CELLS // len(rows)))
    shown = np.stack([_furthest(values[rows, first:end]) for first, end in columns], axis=1)
    return {
        "ranks": [int(plots.heatmap_ranks[row]) for row in rows],
        "ranks_left_out": len(plots.heatmap_ranks) - len(rows),
        **_steps_of(plots.heatmap_steps, columns),
        "excess": [[_rounded(value, 4) for value in row] for row in shown.tolist()],
    }


def _furthest(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each row the value furthest from 0; NaN where all are."""
    distance = np.where(np.isfinite(values), np.abs(values), -1.0)
    return values[np.arange(len(values)), distance.argmax(axis=1)]


def _timeline(plots: ReportPlots) -> dict[str, Any] | None:
    """The longest stretches; each names its category and its label by their places in the lists of them."""
    if not plots.timeline:
        return None
    segments = coarse(plots.timeline, _SCREENS)
    kept = sorted(segments, key=lambda s: s.start_s - s.end_s)[:MOST_SEGMENTS]
    kept.sort(key=lambda s: (s.rank, s.start_s))
    labels: dict[str, int] = {}
    categories = {category: place for place, category in enumerate(Category)}
    ranks = sorted({segment.rank for segment in plots.timeline})
    return {
        "step": plots.timeline_step,
        "ranks": ranks,
        "ranks_left_out": max(0, len(plots.lost_by_rank) - len(ranks)),
        "categories": [category.value for category in categories],
        "segments": {
            "rank": [segment.rank for segment in kept],
            "start_s": [_rounded(segment.start_s, 9) for segment in kept],
            "end_s": [_rounded(segment.end_s, 9) for segment in kept],
            "category": [categories[segment.category] for segment in kept],
            "label": [labels.setdefault(clean(segment.label)[:LONGEST_LABEL], len(labels)) for segment in kept],
        },
        "labels": list(labels),
        "segments_left_out": len(segments) - len(kept),
    }


def _by_rank(plots: ReportPlots) -> dict[str, Any] | None:
    """Of too many ranks those that cost and wait most."""
    lost, waited = plots.lost_by_rank, plots.waited_by_rank
    every = lost.keys() | waited.keys() | plots.clock_error_us_by_rank.keys()
    if not every:
        return None
    costly = sorted(every, key=lambda rank: (-lost.get(rank, 0.0), -waited.get(rank, 0.0), rank))
    ranks = sorted(costly[:MOST_RANKS])
    return {
        "ranks": ranks,
        "ranks_left_out": len(every) - len(ranks),
        "lost_s": _values(lost, ranks, 9),
        "waited_s": _values(waited, ranks, 9),
        "clock_error_us": _values(plots.clock_error_us_by_rank, ranks, 3),
    }


def _step_time(times: Mapping[int, float]) -> dict[str, Any] | None:
    """Of several steps in one column the longest."""
    if not times:
        return None
    steps = sorted(times)
    columns = _columns(len(steps), MOST_STEP_TIMES)
    longest = [max(times[step] for step in steps[first:end]) for first, end in columns]
    return {**_steps_of(steps, columns), "seconds": [_rounded(value, 9) for value in longest]}


def _columns(steps: int, most: int) -> Columns:
    """Steps, evenly spread over at most ``most`` columns."""
    each = math.ceil(steps / most)
    return [(first, min(first + each, steps)) for first in range(0, steps, each)]


def _steps_of(steps: Sequence[int], columns: Columns) -> dict[str, list[int]]:
    return {
        "first_steps": [int(steps[first]) for first, _ in columns],
        "last_steps": [int(steps[end - 1]) for _, end in columns],
    }


def _values(values: Mapping[int, float], ranks: Iterable[int], digits: int) -> list[float | None]:
    return [_rounded(values.get(rank, math.nan), digits) for rank in ranks]


def _rounded(value: float, digits: int) -> float | None:
    return round(float(value), digits) if math.isfinite(value) else None
