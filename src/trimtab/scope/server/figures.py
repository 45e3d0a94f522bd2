"""What the figures of scan's report are drawn from, as a file has it that others may have written (trimtab.plots/1)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, cast

from trimtab.scope.fields import Fields

PLOTS_SCHEMA: Final = "trimtab.plots/1"
CATEGORIES: Final = ("forward", "backward", "wgrad", "optimizer", "kernel", "other", "transfer", "wait", "gap")
"""What a stretch of the timeline was spent on."""
_MOST: Final = 65_536
_LARGEST: Final = sys.float_info.max
_LONGEST_LABEL: Final = 200


def checked_plots(value: object, what: str, most_cells: int) -> dict[str, Any]:
    """``value``, if it is what it should be; ValueError, in one line that begins with ``what``, where it is not.

    ``most_cells``: numbers of the heat map.
    """
    said = Fields(value, what)
    schema = said.text("schema")
    if schema != PLOTS_SCHEMA:
        raise ValueError(f"{what}: schema is {schema[:40]!a}, and {PLOTS_SCHEMA} is what is known here")
    for name, check in (("timeline", _timeline), ("by_rank", _by_rank), ("step_time", _step_time)):
        part = said.anything(name)
        if part is not None:
            check(Fields(part, f"{what}: {name}"))
    heatmap = said.anything("heatmap")
    if heatmap is not None:
        _heatmap(Fields(heatmap, f"{what}: heatmap"), most_cells)
    said.done()
    return cast("dict[str, Any]", value)


def _heatmap(said: Fields, most_cells: int) -> None:
    rows, columns = len(_ranks(said)), _steps(said)
    excess = _list(said, "excess", rows)
    if rows * columns > most_cells:
        raise ValueError(f"{said.what}: it has {rows * columns} cells, more than {most_cells}")
    for row in excess:
        _check_numbers(said, "excess", row, columns)
    said.done()


def _timeline(said: Fields) -> None:
    step = said.anything("step")
    if step is not None:
        Fields({"step": step}, said.what).integer("step")
    ranks = set(_ranks(said))
    categories = _texts(said, "categories", len(CATEGORIES))
    if unknown := [name for name in categories if name not in CATEGORIES]:
        raise ValueError(f"{said.what}: categories has {ascii(unknown[0])[:80]}, which is unknown")
    labels = _texts(said, "labels", _MOST)
    said.integer("segments_left_out")
    segments = Fields(said.object("segments"), f"{said.what}: segments")
    said.done()
    found = segments.integers("rank")
    if not ranks.issuperset(found):
        raise ValueError(f"{segments.what}: rank has one that is not among ranks")
    for name, most in (("category", len(categories)), ("label", len(labels))):
        _same_length(segments, name, len(found), segments.integers(name, high=max(most - 1, 0)))
    start, end = (_list(segments, name, len(found)) for name in ("start_s", "end_s"))
    for name, times in (("start_s", start), ("end_s", end)):
        _check_numbers(segments, name, times, len(found), unknown=False)
    if any(until < since for since, until in zip(start, end, strict=True)):
        raise ValueError(f"{segments.what}: one ends before it starts")
    segments.done()


def _by_rank(said: Fields) -> None:
    ranks = len(_ranks(said))
    for name in ("lost_s", "waited_s", "clock_error_us"):
        _check_numbers(said, name, said.anything(name), ranks)
    said.done()


def _step_time(said: Fields) -> None:
    _check_numbers(said, "seconds", said.anything("seconds"), _steps(said))
    said.done()


def _ranks(said: Fields) -> Sequence[int]:
    said.integer("ranks_left_out")
    return _ascending(said, "ranks", said.integers("ranks"))


def _steps(said: Fields) -> int:
    """How many columns of steps there are."""
    first, last = (_ascending(said, name, said.integers(name)) for name in ("first_steps", "last_steps"))
    _same_length(said, "last_steps", len(first), last)
    if any(until < since for since, until in zip(first, last, strict=True)):
        raise ValueError(f"{said.what}: a column ends before it begins")
    return len(first)


def _ascending(said: Fields, name: str, values: Sequence[int]) -> Sequence[int]:
    if any(one >= other for one, other in pairwise(values)):
        raise ValueError(f"{said.what}: {name} is to be in ascending order, each once")
    return values


def _texts(said: Fields, name: str, most: int) -> list[str]:
    found = said.anything(name)
    if not isinstance(found, list):
        raise ValueError(f"{said.what}: {name} is to be a list of texts, not {ascii(found)[:80]}")
    listed = cast("list[Any]", found)
    if len(listed) > most or not all(isinstance(one, str) and len(one) <= _LONGEST_LABEL for one in listed):
        raise ValueError(f"{said.what}: {name} is to be at most {most} texts of at most {_LONGEST_LABEL} characters")
    return listed


def _list(said: Fields, name: str, length: int) -> list[Any]:
    found = said.anything(name)
    if not isinstance(found, list):
        raise ValueError(f"{said.what}: {name} is to be a list, not {ascii(found)[:80]}")
    listed = cast("list[Any]", found)
    _same_length(said, name, length, listed)
    return listed


def _check_numbers(said: Fields, name: str, values: object, length: int, *, unknown: bool = True) -> None:
    """``unknown``: some may be null."""
    if not isinstance(values, list):
        raise ValueError(f"{said.what}: {name} is to be a list of numbers, not {ascii(values)[:80]}")
    listed = cast("list[Any]", values)
    _same_length(said, name, length, listed)
    if not all(unknown if one is None else _is_number(one) for one in listed):
        raise ValueError(f"{said.what}: {name} has something in it that is no number")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _same_length(said: Fields, name: str, length: int, values: Sequence[object]) -> None:
    if len(values) != length:
        raise ValueError(f"{said.what}: {name} has {len(values)} entries, and {length} belong there")
