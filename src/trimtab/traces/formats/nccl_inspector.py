"""Read what the NCCL Inspector logs: a JSON object a line for each collective of each communicator, one file a process.

The format: ``ext-profiler/inspector`` of NCCL 2.28 and later. A communicator knows only the ranks within itself; the
largest one tells those of the job. With ``NCCL_INSPECTOR_DUMP_VERBOSE=1`` each collective has its times, else there is
only how long it took and when the plugin wrote it down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from trimtab.events import STREAM_COMM, Kind
from trimtab.traces.blocks import Blocks
from trimtab.traces.formats.heads import Head
from trimtab.traces.formats.kineto.communication import op_of
from trimtab.traces.formats.tables import event_table
from trimtab.traces.own_header import MAX_WORLD, printable
from trimtab.traces.table import RankInfo, Trace

_MOST_LINE_BYTES: Final = 1 << 20
_MOST_US: Final = 1 << 51
"""Times beyond are damage."""
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_SCHEMA: Final[dict[str, Any]] = {
    "comm": pl.String,
    "place": pl.Int64,
    "size": pl.Int64,
    "host": pl.String,
    "pid": pl.Int64,
    "coll": pl.String,
    "seq": pl.Int64,
    "bytes": pl.Int64,
    "asked": pl.Int64,
    "begin": pl.Int64,
    "took": pl.Int64,
    "args": pl.String,
}
"""Rows of the files; ``place`` is the rank in the communicator, times are microseconds."""


class _Header(msgspec.Struct, gc=False):
    id: str
    rank: int
    n_ranks: int


class _Metadata(msgspec.Struct, gc=False):
    dump_timestamp_us: int | None = None
    hostname: str = ""
    pid: int = 0


class _Kernel(msgspec.Struct, gc=False):
    kernel_start_ts: int = 0
    kernel_stop_ts: int = 0


class _Times(msgspec.Struct, gc=False):
    coll_start_ts: int = 0
    kernel_events: list[_Kernel] = []


class _Performance(msgspec.Struct, gc=False):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int | None = None
    coll_exec_time_us: int | None = None
    coll_timing_source: str | None = None
    coll_algobw_gbs: float | None = None
    coll_busbw_gbs: float | None = None
    event_trace_ts: _Times | None = None


class _Line(msgspec.Struct, gc=False):
    header: _Header
    coll_perf: _Performance
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


def recognizes(head: Head) -> bool:
    """Whether its lines are those of the Inspector."""
    return head.is_json and b'"coll_perf"' in head.data and b'"header"' in head.data


def read(files: Sequence[Path]) -> Trace:
    """The job whose processes wrote ``files``."""
    rows, sources, warnings = _rows(files)
    events, more = _ranked(rows)
    warnings += more
    timed = events.filter(pl.col("begin").is_between(0, _MOST_US) & pl.col("took").is_between(0, _MOST_US))
    if lost := len(events) - len(timed):
        warnings.append(f"{lost} of {len(events)} collectives have no time that makes sense; left out")
    if timed.is_empty():
        raise ValueError(f"{printable(files[0])}: of the NCCL Inspector, but no line in it tells when it was")
    if not timed["exact"].all():
        warnings.append(
            "without NCCL_INSPECTOR_DUMP_VERBOSE=1 only the durations of collectives are known: they are placed where "
            "they were written down"
        )
    warnings.append("steps and computations are not in this format, and collectives between two dumps may be missing")
    events = timed.with_columns(start=pl.col("begin") * 1_000, end=(pl.col("begin") + pl.col("took")) * 1_000)
    events = events.with_columns(
        ready=pl.min_horizontal(pl.col("asked") * 1_000, "start"),
        kind=pl.lit(Kind.COLLECTIVE.value),
        name="coll",
        stream=pl.lit(STREAM_COMM),
        group="comm",
        op=pl.col("coll").replace_strict({name: op_of(name) or name for name in timed["coll"].unique()}),
    )
    hosts = dict(events.group_by("rank").agg(pl.col("host").first()).iter_rows())
    members = (
        events.sort("place").group_by("group").agg(pl.col("rank").unique(maintain_order=True), pl.col("size").max())
    )
    largest = int(events["size"].max() or 1)  # type: ignore[arg-type]
    return Trace(
        events=event_table(events),
        ranks={
            rank: RankInfo(rank, host=printable(host or ""), device="cuda", clock=printable(host or f"rank {rank}"))
            for rank, host in sorted(hosts.items())
        },
        world_size=max(largest, *(rank + 1 for rank in hosts)),
        run_id=files[0].parent.name,
        groups={str(name): tuple(sorted(ranks)) for name, ranks, size in members.iter_rows() if len(ranks) == size},
        sources=tuple(map(str, sources)),
        warnings=tuple(warnings),
    )


def _rows(files: Sequence[Path]) -> tuple[pl.DataFrame, list[Path], list[str]]:
    """Rows of all files, each once; the files that were read, and warnings."""
    warnings: list[str] = []
    parts: list[pl.DataFrame] = []
    sources: list[Path] = []
    for file in files:
        lines = _Lines(file)
        try:
            read = [pl.DataFrame(map(_row, batch), schema=_SCHEMA, orient="row") for batch in lines]
        except ValueError as error:
            warnings.append(str(error))
            continue
        warnings += [f"{printable(file)}: {problem}" for problem in lines.problems()]
        if sum(map(len, read)):
            parts += read
            sources.append(file)
    if not parts:
        raise ValueError(warnings[0] if warnings else f"{printable(files[0])}: no whole line of the NCCL Inspector")
    rows = pl.concat(parts)
    once = rows.unique(["comm", "place", "host", "pid", "coll", "seq"], keep="first", maintain_order=True)
    if copies := len(rows) - len(once):
        warnings.append(f"{copies} of {len(rows)} collectives are here twice; the first of each is read")
    return once, sources, warnings


class _Lines:
    """The lines of one file in batches."""

    def __init__(self, path: Path) -> None:
        self._blocks = Blocks(path)
        self._decoder = msgspec.json.Decoder(_Line, strict=False)
        self._damaged = 0

    def __iter__(self) -> Iterator[list[_Line]]:
        rest = b""
        for block in self._blocks:
            text, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                yield self._decode(text)
            elif len(rest) > _MOST_LINE_BYTES:
                self._damaged += 1
                rest = b""
        yield self._decode(rest)

    def problems(self) -> list[str]:
        """What could not be read."""
        damaged = [f"{self._damaged} lines are damaged and left out"] if self._damaged else []
        return damaged + ([self._blocks.problem] if self._blocks.problem else [])

    def _decode(self, text: bytes) -> list[_Line]:
        try:
            return self._decoder.decode_lines(text)
        except _DECODE_ERRORS:
            pass
        lines: list[_Line] = []
        for line in text.splitlines():
            try:
                lines.append(self._decoder.decode(line))
            except _DECODE_ERRORS:
                self._damaged += bool(line.strip())
        return lines


def _row(line: _Line) -> tuple[Any, ...]:
    """In the order of the columns."""
    header, performance, metadata = line.header, line.coll_perf, line.metadata
    times = performance.event_trace_ts
    starts = [kernel.kernel_start_ts for kernel in times.kernel_events if kernel.kernel_start_ts > 0] if times else []
    stops = [kernel.kernel_stop_ts for kernel in times.kernel_events if kernel.kernel_stop_ts > 0] if times else []
    took = performance.coll_exec_time_us
    begin, asked = None, None
    if times and starts and stops:
        begin, took, asked = min(starts), max(stops) - min(starts), times.coll_start_ts or None
    elif metadata.dump_timestamp_us is not None and took is not None:
        begin = metadata.dump_timestamp_us - took
    said = {
        "exec_time_us": performance.coll_exec_time_us,
        "timing_source": performance.coll_timing_source,
        "algbw_gbs": performance.coll_algobw_gbs,
        "busbw_gbs": performance.coll_busbw_gbs,
    }
    args = msgspec.json.encode({key: value for key, value in said.items() if value is not None}).decode()
    return (
        header.id,
        _count(header.rank, MAX_WORLD),
        _count(header.n_ranks, MAX_WORLD),
        metadata.hostname,
        _count(metadata.pid),
        performance.coll,
        _count(performance.coll_sn),
        _count(performance.coll_msg_size_bytes),
        _count(asked, _MOST_US),
        _count(begin),
        _count(took),
        args,
    )


def _count(value: int | None, most: int = 1 << 62) -> int | None:
    return value if value is not None and 0 <= value <= most else None


def _ranked(rows: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Rows with ``rank``, the one in the job, and ``exact``: their times are their own; and warnings."""
    rows = rows.filter(pl.all_horizontal(pl.col(name).is_not_null() for name in ("place", "size", "seq")))
    rows = rows.with_columns(exact=pl.col("asked").is_not_null(), process=pl.struct("host", "pid"))
    places = rows.group_by("process", "comm", "size").agg(
        pl.col("place").n_unique().alias("n"), pl.col("place").first()
    )
    if places.is_empty():
        raise ValueError("of the NCCL Inspector, but no line in it tells its rank")
    if (places["n"] > 1).any():
        kept = rows.filter(pl.col("size") == pl.col("size").max()).with_columns(rank="place")
        if len(kept) == len(rows):
            return kept, []
        said = f"one process holds several ranks: {len(rows) - len(kept)} collectives of smaller communicators left out"
        return kept, [said]
    world = (
        places.filter(pl.col("size") == pl.col("size").max())
        .group_by("process")
        .agg(pl.col("place").n_unique().alias("n"), rank=pl.col("place").first())
    )
    processes = rows.select("process").unique()
    known = len(world) == len(processes) and (world["n"] == 1).all() and world["rank"].n_unique() == len(world)
    if known:
        return rows.join(world.select("process", "rank"), on="process", maintain_order="left"), []
    numbered = processes.sort("process").with_row_index("rank").with_columns(pl.col("rank").cast(pl.Int64))
    said = "no communicator holds all processes: they are numbered by host and process id, not by their ranks"
    return rows.join(numbered, on="process", maintain_order="left"), [said]
