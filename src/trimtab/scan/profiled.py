"""Steps with an open profiler window: the profiler slows its rank down, so they say nothing about the job."""

from __future__ import annotations

import json
from typing import Any, cast

import polars as pl

from trimtab.events import NAME_WINDOW, Kind

LEAST_STEPS = 3
_LONGEST = 10_000


def without_profiled(events: pl.DataFrame, spans: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """``spans`` (``rank, step, ...``) without the steps in which any rank had a profiler window open, and a warning.

    They stay where fewer than three others would be left, which is said, too.
    """
    profiled = _profiled(events)
    if not profiled:
        return spans, []
    kept = spans.filter(~pl.col("step").is_in(sorted(profiled)))
    hit = spans["step"].n_unique() - kept["step"].n_unique()
    if not hit:
        return spans, []
    if kept["step"].n_unique() < LEAST_STEPS:
        return spans, [f"{hit} steps had a profiler window open, which slows a rank down; too few others to do without"]
    return kept, [f"{hit} steps had a profiler window open, which slows a rank down; they are not judged"]


def _profiled(events: pl.DataFrame) -> set[int]:
    """Steps of all windows; what a damaged file says about one is passed over."""
    if "args" not in events.columns:
        return set()
    marks = events.filter((pl.col("kind") == Kind.HOST.value) & (pl.col("name").cast(pl.String) == NAME_WINDOW))
    steps: set[int] = set()
    for text in marks["args"].drop_nulls().unique().to_list():
        first, last = _ends(text)
        if 0 <= first <= last < first + _LONGEST:
            steps.update(range(first, last + 1))
    return steps


def _ends(text: str) -> tuple[int, int]:
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError):
        return -1, -1
    if not isinstance(said, dict):
        return -1, -1
    ends = [cast(dict[str, Any], said).get(key) for key in ("first", "last")]
    return (ends[0], ends[1]) if all(type(end) is int for end in ends) else (-1, -1)  # type: ignore[return-value]
