"""What a viewer is shown: whole steps around the slowest one, as few as it can open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trimtab.events import COMM_KINDS, NAME_STEP, Kind
from trimtab.output import replacing
from trimtab.traces.table import Trace

MAX_EVENTS = 150_000
"""More events than this make viewers slow; a window holds fewer unless steps are asked for or one step is larger."""

NAMED = ("step", "microbatch", "chunk", "layer", "group", "seq", "bytes", "dtype", "src", "dst", "args")
"""Columns that are shown with an event."""


@dataclass(frozen=True, slots=True)
class Window:
    """Events chosen for a viewer."""

    events: pl.DataFrame
    """By rank, stream and start, an outer span before those inside it; with ``lane`` and ``flow`` (0: none)."""
    origin_ns: int
    """Earliest start; times are shown relative to it."""
    steps: tuple[int, int] | None
    """First and last step shown; None: everything."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    path: Path
    events: int
    steps: tuple[int, int] | None
    """First and last step written; None: everything."""


def choose(trace: Trace, steps: tuple[int, int] | None = None, max_events: int = MAX_EVENTS) -> Window:
    """The window of ``steps`` (first, last), or around the slowest step with at most ``max_events`` events.

    An event whose end nobody knows is shown as a moment. Raises ValueError where there is nothing to show.
    """
    events = trace.events.filter(pl.col("start").is_not_null()).with_columns(end=pl.coalesce("end", "start"))
    if not len(events):
        raise ValueError("nothing to write: the trace holds no events")
    if steps is None and len(events) > max_events:
        steps = _around_slowest(events, max_events)
    if steps is not None:
        shown = events.filter(pl.col("step").is_between(*steps))
        if not len(shown):
            least, most = events["step"].min(), events["step"].max()
            raise ValueError(f"steps {steps[0]}-{steps[1]}: not in this trace, which holds steps {least}-{most}")
        events = shown
    events = events.sort("rank", "stream", "start", "end", "event_id", descending=[False] * 3 + [True, False])
    events = events.with_columns(lane=pl.Series(_lanes(events)), flow=pl.Series(_flows(events)))
    return Window(events, int(events["start"].min()), steps)  # pyright: ignore[reportArgumentType]


def _around_slowest(events: pl.DataFrame, max_events: int) -> tuple[int, int]:
    """Whole steps around the slowest; the first recorded one is not chosen where others are there (warm-up)."""
    per_step = (
        events.filter(pl.col("step").is_not_null())
        .group_by("step")
        .agg(pl.len(), whole=pl.col("end").max() - pl.col("start").min())
    )
    marked = events.filter((pl.col("kind") == Kind.HOST.value) & (pl.col("name").cast(pl.String) == NAME_STEP))
    lengths = marked.group_by("step").agg(length=(pl.col("end") - pl.col("start")).mean())
    table = per_step.join(lengths, on="step", how="left").sort("step")
    number = table["step"].to_list()
    length = table.select(pl.coalesce("length", "whole")).to_series().to_list()
    count = table["len"].to_list()
    if not number:
        raise ValueError("nothing to write: no event belongs to a step")
    worst = max(range(1 if len(number) > 1 else 0, len(number)), key=lambda k: length[k])
    first = last = worst
    total = count[worst]
    while True:
        wider = [(worst - first, first - 1, last, count[first - 1])] if first else []
        wider += [(last - worst, first, last + 1, count[last + 1])] if last + 1 < len(number) else []
        fitting = [option for option in wider if total + option[3] <= max_events]
        if not fitting:
            return number[first], number[last]
        _, first, last, more = min(fitting)
        total += more


def _lanes(events: pl.DataFrame) -> NDArray[np.int64]:
    """Lane of each event within its rank and stream, so that spans of one lane nest or are disjoint."""
    lanes = np.zeros(len(events), np.int64)
    place: tuple[int, str | None] | None = None
    stacks: list[list[int]] = []
    columns = (events["rank"], events["stream"].cast(pl.String), events["start"], events["end"])
    for row, (rank, stream, start, end) in enumerate(zip(*(c.to_list() for c in columns), strict=True)):
        if place != (rank, stream):
            place, stacks = (rank, stream), []
        lanes[row] = _free_lane(stacks, start, end)
        stacks[lanes[row]].append(end)
    return lanes


def _free_lane(stacks: list[list[int]], start: int, end: int) -> int:
    """First lane that a span fits into; ``stacks`` holds the ends of the spans open on each."""
    for lane, stack in enumerate(stacks):
        while stack and stack[-1] <= start:
            stack.pop()
        if not stack or end <= stack[-1]:
            return lane
    stacks.append([])
    return len(stacks) - 1


def _flows(events: pl.DataFrame) -> NDArray[np.uint64]:
    """A number above 0 for each communication that at least two of its members show, the same on all of them."""
    numbered = events.select("kind", "group", "op", "src", "dst", "tag", "seq").with_row_index("row")
    numbered = numbered.filter(pl.col("kind").is_in([kind.value for kind in COMM_KINDS]) & pl.col("seq").is_not_null())
    is_message = pl.col("kind").is_in([Kind.SEND.value, Kind.RECV.value])
    key = pl.struct(
        pl.col("group").cast(pl.String),
        pl.when(is_message).then(None).otherwise(pl.col("op").cast(pl.String)),
        *[pl.when(is_message).then(pl.col(name)) for name in ("src", "dst", "tag")],
        "seq",
    )
    flow = numbered.select("row", flow=key.rank("dense")).with_columns(members=pl.len().over("flow"))
    flow = flow.filter(pl.col("members") > 1)
    flows = np.zeros(len(events), np.uint64)
    flows[flow["row"].to_numpy()] = flow["flow"].to_numpy()
    return flows


def describe(trace: Trace, rank: int) -> str:
    """Title of a rank: ``rank 3 (tp1 dp0 pp1)``."""
    info = trace.ranks.get(rank)
    if info is None or info.coordinates is None or trace.topology is None:
        return f"rank {rank}"
    sizes = trace.topology.as_dict()
    at = [f"{name}{value}" for name, value in info.coordinates.as_dict().items() if sizes[name] > 1]
    return f"rank {rank} ({' '.join(at)})" if at else f"rank {rank}"


def rows(events: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Events as plain dictionaries, texts as text."""
    yield from events.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String)).iter_rows(named=True)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears under its name only when it is complete."""
    with replacing(path) as part, part.open("wb") as sink:
        yield sink
