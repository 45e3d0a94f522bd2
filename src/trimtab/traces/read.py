"""Read a trace of any known format: each is one file in this package and one line in :data:`FORMATS`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from trimtab.traces import own
from trimtab.traces.formats import (
    bytedance,
    chrome_events,
    flight_recorder,
    kineto,
    megatronapp,
    nccl_inspector,
    nsight,
)
from trimtab.traces.formats.heads import Head, find_files, read_head
from trimtab.traces.own_header import printable
from trimtab.traces.table import COLUMNS, Trace


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format of another program."""

    name: str
    expects: str
    """What its files look like, for error messages."""
    recognizes: Callable[[Head], bool]
    """By how a file begins."""
    read: Callable[[Sequence[Path]], Trace]
    """Files that are recognised, as one trace; ValueError, in one line, where nothing in them is usable."""


OWN: Final = f"trimtab: *{own.FILE_SUFFIX} as the recorder writes them"
FORMATS: Final = (
    Format("ByteDance what-if", "Parquet with dp_rank, stage, optype, ...", bytedance.recognizes, bytedance.read),
    Format("MegatronApp", "benchmark-data-*.json, or merged into one", megatronapp.recognizes, megatronapp.read),
    Format("torch.profiler", "JSON of torch.profiler, one file a rank", kineto.recognizes, kineto.read),
    Format("Nsight Systems", "SQLite, as nsys export writes it", nsight.recognizes, nsight.read),
    Format("NCCL Inspector", "JSON lines with coll_perf", nccl_inspector.recognizes, nccl_inspector.read),
    Format("Flight Recorder", "nccl_trace_rank_*, pickle or JSON", flight_recorder.recognizes, flight_recorder.read),
    Format("Chrome trace", "JSON with trace events", chrome_events.recognizes, chrome_events.read),
)
"""Formats of other programs. The first that recognises a file reads it; where a directory holds files of several, the
first of these is read: they are in the order of how much scan can say from them."""


def read(
    *paths: str | os.PathLike[str],
    columns: Sequence[str] | None = None,
    run_id: str | None = None,
    attempt: int | None = None,
) -> Trace:
    """The trace at ``paths``: a file or the directory of a run, or several (one a node, say) that make up a run.

    ``columns`` limits the event table to these columns (and ``rank``), to save memory. Of several runs in one
    place the newest is read, or ``run_id``; of several attempts at it the last, or ``attempt``. Times are on each
    rank's own clock, in Unix nanoseconds where the format has them.

    Raises ValueError, in one line, where nothing usable is found; damage to single files is said in the
    trace's ``warnings``.
    """
    unknown = [name for name in columns or () if name not in COLUMNS]
    if unknown:
        raise ValueError(f"no column {unknown[0]!r} in an event table, choose from {', '.join(COLUMNS)}")
    places = [Path(path) for path in paths]
    if not places:
        raise ValueError("no trace to read: give the directory of a run's files")
    for place in places:
        _check(place)
    of_trimtab = [own.claims(place) for place in places]
    if all(of_trimtab):
        return own.read(places, columns=columns, run_id=run_id, attempt=attempt)
    foreign = {place: _recognize(place) for place, is_own in zip(places, of_trimtab, strict=True) if not is_own}
    if any(of_trimtab):
        raise ValueError(f"{printable(next(iter(foreign)))}: not recorded by trimtab, as the others are; read it alone")
    trace = _read_foreign(foreign)
    if (run_id or trace.run_id) != trace.run_id or attempt not in (None, trace.attempt):
        asked = f"run '{printable(run_id or trace.run_id)}', attempt {attempt or 0}"
        raise ValueError(f"{printable(places[0])}: not of {asked}: only trimtab's own files tell runs apart")
    if columns is None:
        return trace
    return replace(trace, events=trace.events.select([name for name in COLUMNS if name in {"rank", *columns}]))


def _check(place: Path) -> None:
    try:
        place.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{printable(place)}: {str(reason).lower()}") from None


def _read_foreign(places: Mapping[Path, Mapping[Format, list[Path]]]) -> Trace:
    """What the first format reads that has files at the places; the others are said in the warnings."""
    found: dict[Format, list[Path]] = defaultdict(list)
    for by_format in places.values():
        for known, files in by_format.items():
            found[known] += files
    first, *others = [known for known in FORMATS if known in found]
    files = list({file.resolve(): file for file in found[first]}.values())  # each once, whatever leads to it
    trace = first.read(files)
    if not others:
        return trace
    left = ", ".join(f"{len(found[known])} of {known.name} ({printable(found[known][0].name)})" for known in others)
    said = f"files of several formats are here; those of {first.name} are read, not: {left}"
    return replace(trace, warnings=(said, *trace.warnings))


def _recognize(place: Path) -> dict[Format, list[Path]]:
    """The files at ``place`` by format; ValueError where there are none."""
    problems: list[Head] = []
    for files in find_files(place):
        found: dict[Format, list[Path]] = defaultdict(list)
        for file in files:
            head = read_head(file)
            known = next((one for one in FORMATS if one.recognizes(head)), None)
            if known is not None:
                found[known].append(file)
            elif head.problem:
                problems.append(head)
        if found:
            return found
    if place.is_file() and problems:
        raise ValueError(f"{printable(place)}: {problems[0].problem}")
    expected = "; ".join((OWN, *(f"{known.name}: {known.expects}" for known in FORMATS)))
    what = "no trace files in this directory" if place.is_dir() else "not a trace file of a known format"
    raise ValueError(f"{printable(place)}: {what} (expected {expected})")
