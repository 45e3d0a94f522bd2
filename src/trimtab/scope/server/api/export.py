"""Figures to take away: CSV and NPZ, not thinned out."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.scope.server.answers import Binary, Problem
from trimtab.scope.server.api.common import (
    FIRST,
    LAST,
    MICROBATCH,
    RANKS,
    RUN,
    STATISTIC,
    STEP,
    WHAT,
    arrived_until,
    range_of,
    run_of,
    step_of,
)
from trimtab.scope.server.api.series import chosen_taps, whole_series
from trimtab.scope.server.endpoint import Call, Endpoint, text, word
from trimtab.scope.server.reduce import STATISTICS, Floats, Integers, derive
from trimtab.scope.server.runs import Run, file_part
from trimtab.scope.server.service import Service
from trimtab.scope.shards import join_pieces

CSV: Final = "text/csv; charset=utf-8"
NPZ: Final = "application/x-npz"
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would take a text that begins so for a formula."""
_CELL_BYTES: Final = 24


_Column = tuple[str, Integers, Floats]
"""Its name, which says no more than tells it from the others, steps, and values."""


def _export(service: Service, call: Call) -> object:
    run = run_of(service, call)
    columns: dict[str, tuple[Integers, Floats]] = {}
    cells = 0
    for name, step, value in _columns(service, call, run):
        columns[name] = (step, value)
        cells += len(step)
        _check(service, cells * _CELL_BYTES)
    every = np.unique(np.concatenate([step for step, _ in columns.values()]))
    _check(service, len(every) * len(columns) * _CELL_BYTES)
    table = np.full((len(every), len(columns)), np.nan)
    for place, (step, value) in enumerate(columns.values()):
        table[np.searchsorted(every, step), place] = value
    file = "-".join((run.file_name, file_part(call.text("pattern")), *_statistics(call)))
    if call.text("format") == "npz":
        return Binary(_npz(step=every, values=table, taps=np.array(list(columns))), NPZ, f"{file}.npz")
    return Binary(_csv(["step", *columns], every, table), CSV, f"{file}.csv")


def _columns(service: Service, call: Call, run: Run) -> Iterator[_Column]:
    first, last = range_of(run, call)
    statistics, each = _statistics(call), call.text("by") == "rank"
    for tap in chosen_taps(run, call.text("pattern")):
        for statistic in statistics:
            name = f"{tap} {statistic}" if len(statistics) > 1 else tap
            ranks = None if each else call.numbers("ranks")
            step, value, _ = whole_series(service, call, run, tap, ranks, statistic)
            inside = (step >= first) & (step <= last)
            yield name, step[inside], value[inside]
            if each:
                yield from _of_ranks(service, call, run, tap, statistic, name)


def _of_ranks(service: Service, call: Call, run: Run, tap: str, statistic: str, name: str) -> Iterator[_Column]:
    first, last = range_of(run, call)
    asked = call.numbers("ranks")
    ranks = asked if asked is not None else run.recording().ranks(tap)
    steps = run.recording().steps(tap, "statistics")
    _check(service, int(((steps >= first) & (steps <= last)).sum()) * len(ranks) * _CELL_BYTES)
    found: dict[int, list[tuple[Integers, Floats]]] = {rank: [] for rank in ranks}
    until = min(last, arrived_until(service, call, run, tap))
    for of, merged in run.recording().by_rank(tap, first, until, ranks):
        value = derive(statistic, merged.vector, merged.shift)
        for rank in np.unique(of).tolist():
            found[rank].append((merged.key[of == rank], value[of == rank]))
    for rank, parts in found.items():
        if parts:
            step, of_step = (np.concatenate(one) for one in zip(*parts, strict=True))
            yield f"{name} rank {rank}", step, of_step


def _statistics(call: Call) -> list[str]:
    """Those that are asked for, each once."""
    if not call.text("statistics"):
        return [call.text("statistic")]
    found = list(dict.fromkeys(call.text("statistics").split(",")))
    if unknown := [one for one in found if one not in STATISTICS]:
        raise Problem(400, f"statistics: {unknown[0][:40]!a} is none; there are {', '.join(STATISTICS)}")
    return found


def _frames(service: Service, call: Call) -> object:
    run, tap, what = run_of(service, call), call.text("tap"), call.text("what")
    step = step_of(service, call, run, tap, what)
    arrays: dict[str, NDArray[Any]] = {}
    for frame in join_pieces(run.recording().frames(tap, what, step, call.numbers("ranks"), call.maybe("microbatch"))):
        for name, array in frame.arrays.items():
            arrays[f"rank{frame.rank}.microbatch{frame.microbatch}.{name}"] = array
    _check(service, sum(array.nbytes for array in arrays.values()))
    return Binary(_npz(**arrays), NPZ, f"{run.file_name}-{file_part(tap)}-{what}-step{step}.npz")


def _check(service: Service, size: int) -> None:
    if size > service.limits.binary_bytes:
        raise Problem(
            413, f"that would be more than {service.limits.binary_bytes:,} bytes; ask for fewer steps or taps"
        )


def _npz(**arrays: NDArray[Any]) -> bytes:
    """Arrays of numbers and text only: nothing in it needs pickle to be read."""
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _csv(head: Sequence[str], steps: NDArray[Any], table: NDArray[Any]) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([harmless(text) for text in head])
    for step, row in zip(steps.tolist(), table.tolist(), strict=True):
        writer.writerow([step, *_cells(row)])
    return file.getvalue().encode()


def _cells(row: Iterable[float]) -> list[Any]:
    return ["" if value != value else value for value in row]


def harmless(text: str) -> str:
    """A text as a cell that no spreadsheet computes."""
    return f"'{text}" if text.startswith(_FORMULA) else text


_PATTERN: Final = text("pattern", "Which tensors", required=True)

ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/runs/{run}/export",
        "export",
        "A statistic of tensors at every step.",
        _export,
        parameters=(
            RUN,
            _PATTERN,
            STATISTIC,
            text("statistics", "Several of them, with commas in between, in place of one"),
            FIRST,
            LAST,
            RANKS,
            word("by", "A column each: the whole tensor, or that and each rank", "whole", "rank", default="whole"),
            word("format", "Kind of file", "csv", "npz", default="csv"),
        ),
        media=(CSV, NPZ),
        tag="export",
    ),
    Endpoint(
        "GET",
        "/runs/{run}/export/frames",
        "exportFrames",
        "The arrays of all frames of a tensor at a step.",
        _frames,
        parameters=(RUN, text("tap", "The tensor", required=True), WHAT, STEP, MICROBATCH, RANKS),
        media=(NPZ,),
        tag="export",
    ),
)
