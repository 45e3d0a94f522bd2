"""Statistics over steps: of a tensor, of layers, of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.frame import Frame, encode
from trimtab.scope.names import Pattern, no_match
from trimtab.scope.server.answers import FRAMES, JSON, Binary, Problem
from trimtab.scope.server.api.common import (
    FIRST,
    LAST,
    RANKS,
    RUN,
    STATISTIC,
    STEP,
    TAP,
    arrived_until,
    buckets,
    check_cells,
    known_steps,
    newest_of,
    range_of,
    run_of,
    step_of,
)
from trimtab.scope.server.endpoint import Call, Endpoint, text, word
from trimtab.scope.server.reduce import Floats, Integers, Merged, derive, thin, width_of
from trimtab.scope.server.runs import Run
from trimtab.scope.server.schema import INTEGER, NUMBER, TEXT, TRUTH, Schema, listed, maybe, record, said
from trimtab.scope.server.service import Service

_VALUES: Final[Schema] = listed(maybe(NUMBER))
_SERIES: Final[Schema] = record(
    rank=said(maybe(INTEGER), "null: the whole tensor, merged over ranks."),
    step=said(listed(INTEGER), "First step of each bucket that holds any."),
    min=_VALUES,
    max=_VALUES,
    mean=_VALUES,
    count=said(listed(INTEGER), "Steps in the bucket."),
    nan=said(listed(INTEGER), "Most NaN in a step of the bucket."),
    inf=listed(INTEGER),
)
_MOST_TAPS: Final = 512
_MOST_NAMES: Final = 32 << 10
"""Characters of the rows' names in the header of a frame; of longer ones, who asks knows them."""
_FRAME_VALUES: Final = 1 << 17
_COLUMNS: Final = 7
"""Numbers that a bucket of a series has."""


def whole_series(
    service: Service, call: Call, run: Run, tap: str, ranks: tuple[int, ...] | None, statistic: str
) -> tuple[Integers, Floats, Merged]:
    """Steps, a statistic of each, and what it is made of."""
    merged = _until(run.recording().whole(tap, ranks), arrived_until(service, call, run, tap))
    return merged.key, derive(statistic, merged.vector, merged.shift), merged


def _until(merged: Merged, last: int) -> Merged:
    return merged.until(int(np.searchsorted(merged.key, last, side="right")))


def _series(service: Service, call: Call) -> dict[str, Any]:
    run, tap, statistic = run_of(service, call), call.text("tap"), call.text("statistic")
    known_steps(run, tap, "statistics")
    first, last = range_of(run, call)
    ranks, columns = call.numbers("ranks"), call.whole("buckets")
    groups: list[tuple[int | None, tuple[int, ...] | None]] = [(None, ranks)]
    if call.text("by") == "rank":
        groups = [(rank, (rank,)) for rank in (ranks if ranks is not None else run.recording().ranks(tap))]
    check_cells(service, len(groups) * min(columns, last - first + 1) * _COLUMNS)
    found = [
        {"rank": rank, **_thinned(*whole_series(service, call, run, tap, of, statistic), first, last, columns)}
        for rank, of in groups
    ]
    width = width_of(first, last, columns)
    return {"tap": tap, "statistic": statistic, "first": first, "last": last, "bucket_steps": width, "series": found}


def _thinned(step: Integers, value: Floats, merged: Merged, first: int, last: int, columns: int) -> dict[str, Any]:
    thinned = thin(step, value, first, last, columns)
    nan, inf = (thin(step, derive(name, merged.vector, merged.shift), first, last, columns) for name in ("nan", "inf"))
    return {
        "step": thinned.first,
        "min": thinned.minimum,
        "max": thinned.maximum,
        "mean": thinned.mean,
        "count": thinned.steps,
        "nan": nan.maximum.astype(np.int64),
        "inf": inf.maximum.astype(np.int64),
    }


def chosen_taps(run: Run, pattern: str) -> list[str]:
    """Names of recorded tensors that a pattern means; :class:`Problem` for none, or too many."""
    names = list(run.recording().taps())
    try:
        matcher = Pattern(pattern)
    except ValueError as error:
        raise Problem(400, str(error)) from None
    chosen = [name for name in names if matcher.matches(name)]
    if not chosen:
        raise Problem(404, f"{run.name}: {no_match(pattern, names)}")
    if len(chosen) > _MOST_TAPS:
        raise Problem(413, f"{pattern[:80]!a} means {len(chosen)} taps, more than {_MOST_TAPS}")
    return chosen


def _matrix(service: Service, call: Call) -> object:
    run, statistic = run_of(service, call), call.text("statistic")
    first, last = range_of(run, call)
    columns = call.whole("buckets")
    width = width_of(first, last, columns)
    if call.text("rows") == "ranks":
        known_steps(run, call.text("pattern"), "statistics")
        rows: list[Any] = list(call.numbers("ranks") or run.recording().ranks(call.text("pattern")))
    else:
        rows = chosen_taps(run, call.text("pattern"))
    cells = len(rows) * ((last - first) // width + 1)
    if call.text("format") == "json":
        check_cells(service, cells)
    elif cells * 4 > service.limits.binary_bytes:
        raise Problem(413, f"that would be {cells * 4:,} bytes, more than {service.limits.binary_bytes:,}")
    special = np.zeros((len(rows), (last - first) // width + 1), np.uint8)
    until = min(last, arrived_until(service, call, run, call.text("pattern")))
    if call.text("rows") == "ranks":
        reduce, shown = call.text("reduce"), (first, until, width)
        values = _of_ranks(run, call.text("pattern"), rows, statistic, reduce, shown, special)
    else:
        values = np.full(special.shape, np.nan)
        for row, name in enumerate(rows):
            merged = _until(run.recording().whole(name, call.numbers("ranks")), until)
            step, value = merged.key, derive(statistic, merged.vector, merged.shift)
            thinned = thin(step, value, first, last, columns)
            values[row, (thinned.first - first) // width] = getattr(thinned, _REDUCED[call.text("reduce")])
            inside = (step >= first) & (step <= last)
            np.bitwise_or.at(special[row], (step[inside] - first) // width, _flags(merged)[inside])
    about = {
        "statistic": statistic,
        "first": first,
        "last": last,
        "bucket_steps": width,
        "reduce": call.text("reduce"),
        "rows": rows,
    }
    if call.text("format") == "binary":
        return Binary(b"".join(_as_frames(about, values.astype(np.float32), special)))
    return {**about, "columns": list(range(first, last + 1, width)), "values": values}


_REDUCED: Final = {"mean": "mean", "max": "maximum", "min": "minimum"}
_THERE, _HAS_NAN, _HAS_INF = 1, 2, 4
"""Bits of ``special``."""


def _flags(merged: Merged) -> NDArray[np.uint8]:
    """Of each vector: it is there, it has NaN, it has infinities."""
    nan, inf = (derive(name, merged.vector, merged.shift) > 0 for name in ("nan", "inf"))
    return (_THERE + _HAS_NAN * nan + _HAS_INF * inf).astype(np.uint8)


def _as_frames(about: dict[str, Any], values: NDArray[np.float32], special: NDArray[np.uint8]) -> Iterator[bytes]:
    """Rows below each other, as many in a frame as it may hold; ``meta`` says which is the first."""
    many = max(_FRAME_VALUES // max(values.shape[1], 1), 1)
    for begin in range(0, len(values), many):
        rows = slice(begin, begin + many)
        names = [str(row) for row in about["rows"][rows]]
        named = sum(map(len, names)) <= _MOST_NAMES
        meta = {**about, "rows": names if named else [], "first_row": begin, "all_rows": len(values)}
        arrays: dict[str, NDArray[Any]] = {"values": values[rows], "special": special[rows]}
        yield encode(Frame("matrix", "raw", "", about["last"], 0, 0, arrays=arrays, meta=meta))


def _of_ranks(
    run: Run,
    tap: str,
    ranks: Sequence[int],
    statistic: str,
    reduce: str,
    shown: tuple[int, int, int],
    special: NDArray[np.uint8],
) -> Floats:
    """(ranks, buckets), reduced over the steps of each bucket; fills in ``special``, of the same shape. ``shown``: the
    first and the last step, and how many are in a bucket."""
    first, last, width = shown
    numbers = np.array(ranks, np.int64)
    order = np.argsort(numbers)
    start, fold = _FOLDS[reduce]
    found, count = np.full(special.shape, start), np.zeros(special.shape)
    for rank, merged in run.recording().by_rank(tap, first, last, ranks):
        value = derive(statistic, merged.vector, merged.shift)
        row, column = order[np.searchsorted(numbers[order], rank)], (merged.key - first) // width
        np.bitwise_or.at(special, (row, column), _flags(merged))
        known = ~np.isnan(value)
        cells = (row[known], column[known])
        fold.at(found, cells, value[known])
        np.add.at(count, cells, 1.0)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, found / count if reduce == "mean" else found, np.nan)


_FOLDS: Final[dict[str, tuple[float, Any]]] = {
    "mean": (0.0, np.add),
    "max": (-np.inf, np.maximum),
    "min": (np.inf, np.minimum),
}


def _grid(service: Service, call: Call) -> object:
    run, tap, statistic = run_of(service, call), call.text("tap"), call.text("statistic")
    step = step_of(service, call, run, tap, "statistics")
    last = newest_of(service, call, run, tap, "statistics")
    places = service.coordinates(run)
    cells: list[dict[str, Any]] = []
    for ranks, merged in run.recording().by_rank(tap, step, step):
        value, nan, inf = (derive(name, merged.vector, merged.shift) for name in (statistic, "nan", "inf"))
        for place, rank in enumerate(ranks.tolist()):
            about = {"rank": rank, "coordinates": places.get(rank, {}), "value": float(value[place])}
            cells.append({**about, "nan": int(nan[place]), "inf": int(inf[place])})
    complete = last.complete or step < last.step
    return {"tap": tap, "statistic": statistic, "step": step, "complete": complete, "ranks": cells}


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/runs/{run}/series",
        "series",
        "A statistic of a tensor over steps, thinned out so that no peak is lost.",
        _series,
        record(tap=TEXT, statistic=TEXT, first=INTEGER, last=INTEGER, bucket_steps=INTEGER, series=listed(_SERIES)),
        (
            RUN,
            TAP,
            STATISTIC,
            FIRST,
            LAST,
            RANKS,
            buckets(1000),
            word("by", "One series, or one a rank", "whole", "rank", default="whole"),
        ),
        tag="runs",
    ),
    Endpoint(
        "GET",
        "/runs/{run}/matrix",
        "matrix",
        "A statistic of many tensors (layers), or of many ranks, over steps.",
        _matrix,
        record(
            statistic=TEXT,
            first=INTEGER,
            last=INTEGER,
            bucket_steps=INTEGER,
            reduce=TEXT,
            rows=said(listed({"type": ["string", "integer"]}), "Names of taps, or ranks."),
            columns=said(listed(INTEGER), "First step of each."),
            values=said(listed(_VALUES), "A list for each row; null: nothing there."),
        ),
        (
            RUN,
            text("pattern", "Taps, or with rows=ranks the one tap", required=True),
            STATISTIC,
            FIRST,
            LAST,
            RANKS,
            buckets(500),
            word("rows", "What the rows are", "taps", "ranks", default="taps"),
            word("reduce", "What is shown of the steps of a column", "mean", "max", "min", default="mean"),
            word(
                "format",
                "binary: frames with values (float32) and special (bits: 1 there, 2 NaN, 4 infinite)",
                "json",
                "binary",
                default="json",
            ),
        ),
        media=(JSON, FRAMES),
        tag="runs",
    ),
    Endpoint(
        "GET",
        "/runs/{run}/grid",
        "grid",
        "A statistic of a tensor on each rank at one step.",
        _grid,
        record(
            tap=TEXT,
            statistic=TEXT,
            step=INTEGER,
            complete=said(TRUTH, "Everything of this step has come: each rank sent it, and all microbatches of it."),
            ranks=listed(
                record(
                    rank=INTEGER,
                    coordinates=said({"type": "object"}, "tp, cp, dp, pp, ...: where the rank stands."),
                    value=maybe(NUMBER),
                    nan=INTEGER,
                    inf=INTEGER,
                )
            ),
        ),
        (RUN, TAP, STATISTIC, STEP),
        tag="runs",
    ),
)
