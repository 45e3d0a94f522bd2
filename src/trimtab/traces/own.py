"""Read trimtab's own files: one Arrow IPC stream per rank (rotated by size and age), read batch by batch."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa

from trimtab.events import FILE_SCHEMA, FILE_SUFFIX, SUMMARY_SUFFIX
from trimtab.topology import Topology
from trimtab.traces.own_header import (
    Header,
    Selection,
    parse_header,
    printable,
    rank_list,
    select,
)
from trimtab.traces.own_rank import Merged, RankFiles, read_metadata, read_rank
from trimtab.traces.table import COLUMNS, RankInfo, Trace

SUFFIXES = (FILE_SUFFIX, SUMMARY_SUFFIX)
FOLDERS_BELOW = 2
"""A run's files may lie this many folders further down, one folder a node."""


def find_files(path: Path) -> list[Path]:
    """The recorder's files at ``path``: itself, in that folder, or else in the folders below."""
    if path.is_file():
        return [path] if path.name.endswith(SUFFIXES) else []
    if not path.is_dir():
        return []
    for depth in range(FOLDERS_BELOW + 1):
        found = sorted(file for file in path.glob("*/" * depth + "*.arrow") if file.name.endswith(SUFFIXES))
        if found := [file for file in found if file.is_file()]:
            return found
    return []


def claims(path: Path) -> bool:
    """Whether there are files of this format at ``path``."""
    return bool(find_files(path))


@dataclass(frozen=True, slots=True)
class Found:
    """The files of one run, before any event is read."""

    selection: Selection
    offsets: dict[str, int]
    """Unix time of each clock's zero."""
    problems: tuple[str, ...]
    """Files that are left out, and why."""

    @property
    def nbytes(self) -> int:
        """Size of all files of events."""
        return sum(header.path.stat().st_size for headers in self.selection.files.values() for header in headers)


def discover(paths: Sequence[Path], run_id: str | None = None, attempt: int | None = None) -> Found:
    """Headers of the files at ``paths``, and which of them are to be read. ValueError where nothing is usable."""
    where = ", ".join(map(printable, paths))
    files = {file.resolve(): file for path in paths for file in find_files(path)}  # each once, whatever leads to it
    headers, problems = _headers(list(files.values()))
    if not headers:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{where}: no usable file; {problems[0]}{more}")
    try:
        selection = select(headers, run_id, attempt)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    offsets = _offsets(header for files in selection.files.values() for header in files)
    return Found(selection, offsets, tuple(problems))


def read(
    paths: Sequence[Path],
    columns: Sequence[str] | None = None,
    run_id: str | None = None,
    attempt: int | None = None,
) -> Trace:
    """The run recorded at ``paths``; see :func:`trimtab.traces.read.read`."""
    return read_found(discover(paths, run_id, attempt), columns)


def read_found(found: Found, columns: Sequence[str] | None = None, steps: Collection[int] | None = None) -> Trace:
    """All events of the files ``found``, or those of ``steps``, limited to ``columns`` and ``rank``."""
    chosen = list(COLUMNS) if columns is None else [name for name in COLUMNS if name in {"rank", *columns}]
    merged = Merged(chosen)
    files = found.selection.files
    parts = {rank: read_rank(headers, found.offsets, merged, steps) for rank, headers in files.items()}
    return assemble(found, parts, merged.all())


def assemble(found: Found, parts: dict[int, RankFiles], events: pl.DataFrame) -> Trace:
    """The trace of ``events``, whose groups still have the names that each rank gave them."""
    selection = found.selection
    for rank in selection.summaries:
        if not selection.files[rank]:
            read_metadata(selection.summaries[rank], parts[rank])
    warnings = [*found.problems, *selection.warnings, *(p for part in parts.values() for p in part.problems)]
    groups, renamed = _unify_groups(parts)
    topology = _topology(parts, selection.world_size, warnings)
    infos = {rank: _rank_info(selection.header(rank), part) for rank, part in parts.items()}
    _say_losses(infos, warnings)
    silent = [rank for rank, part in parts.items() if selection.files[rank] and not part.events]
    if silent:
        warnings.append(f"{rank_list(silent)}: the files hold no events")
    events = _rename_groups(events, renamed)
    warnings += _said_of_summaries(selection, events)
    return Trace(
        events=events,
        ranks=infos,
        world_size=selection.world_size,
        run_id=selection.run_id,
        attempt=selection.attempt,
        topology=topology,
        groups=groups,
        sources=_sources(selection),
        summaries=tuple(header.path for headers in selection.summaries.values() for header in headers),
        warnings=tuple(warnings),
    )


def _said_of_summaries(selection: Selection, events: pl.DataFrame) -> list[str]:
    """Which steps have lost their detail."""
    said: list[str] = []
    thinned = [rank for rank, files in selection.files.items() if files and files[0].file_index > 0]
    thinned = [rank for rank in thinned if rank in selection.summaries]
    if thinned and "step" in events.columns:
        own = events.filter(pl.col("rank").is_in(thinned) & (pl.col("step") >= 0))
        first = own.group_by("rank").agg(pl.col("step").min())["step"].max()
        said.append(f"{rank_list(thinned)}: of the steps before {first} only summaries are left (scan --summaries)")
    alone = [rank for rank, files in selection.files.items() if not files]
    if alone:
        said.append(f"{rank_list(alone)}: only summaries are here, no events (scan --summaries)")
    return said


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


def _unify_groups(parts: dict[int, RankFiles]) -> tuple[dict[str, tuple[int, ...]], list[tuple[int, str, str]]]:
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


def _topology(parts: dict[int, RankFiles], world_size: int, warnings: list[str]) -> Topology | None:
    said = {part.topology for part in parts.values() if part.topology is not None}
    fitting = [topology for topology in said if topology.world_size == world_size]
    if len(fitting) < len(said) or len(fitting) > 1:
        warnings.append(f"the ranks do not agree on a topology of {world_size} ranks; it is taken as unknown")
        return None
    return fitting[0] if fitting else None


def _rank_info(header: Header, part: RankFiles) -> RankInfo:
    return RankInfo(
        rank=header.rank,
        host=header.host,
        device=header.device,
        device_name=header.device_name or part.device_name,
        clock=header.clock,
        coordinates=part.coordinates,
        dropped=part.dropped,
        unknown_times=part.unknown_times,
        drift_ppm=part.drift_ppm,
        oversubscribed=part.oversubscribed,
        faults=part.faults,
        closed=part.closed,
    )


def _say_losses(ranks: dict[int, RankInfo], warnings: list[str]) -> None:
    dropped = {rank: info.dropped for rank, info in ranks.items() if info.dropped}
    if dropped:
        warnings.append(f"{rank_list(dropped)}: {sum(dropped.values())} events were dropped while recording")
    unknown = {rank: info.unknown_times for rank, info in ranks.items() if info.unknown_times}
    if unknown:
        warnings.append(
            f"{rank_list(unknown)}: {sum(unknown.values())} events have no times (more marks were under way than the "
            "device's pool holds, or a CUDA graph was being captured)"
        )
    unclosed = [rank for rank, info in ranks.items() if not info.closed]
    if unclosed:
        warnings.append(f"{rank_list(unclosed)}: the recording has no orderly end (still running, or killed)")


def _sources(selection: Selection) -> tuple[str, ...]:
    return tuple(str(header.path) for headers in selection.files.values() for header in headers)


assert set(COLUMNS) == {"rank", *FILE_SCHEMA.names}
