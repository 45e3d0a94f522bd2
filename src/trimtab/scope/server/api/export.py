"""Figures to take away: CSV and NPZ, not thinned out."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
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
    range_of,
    run_of,
    step_of,
)
from trimtab.scope.server.api.series import chosen_taps, whole_series
from trimtab.scope.server.endpoint import Call, Endpoint, text, word
from trimtab.scope.server.service import Service
from trimtab.scope.shards import join_pieces

CSV: Final = "text/csv; charset=utf-8"
NPZ: Final = "application/x-npz"
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet would take a text that begins so for a formula."""
_CELL_BYTES: Final = 24


def _export(service: Service, call: Call) -> object:
    run = run_of(service, call)
    first, last = range_of(run, call)
    taps = chosen_taps(run, call.text("pattern"))
    columns: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    cells = 0
    for tap in taps:
        step, value, _ = whole_series(run, tap, call.numbers("ranks"), call.text("statistic"))
        inside = (step >= first) & (step <= last)
        columns[tap] = (step[inside], value[inside])
        cells += int(inside.sum())
        _check(service, cells * _CELL_BYTES)
    every = np.unique(np.concatenate([step for step, _ in columns.values()]))
    _check(service, len(every) * len(taps) * _CELL_BYTES)
    table = np.full((len(every), len(taps)), np.nan)
    for place, (step, value) in enumerate(columns.values()):
        table[np.searchsorted(every, step), place] = value
    name = f"{run.file_name}-{call.text('statistic')}"
    if call.text("format") == "npz":
        return Binary(_npz(step=every, values=table, taps=np.array(taps)), NPZ, f"{name}.npz")
    return Binary(_csv(["step", *taps], every, table), CSV, f"{name}.csv")


def _frames(service: Service, call: Call) -> object:
    run, tap, what = run_of(service, call), call.text("tap"), call.text("what")
    step = step_of(run, tap, what, call.maybe("step"))
    arrays: dict[str, NDArray[Any]] = {}
    for frame in join_pieces(run.recording().frames(tap, what, step, call.numbers("ranks"), call.maybe("microbatch"))):
        for name, array in frame.arrays.items():
            arrays[f"rank{frame.rank}.microbatch{frame.microbatch}.{name}"] = array
    _check(service, sum(array.nbytes for array in arrays.values()))
    return Binary(_npz(**arrays), NPZ, f"{run.file_name}-{what}-step{step}.npz")


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
            FIRST,
            LAST,
            RANKS,
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
