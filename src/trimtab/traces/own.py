"""Read trimtab's own files: one Arrow IPC stream per rank (rotated by size), read batch by batch."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from trimtab.events import FILE_SCHEMA, FILE_SUFFIX
from trimtab.topology import Coordinates, Topology
from trimtab.traces.own_header import (
    Header,
    Selection,
    metadata_of,
    parse_header,
    printable,
    rank_list,
    select,
)
from trimtab.traces.table import COLUMNS, RankInfo, Trace

TIMES = ("ready", "start", "end")
MOST_TIME_NS = 1 << 62
"""Times further from 1970 (146 years) are damage; within, differences do not overflow."""
FOLDERS_BELOW = 2
"""A run's files may lie this many folders further down, one folder a node."""
MERGE_ROWS = 1 << 18
"""Frames of single files are copied together at this size, which frees the buffers they were read into."""


@dataclass(slots=True)
class _RankFiles:
    """What the files of one rank held."""

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    topology: Topology | None = None
    coordinates: Coordinates | None = None
    dropped: int = 0
    oversubscribed: int = 0
    faults: tuple[str, ...] = ()
    closed: bool = False
    events: int = 0
    problems: list[str] = field(default_factory=list[str])


def find_files(path: Path) -> list[Path]:
    """The recorder's files at ``path``: itself, in that folder, or else in the folders below."""
    if path.is_file():
        return [path] if path.name.endswith(FILE_SUFFIX) else []
    if not path.is_dir():
        return []
    for depth in range(FOLDERS_BELOW + 1):
        found = sorted(file for file in path.glob("*/" * depth + f"*{FILE_SUFFIX}") if file.is_file())
        if found:
            return found
    return []


def claims(path: Path) -> bool:
    """Whether there are files of this format at ``path``."""
    return bool(find_files(path))


def read(path: Path, columns: Sequence[str] | None = None, run_id: str | None = None) -> Trace:
    """The run recorded at ``path``; see :func:`trimtab.traces.read.read`."""
    files = find_files(path)
    headers, problems = _headers(files)
    if not headers:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{printable(path)}: no usable file; {problems[0]}{more}")
    try:
        selection = select(headers, run_id)
    except ValueError as error:
        raise ValueError(f"{printable(path)}: {error}") from None
    chosen = list(COLUMNS) if columns is None else [name for name in COLUMNS if name in {"rank", *columns}]
    offsets = _offsets(header for files in selection.files.values() for header in files)
    merged = _Merged(chosen)
    parts = {rank: _read_rank(headers, offsets, merged) for rank, headers in selection.files.items()}
    warnings = [*problems, *selection.warnings, *(p for part in parts.values() for p in part.problems)]
    groups, renamed = _unify_groups(parts)
    topology = _topology(parts, selection.world_size, warnings)
    infos = {rank: _rank_info(selection.files[rank][-1], part) for rank, part in parts.items()}
    _say_losses(infos, warnings)
    silent = [rank for rank, part in parts.items() if not part.events]
    if silent:
        warnings.append(f"{rank_list(silent)}: the files hold no events")
    return Trace(
        events=_rename_groups(merged.all(), renamed),
        ranks=infos,
        world_size=selection.world_size,
        run_id=selection.run_id,
        attempt=selection.attempt,
        topology=topology,
        groups=groups,
        sources=_sources(selection),
        warnings=tuple(warnings),
    )


class _Merged:
    """Frames of many files, copied together before they pile up."""

    def __init__(self, columns: list[str]) -> None:
        self.columns = columns
        self._done: list[pl.DataFrame] = [pl.DataFrame(schema={name: COLUMNS[name] for name in columns})]
        self._loose: list[pl.DataFrame] = []

    def add(self, frame: pl.DataFrame) -> None:
        """Take one more frame."""
        self._loose.append(frame)
        if sum(map(len, self._loose)) >= MERGE_ROWS:
            self._merge()

    def all(self) -> pl.DataFrame:
        """Everything that was added."""
        self._merge()
        return pl.concat(self._done, rechunk=False)

    def _merge(self) -> None:
        if self._loose:
            self._done.append(pl.concat(self._loose, rechunk=True))
            self._loose = []


def _headers(files: list[Path]) -> tuple[list[Header], list[str]]:
    headers: list[Header] = []
    problems: list[str] = []
    for file in files:
        try:
            headers.append(_header(file))
        except ValueError as error:
            problems.append(f"{printable(file)}: {error}; it is left out")
    return headers, problems


def _header(file: Path) -> Header:
    try:
        if file.stat().st_size == 0:
            raise ValueError("an empty file")
        with pa.OSFile(str(file)) as source, pa.ipc.open_stream(source) as reader:
            return parse_header(file, reader.schema)
    except (pa.ArrowException, EOFError, UnicodeDecodeError, MemoryError):
        raise ValueError("not an Arrow stream, or cut off in its header") from None
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else printable(error)  # Arrow's own is a paragraph
        raise ValueError(f"cannot be read ({reason})") from None


def _offsets(headers: Iterable[Header]) -> dict[str, int]:
    """One offset to Unix time per clock: each process measured its own, and their differences are not real."""
    by_clock: dict[str, list[int]] = defaultdict(list)
    for header in headers:
        by_clock[header.clock].append(header.unix_offset_ns)
    return {clock: statistics.median_low(offsets) for clock, offsets in by_clock.items()}


def _read_rank(headers: list[Header], offsets: dict[str, int], merged: _Merged) -> _RankFiles:
    part = _RankFiles()
    for header in headers:
        batches = _read_batches(header, part, merged.columns)
        if not batches:
            continue
        try:
            frame = _frame(pa.Table.from_batches(batches), header, offsets[header.clock], merged.columns)
        except (pl.exceptions.PolarsError, pa.ArrowException, ValueError) as error:
            part.problems.append(f"{printable(header.path)}: not of the event schema ({printable(error)}); left out")
            continue
        frame = _plausible(frame, header, part)
        part.events += len(frame)
        merged.add(frame)
    return part


def _read_batches(header: Header, part: _RankFiles, columns: list[str]) -> list[pa.RecordBatch]:
    """All complete batches of a file; what their metadata says goes into ``part``."""
    batches: list[pa.RecordBatch] = []
    part.closed = False
    size = header.path.stat().st_size
    good = 0
    try:
        with pa.OSFile(str(header.path)) as source:
            fields = list(pa.ipc.open_stream(source).schema.names)
            source.seek(0)
            wanted = [number for number, name in enumerate(fields) if name in columns]
            options = pa.ipc.IpcReadOptions(included_fields=wanted)
            with pa.ipc.open_stream(source, options=options) as reader:
                while True:
                    good = source.tell()
                    item = reader.read_next_batch_with_custom_metadata()
                    item.batch.validate(full=True)  # what points outside of the batch would end the process later
                    batches.append(item.batch)
                    _take_metadata(item.custom_metadata, part, header)
    except StopIteration:
        pass
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, MemoryError):
        part.problems.append(
            f"{printable(header.path)}: its end is cut off or damaged ({size - good} bytes after "
            f"{len(batches)} good batches are lost)"
        )
    return batches


def _take_metadata(raw: Any, part: _RankFiles, header: Header) -> None:
    try:
        said = metadata_of(raw)
        for name, ranks in said.get("groups", {}).items():
            part.groups[str(name)] = tuple(int(rank) for rank in ranks)
        if "topology" in said:
            part.topology = Topology(**{key: int(value) for key, value in said["topology"].items()})
        if "coordinates" in said:
            part.coordinates = Coordinates(**{key: int(value) for key, value in said["coordinates"].items()})
        part.dropped = int(said.get("dropped", part.dropped))
        part.oversubscribed = int(said.get("oversubscribed", part.oversubscribed))
        part.faults = tuple(str(fault) for fault in said.get("faults", part.faults))
        part.closed = bool(said.get("closed", False))
    except (ValueError, TypeError, AttributeError) as error:
        problem = f"{printable(header.path)}: a batch's metadata is not understood ({printable(error)})"
        if problem not in part.problems:
            part.problems.append(problem)


def _frame(table: pa.Table, header: Header, offset: int, columns: list[str]) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(table.unify_dictionaries()))
    expressions: list[pl.Expr] = []
    for name in columns:
        if name == "rank":
            expressions.append(pl.lit(header.rank, pl.Int32).alias(name))
        elif name not in frame.columns:
            expressions.append(pl.lit(None, COLUMNS[name]).alias(name))
        elif name in TIMES:
            expressions.append(pl.col(name).cast(pl.Int64) + offset)
        elif name == "kind":
            expressions.append(pl.col(name).cast(COLUMNS[name], strict=False))
        else:
            expressions.append(pl.col(name).cast(COLUMNS[name]))
    return frame.select(expressions)


def _plausible(frame: pl.DataFrame, header: Header, part: _RankFiles) -> pl.DataFrame:
    """Without the rows that no reader could make sense of."""
    rank = f"rank {header.rank}"
    if "kind" in frame.columns and frame["kind"].null_count():
        part.problems.append(f"{rank}: {frame['kind'].null_count()} events of unknown kind are left out")
        frame = frame.filter(pl.col("kind").is_not_null())
    times = [name for name in TIMES if name in frame.columns]
    if times:
        beyond = pl.any_horizontal((pl.col(name) <= -MOST_TIME_NS) | (pl.col(name) >= MOST_TIME_NS) for name in times)
        kept = frame.filter(~beyond.fill_null(False))
        if len(kept) < len(frame):
            part.problems.append(f"{rank}: {len(frame) - len(kept)} events lie a century or more away; left out")
            frame = kept
    if {"start", "end"} <= set(frame.columns):
        backward = frame.select((pl.col("end") < pl.col("start")).sum()).item()
        if backward:
            part.problems.append(f"{rank}: {backward} events end before they start (a clock that jumped?); left out")
            frame = frame.filter((pl.col("end") >= pl.col("start")).fill_null(True))
    return frame


def _unify_groups(parts: dict[int, _RankFiles]) -> tuple[dict[str, tuple[int, ...]], list[tuple[int, str, str]]]:
    """Members by group name, and what to rename (rank, old, new): ranks may give one name to different groups."""
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for part in parts.values():
        for name, ranks in part.groups.items():
            members[name].add(ranks)
    unique: dict[tuple[str, tuple[int, ...]], str] = {}
    taken: set[str] = set()
    for name, variants in members.items():
        for ranks in sorted(variants):
            label = name if len(variants) == 1 else f"{name}@{min(ranks, default=-1)}"
            while label in taken or (label != name and label in members):
                label += "'"
            taken.add(label)
            unique[name, ranks] = label
    renamed = [
        (rank, name, unique[name, ranks])
        for rank, part in parts.items()
        for name, ranks in part.groups.items()
        if unique[name, ranks] != name
    ]
    return {label: ranks for (_, ranks), label in unique.items()}, renamed


def _rename_groups(events: pl.DataFrame, renamed: list[tuple[int, str, str]]) -> pl.DataFrame:
    if not renamed or "group" not in events.columns:
        return events
    names = pl.DataFrame(
        renamed, schema={"rank": pl.Int32, "group": pl.Categorical, "new": pl.Categorical}, orient="row"
    )
    joined = events.join(names, on=["rank", "group"], how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("new", "group").alias("group")).drop("new")


def _topology(parts: dict[int, _RankFiles], world_size: int, warnings: list[str]) -> Topology | None:
    said = {part.topology for part in parts.values() if part.topology is not None}
    fitting = [topology for topology in said if topology.world_size == world_size]
    if len(fitting) < len(said) or len(fitting) > 1:
        warnings.append(f"the ranks do not agree on a topology of {world_size} ranks; it is taken as unknown")
        return None
    return fitting[0] if fitting else None


def _rank_info(header: Header, part: _RankFiles) -> RankInfo:
    return RankInfo(
        rank=header.rank,
        host=header.host,
        device=header.device,
        device_name=header.device_name,
        clock=header.clock,
        coordinates=part.coordinates,
        dropped=part.dropped,
        oversubscribed=part.oversubscribed,
        faults=part.faults,
        closed=part.closed,
    )


def _say_losses(ranks: dict[int, RankInfo], warnings: list[str]) -> None:
    dropped = {rank: info.dropped for rank, info in ranks.items() if info.dropped}
    if dropped:
        warnings.append(f"{rank_list(dropped)}: {sum(dropped.values())} events were dropped while recording")
    unclosed = [rank for rank, info in ranks.items() if not info.closed]
    if unclosed:
        warnings.append(f"{rank_list(unclosed)}: the recording has no orderly end (still running, or killed)")


def _sources(selection: Selection) -> tuple[str, ...]:
    return tuple(str(header.path) for headers in selection.files.values() for header in headers)


assert set(COLUMNS) == {"rank", *FILE_SCHEMA.names}
