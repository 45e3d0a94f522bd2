"""Kernels of a profiler window as events of its run: each with its step and the span or communication it belongs to.

The recorder writes the windows (``[record.window]``, see docs/windows.md). While one is open, each recorded span lies
inside an annotation that carries its ``event_id``. A kernel leads by Kineto's correlation id to the call that launched
it, and that call lies in annotations of its thread: the innermost is what the kernel belongs to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from trimtab.events import NAME_WINDOW, Kind
from trimtab.traces.kineto import Slices, read_kineto
from trimtab.traces.own import FOLDERS_BELOW
from trimtab.traces.own_header import printable
from trimtab.traces.own_rank import MOST_TIME_NS
from trimtab.traces.table import COLUMNS, KIND, Trace, integers, texts

Integers = NDArray[np.int64]

WINDOW_FILES: Final = "rank*-window-*.pt.trace.json.gz"
_ANNOTATION: Final = re.compile(r"trimtab(|-begin|-end):(\d{1,18})(?: |$)", re.ASCII)
_STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})$", re.ASCII)
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver", "hip_runtime")
_ON_HOST: Final = "cpu_op"
_ANNOTATES: Final = "user_annotation"
_MOST_DRIFT: Final = 0.01
"""Of one clock against the other."""
_OPENING: Final = '"part": "opening"'


class _Metadata(msgspec.Struct, gc=False):
    """What the recorder wrote into the file under ``trimtab``."""

    run_id: str
    attempt: int
    rank: int
    first_step: int
    last_step: int
    opening_ns: int
    """Start of the run's event that tells of the opening, on the recorder's clock."""
    clock_unix_ns: tuple[tuple[int, int], tuple[int, int]]
    """The recorder's clock and Unix time at two moments."""


@dataclass(frozen=True, slots=True)
class Window:
    """One window of one rank."""

    events: pl.DataFrame
    """Columns of an event table, kind ``kernel``, times as in the run's trace. Kernels and copies on a GPU (``ready``
    is when they were launched); where there are none, the operators of the CPU, those within others, too. ``step``
    and ``correlation_id`` (the ``event_id`` of the span or communication) are null for what belongs to none."""
    rank: int
    first: int
    last: int
    lag_us: tuple[float, float]
    """How much later than by the recorder's clock the annotated spans begin by the profiler's: median and largest. A
    few microseconds lie between the two readings; what is beyond that is the error of the clocks."""


@dataclass(frozen=True, slots=True)
class _Intervals:
    """Annotations of one thread: n intervals, of which each has a number."""

    start: list[int]
    end: list[int]
    number: list[int]

    def innermost(self, times: Integers) -> Integers:
        """For each time the number of the interval begun last that holds it; -1: none does."""
        edges = sorted(
            edge
            for place, (start, end) in enumerate(zip(self.start, self.end, strict=True))
            if end > start
            for edge in ((start, 1, place), (end, 0, place))
        )
        inside: dict[int, None] = {}  # in the order of their begins
        holds = np.full(len(edges) + 1, -1, np.int64)
        for row, (_, begins, place) in enumerate(edges, 1):
            if begins:
                inside[place] = None
            else:
                inside.pop(place, None)
            holds[row] = self.number[next(reversed(inside))] if inside else -1
        return holds[np.searchsorted(np.array([edge[0] for edge in edges], np.int64), times, side="right")]


def find_windows(path: Path) -> list[Path]:
    """The window files of the run at ``path``, a directory: in it, or in the folders below, where there are any."""
    for depth in range(FOLDERS_BELOW + 1):
        found = sorted(file for file in path.glob("*/" * depth + WINDOW_FILES) if file.is_file())
        if found:
            return found
    return []


def read_window(path: Path, trace: Trace) -> Window:
    """Kernels of the window file at ``path``, joined with its run, which is ``trace``.

    Raises ValueError, in one line, where the file cannot be read, or is not of this run.
    """
    slices, said = read_kineto(path)
    try:
        metadata = msgspec.convert(said, _Metadata)
    except msgspec.ValidationError as error:
        raise ValueError(f"{printable(path)}: not written by trimtab's recorder ({printable(error)})") from None
    if (metadata.run_id, metadata.attempt) != (trace.run_id, trace.attempt):
        run = printable(f"{metadata.run_id}, attempt {metadata.attempt}")
        raise ValueError(f"{printable(path)}: of another run ({run}); read that one, too")
    own = trace.events.filter(pl.col("rank") == metadata.rank)
    offset = _offset(own, metadata)
    if offset is None:
        raise ValueError(f"{printable(path)}: the run's files do not tell of this window (removed, or still running)")
    try:
        to_trace = _Clock(metadata, offset)
    except ValueError as error:
        raise ValueError(f"{printable(path)}: {error}") from None
    annotations, steps = _annotations(slices)
    return Window(
        _table(slices, annotations, steps, to_trace, metadata.rank),
        metadata.rank,
        metadata.first_step,
        metadata.last_step,
        _lag(own, annotations, to_trace),
    )


def with_kernels(trace: Trace, windows: Iterable[Window]) -> Trace:
    """``trace`` and the kernels of its ``windows`` in one event table."""
    frames = [trace.events, *(window.events.select(trace.events.columns) for window in windows)]
    return replace(trace, events=pl.concat(frames))


class _Clock:
    """From Unix time in the profiler's file to the trace's time."""

    def __init__(self, metadata: _Metadata, offset: int) -> None:
        (h0, u0), (h1, u1) = metadata.clock_unix_ns
        self._unix = u0
        self._rate = (h1 - h0) / (u1 - u0) - 1.0 if u1 > u0 else 0.0  # of what they differ, so that nothing is rounded
        self._shift = h0 - u0 + offset
        if abs(self._rate) > _MOST_DRIFT or max(abs(self._shift), abs(u0)) > MOST_TIME_NS >> 1:
            raise ValueError("its readings of the clocks contradict each other")

    def __call__(self, unix: Integers) -> Integers:
        drift = np.rint((unix - self._unix) * self._rate).astype(np.int64)
        return unix + drift + self._shift


def _offset(own: pl.DataFrame, metadata: _Metadata) -> int | None:
    """What the reader of the run has added to the recorder's clock: known from an event whose time on it is known."""
    opening = own.filter(
        (pl.col("kind") == Kind.HOST.value)
        & (pl.col("name").cast(pl.String) == NAME_WINDOW)
        & (pl.col("step") == metadata.first_step)
        & pl.col("args").str.contains(_OPENING, literal=True)
    )
    return int(opening["start"][0]) - metadata.opening_ns if len(opening) else None


def _annotations(slices: Slices) -> tuple[dict[Any, _Intervals], _Intervals]:
    """Annotated events by thread, and the steps."""
    threads: dict[Any, _Intervals] = defaultdict(lambda: _Intervals([], [], []))
    steps = _Intervals([], [], [])
    begun: dict[int, tuple[int, Any]] = {}
    for place in slices.where(_ANNOTATES):
        one = slices.slices[place]
        start, end = int(slices.start[place]), int(slices.end[place])
        step = _STEP.match(one.name)
        annotation = _ANNOTATION.match(one.name)
        if step is not None:
            _add(steps, start, end, int(step[1]))
        elif annotation is not None:
            part, number = annotation[1], int(annotation[2])
            if part == "-begin":
                begun[number] = (start, one.tid)
            elif not part:
                _add(threads[one.tid], start, end, number)
            elif number in begun:
                start, thread = begun.pop(number)
                _add(threads[thread], start, max(int(slices.start[place]), start), number)
    return threads, steps


def _add(intervals: _Intervals, start: int, end: int, number: int) -> None:
    intervals.start.append(start)
    intervals.end.append(end)
    intervals.number.append(number)


def _table(
    slices: Slices, annotations: dict[Any, _Intervals], steps: _Intervals, to_trace: _Clock, rank: int
) -> pl.DataFrame:
    """The event table of what ran: on a device, or else on the host."""
    ran = slices.where(*_ON_DEVICE)
    launched = _launches(slices, ran) if len(ran) else (ran := slices.where(_ON_HOST))
    known = launched >= 0
    at = np.where(known, slices.start[launched], -1)
    owner = np.full(len(ran), -1, np.int64)
    threads = [slices.slices[place].tid if place >= 0 else None for place in launched]
    for thread, intervals in annotations.items():
        mine = np.array([one == thread for one in threads], bool)
        owner[mine] = intervals.innermost(at[mine])
    step = np.where(known, steps.innermost(at), -1)
    ready = np.where(known, to_trace(at), -1)
    columns = {
        "rank": pl.Series([rank] * len(ran), dtype=pl.Int32),
        "step": integers(step, pl.Int32),
        "correlation_id": integers(owner),
        "kind": pl.Series([Kind.KERNEL.value] * len(ran), dtype=KIND),
        "name": _words([slices.slices[place].name for place in ran]),
        "stream": _words([_stream(slices, place) for place in ran]),
        "ready": integers(ready),
        "start": pl.Series(to_trace(slices.start[ran]), dtype=pl.Int64),
        "end": pl.Series(to_trace(slices.end[ran]), dtype=pl.Int64),
    }
    return pl.DataFrame(
        {name: columns.get(name, pl.Series([None] * len(ran), dtype=kind)) for name, kind in COLUMNS.items()}
    )


def _launches(slices: Slices, ran: Integers) -> Integers:
    """Position of the call that launched each of ``ran``; -1: it came before the window."""
    by_correlation: dict[int, int] = {}
    for place in slices.where(*_LAUNCHES):
        number = slices.slices[place].args.correlation
        if number >= 0:
            by_correlation.setdefault(number, int(place))
    return np.array([by_correlation.get(slices.slices[place].args.correlation, -1) for place in ran], np.int64)


def _stream(slices: Slices, place: int) -> str:
    one = slices.slices[place]
    return f"thread {one.tid}" if one.cat == _ON_HOST else f"gpu stream {one.args.stream}"


def _words(names: Sequence[str]) -> pl.Series:
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return texts(np.array([places[name] for name in names], np.int64), list(places))


def _lag(own: pl.DataFrame, annotations: dict[Any, _Intervals], to_trace: _Clock) -> tuple[float, float]:
    """Begin of the annotated spans in the file, less the time at which the host launched them by the run's events."""
    number = [one for intervals in annotations.values() for one in intervals.number]
    start = [one for intervals in annotations.values() for one in intervals.start]
    begins = pl.DataFrame({"event_id": number, "begin": to_trace(np.array(start, np.int64))})
    spans = own.filter(pl.col("kind").cast(pl.String).is_in([Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER]))
    lag = begins.join(spans.select("event_id", "ready"), on="event_id").select(pl.col("begin") - pl.col("ready"))
    late = lag.to_series().drop_nulls().to_numpy() / 1e3
    return (float(np.median(late)), float(late[np.abs(late).argmax()])) if len(late) else (0.0, 0.0)
