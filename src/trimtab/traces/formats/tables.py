"""What readers of other programs' traces have in common: the way into the event table, and times that make no sense."""

from __future__ import annotations

from typing import Final

import polars as pl

from trimtab.traces.own_rank import MOST_TIME_NS
from trimtab.traces.table import COLUMNS

NS_PER_S: Final = 1e9
NS_PER_US: Final = 1e3


def event_table(frame: pl.DataFrame) -> pl.DataFrame:
    """``frame`` with the columns of an event table in their types: what it has no column for is null, others go."""
    columns = [
        pl.col(name).cast(kind) if name in frame.columns else pl.lit(None, kind).alias(name)
        for name, kind in COLUMNS.items()
    ]
    return frame.select(columns)


def whole_times(
    frame: pl.DataFrame, start: pl.Expr, duration: pl.Expr, unit_ns: float
) -> tuple[pl.DataFrame, list[str]]:
    """``frame`` with ``start`` and ``end`` in whole nanoseconds from floating times in units of ``unit_ns``.

    Rows whose times are no numbers, or a century away, are left out; of a negative duration only the start is kept.
    The second value holds warnings of both.
    """
    begin = (start.cast(pl.Float64) * unit_ns).alias("start")
    length = (duration.cast(pl.Float64) * unit_ns).alias("length")
    timed = frame.with_columns(begin, length)
    placed = (pl.col("start").abs() + pl.col("length").abs()) < MOST_TIME_NS  # false for NaN, infinity and null
    usable = timed.filter(placed.fill_null(False))
    warnings: list[str] = []
    if lost := len(timed) - len(usable):
        warnings.append(f"{lost} of {len(timed)} events have no time that makes sense; left out")
    if negative := int((usable["length"] < 0).sum()):
        warnings.append(f"{negative} events end before they begin; their duration is taken as 0")
    whole = [pl.col(name).round().cast(pl.Int64) for name in ("start", "length")]
    usable = usable.with_columns(pl.col("length").clip(lower_bound=0.0)).with_columns(whole)
    return usable.with_columns(end=pl.col("start") + pl.col("length")).drop("length"), warnings
