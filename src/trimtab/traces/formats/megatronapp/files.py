"""MegatronApp's files as rows: one span each, with the step and the place in the layout that it tells.

The format: github.com/OpenSQZ/MegatronApp, ``megatron/training/trace.py`` (a file a rank), ``aggregate.py`` and
``scripts/aggregate.py`` (which merge them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from trimtab.traces.formats.pairs import Pairs
from trimtab.traces.own_header import printable
from trimtab.traces.trace_events import TraceEvents

Number = float | None

BEGIN, END, REDUCE = "iteration begin", "iteration end", "reduce"
"""Moments in merged files of the plain pipeline: spans without a duration here."""
ITERATION: Final = "iteration"
"""A step in a rank's own file: a span."""
_NAME: Final = re.compile(r"data-(\d{1,6})-pipeline-(\d{1,6})-tensor-(\d{1,6})")
_MOST_ITERATIONS: Final = 1 << 30
_MOST_TIME: Final = 1 << 52
"""Of times, in the units of the files: they stay whole as floats."""


class _Where(msgspec.Struct, gc=False):
    """What a span can say about itself, on the event or in its ``args``."""

    iteration: Number = None
    microbatch: Number = None
    micro_batch_index: Number = None
    model_chunk: Number = None
    pp_rank: Number = None
    dp_rk: Number = None
    pp_rk: Number = None
    tp_rk: Number = None
    g_rk: Number = None
    data: Number = None
    """Bytes sent or received."""


class _Event(_Where, gc=False):
    name: str = ""
    ph: str = ""
    ts: Number = None
    """Microseconds."""
    dur: Number = None
    pid: Number | str = None
    tid: Number | str = None
    rel_ts: Number = None
    """Of a rank's own file: nanoseconds since the begin of the iteration."""
    pad_before: Number = None
    duration_wall: Number = None
    args: _Where = msgspec.field(default_factory=_Where)


_WHERE: Final = tuple(field for field in _Where.__struct_fields__ if field != "micro_batch_index")
_INTEGERS: Final = (*_WHERE, "pid", "tid")
SCHEMA: Final[dict[str, Any]] = {
    "name": pl.String,
    "start": pl.Float64,
    "end": pl.Float64,
    **dict.fromkeys(_INTEGERS, pl.Int64),
}
"""Columns of the rows; the times are nanoseconds, within their iteration in a rank's own file, else on one axis."""


@dataclass(slots=True)
class Rows:
    """The spans of one file."""

    path: Path
    frame: pl.DataFrame
    merged: bool
    """It holds all ranks."""
    place: tuple[int, int, int] | None = None
    """The coordinates (dp, pp, tp) in the name of a rank's own file."""
    iterations: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Of a rank's own file: for each iteration the time before it and its length, in nanoseconds."""
    problems: list[str] = field(default_factory=list[str])


def read_rows(path: Path) -> Rows:
    """The spans of the file at ``path``; ValueError, in one line, where there are none."""
    events: TraceEvents[_Event] = TraceEvents(path, _Event)
    spans: Pairs[tuple[_Event, float]] = Pairs()
    own = _OwnFile()
    rows: list[tuple[Any, ...]] = []
    merged = False
    for event in _flat(events):
        merged |= event.rel_ts is None and event.ts is not None
        time = own.time(event) if not merged else (event.ts or 0.0) * 1e3
        thread = (event.pid, event.tid)
        if event.ph == "B":
            spans.begin(thread, event.name, (event, time))
        elif event.ph == "E":
            if (begun := spans.end(thread, event.name)) is not None:
                rows.append(_row(begun[0], event, begun[1], time))
        elif event.ph == "X":
            rows.append(_row(event, event, time, time + (event.dur or 0.0) * 1e3))
        elif event.ph in ("i", "I"):
            rows.append(_row(event, event, time, time))
    problems = list(events.problems)
    if lost := spans.unmatched + spans.left():
        problems.append(f"{printable(path)}: {lost} begins or ends of spans have no counterpart; left out")
    if not rows:
        raise ValueError(f"{printable(path)}: a file of MegatronApp without a single span")
    named = _NAME.search(path.name)
    return Rows(
        path,
        pl.DataFrame(rows, schema=SCHEMA, orient="row"),
        merged,
        None if named is None or merged else (int(named[1]), int(named[2]), int(named[3])),
        own.iterations,
        problems,
    )


class _OwnFile:
    """The iterations of a rank's own file, in which only the order says where an event belongs."""

    def __init__(self) -> None:
        self.iterations: list[tuple[float, float]] = []

    def time(self, event: _Event) -> float:
        """When it was, since the begin of its iteration; ``event`` then knows which that is."""
        if event.pad_before is not None:
            self.iterations.append((event.pad_before, 0.0))
        elif event.duration_wall is not None and self.iterations:
            self.iterations[-1] = (self.iterations[-1][0], event.duration_wall)
        event.iteration = float(len(self.iterations) - 1) if self.iterations else None
        return event.rel_ts or 0.0


def _flat(events: TraceEvents[_Event]) -> Iterator[_Event]:
    """All events, with what they say in their ``args`` on themselves."""
    for batch in events:
        for event in batch:
            for name in _Where.__struct_fields__:
                value = getattr(event.args, name)
                if value is not None:
                    setattr(event, name, value)
            if event.microbatch is None:
                event.microbatch = event.micro_batch_index
            yield event


def _row(begin: _Event, end: _Event, start: float, stop: float) -> tuple[Any, ...]:
    """What is known at the end counts before what was known at the begin."""
    said = (getattr(end, name) if getattr(end, name) is not None else getattr(begin, name) for name in _INTEGERS)
    return begin.name, _time(start), _time(stop), *map(_whole, said)


def _time(value: float) -> float | None:
    return value if abs(value) < _MOST_TIME * 1e3 else None


def _whole(value: Any) -> int | None:
    """A count or a number of something; None where it is none."""
    return int(value) if isinstance(value, int | float) and abs(value) < _MOST_ITERATIONS else None
