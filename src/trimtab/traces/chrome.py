"""Write a trace as Chrome JSON (chrome://tracing and most other viewers), compressed where the name ends in .gz."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.events import STREAM_COMM, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.traces.counters import levels
from trimtab.traces.table import Trace
from trimtab.traces.window import MAX_EVENTS, NAMED, Window, Written, choose, describe, rows, whole_file

LANES_PER_STREAM = 1000
STREAMS = (STREAM_COMPUTE, STREAM_COMM, STREAM_HOST)


def write_chrome(
    trace: Trace,
    path: str | os.PathLike[str],
    steps: tuple[int, int] | None = None,
    max_events: int = MAX_EVENTS,
) -> Written:
    """Write ``steps`` (first, last) of ``trace``, by default a window around the slowest step, to ``path``.

    A rank is a process, a stream a thread, a counter a track of its process; times are microseconds since the first
    event. Raises ValueError where there is nothing to write, or the file cannot be written.
    """
    window = choose(trace, steps, max_events)
    target = Path(path)
    with whole_file(target) as sink:
        if target.suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=sink, mode="wb", compresslevel=6, mtime=0) as packed:
                _write(packed.write, trace, window)
        else:
            _write(sink.write, trace, window)
    return Written(target, len(window.events), window.steps)


def _write(write: Any, trace: Trace, window: Window) -> None:
    write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for number, event in enumerate(_events(trace, window)):
        line = json.dumps(event, separators=(",", ":"))  # escapes whatever a name may hold
        write((",\n" if number else "").encode() + line.encode())
    write(b"\n]}\n")


def _events(trace: Trace, window: Window) -> Iterator[dict[str, Any]]:
    named: set[tuple[int, int]] = set()
    streams = {stream: number for number, stream in enumerate(STREAMS)}
    members = window.events.filter(window.events["flow"] > 0).group_by("flow").len()
    left = dict(members.iter_rows())
    started: set[int] = set()
    for row in rows(window.events):
        if row["kind"] == Kind.COUNTER:
            yield from _counters(row, window.origin_ns)
            continue
        rank, stream = row["rank"], row["stream"] or "other"
        thread = streams.setdefault(stream, len(streams)) * LANES_PER_STREAM + row["lane"]
        if (rank, thread) not in named:
            if not any(known == rank for known, _ in named):
                yield _label("process_name", rank, 0, {"name": describe(trace, rank)})
                yield _label("process_sort_index", rank, 0, {"sort_index": rank})
            named.add((rank, thread))
            title = stream if row["lane"] == 0 else f"{stream} ({row['lane'] + 1})"
            yield _label("thread_name", rank, thread, {"name": title})
            yield _label("thread_sort_index", rank, thread, {"sort_index": thread})
        event = _slice(row, thread, window.origin_ns)
        yield event
        if row["flow"]:
            left[row["flow"]] -= 1
            phase = "f" if not left[row["flow"]] else "t" if row["flow"] in started else "s"
            started.add(row["flow"])
            yield _flow(event, row["flow"], phase)


def _label(name: str, rank: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _slice(row: dict[str, Any], thread: int, origin: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": row["name"] or row["kind"],
        "cat": row["kind"],
        "pid": row["rank"],
        "tid": thread,
        "ts": (row["start"] - origin) / 1000,
        "dur": (row["end"] - row["start"]) / 1000,
        "args": {name: row[name] for name in NAMED if row[name] is not None},
    }


def _counters(row: dict[str, Any], origin: int) -> Iterator[dict[str, Any]]:
    """One event a value: those of one event would be drawn on top of each other."""
    when = (row["start"] - origin) / 1000
    for name, value in levels(row["name"], row["args"]).items():
        yield {"ph": "C", "name": name, "pid": row["rank"], "ts": when, "args": {"value": value}}


def _flow(event: dict[str, Any], number: int, phase: str) -> dict[str, Any]:
    """Binds to the slice it lies in."""
    flow = {"ph": phase, "id": number, "name": "communication", "cat": "communication", "ts": event["ts"]}
    return {**flow, "pid": event["pid"], "tid": event["tid"], **({"bp": "e"} if phase != "s" else {})}
