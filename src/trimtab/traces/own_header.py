"""Headers of the recorder's files, and which of the files found belong to the run to be read."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from trimtab.events import HEADER_KEY, SCHEMA_VERSION

MAX_WORLD = 10_000_000
"""Larger worlds and ranks are taken for damage."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself; see :data:`trimtab.events.HEADER_KEY`."""

    path: Path
    run_id: str
    attempt: int
    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    device_name: str
    clock: str
    unix_offset_ns: int
    file_index: int
    started_unix_ns: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to read: the last attempt at one run."""

    run_id: str
    attempt: int
    world_size: int
    files: dict[int, list[Header]]
    """By rank, in the order they were written."""
    warnings: tuple[str, ...]


def printable(text: object) -> str:
    """``text`` on one line whatever it holds, for messages."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in str(text))
    return shown if len(shown) <= 200 else shown[:197] + "..."


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-3, 7``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    words = words if len(words) <= 20 else [*words[:20], "..."]
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(words)}"


def metadata_of(raw: Any) -> dict[str, Any]:
    """The JSON object under our key in Arrow metadata; empty where there is none; ValueError if it is damaged."""
    value = None if raw is None else raw.get(HEADER_KEY)
    if value is None:
        return {}
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("its metadata is not JSON") from None
    if not isinstance(parsed, dict):
        raise ValueError("its metadata is not a JSON object")
    return cast(dict[str, Any], parsed)


def parse_header(path: Path, schema: pa.Schema) -> Header:
    """Header of one file; ValueError says what is wrong with it."""
    raw = metadata_of(schema.metadata)
    if not raw:
        raise ValueError("an Arrow file, but not written by trimtab's recorder")
    version = _integer(raw, "schema_version", 1)
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"written by a newer trimtab (schema {version}, this one reads up to {SCHEMA_VERSION}); upgrade trimtab"
        )
    world_size = _integer(raw, "world_size", 1, MAX_WORLD)
    host = _text(raw, "host")
    return Header(
        path=path,
        run_id=_text(raw, "run_id"),
        attempt=_integer(raw, "attempt", 0, default=0),
        rank=_integer(raw, "rank", 0, world_size - 1),
        world_size=world_size,
        host=host,
        pid=_integer(raw, "pid", 0, default=0),
        device=_text(raw, "device") or "cpu",
        device_name=_text(raw, "device_name"),
        clock=_text(raw, "clock_domain") or host,
        unix_offset_ns=_integer(raw, "unix_offset_ns", -(1 << 62), 1 << 62, default=0),
        file_index=_integer(raw, "file_index", 0, default=0),
        started_unix_ns=_integer(raw, "started_unix_ns", 0, 1 << 62, default=0),
    )


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key, "")
    return value if isinstance(value, str) else str(value)


def _integer(raw: dict[str, Any], key: str, least: int, most: int = 1 << 62, default: int | None = None) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"its header says {key} = {printable(repr(value))}, expected a whole number {least}..{most}")
    return value


def select(headers: list[Header], run_id: str | None = None) -> Selection:
    """The newest run (or ``run_id``), of each rank its last process; what is left out is said in the warnings."""
    warnings: list[str] = []
    kept = _of_run(headers, run_id, warnings)
    processes = _last_processes(kept, warnings)
    sizes = Counter(process[0].world_size for process in processes.values())
    world_size = max(sizes, key=lambda size: (sizes[size], size))
    strangers = [rank for rank, process in processes.items() if process[0].world_size != world_size]
    if strangers:
        warnings.append(f"{rank_list(strangers)}: recorded in a world of another size than {world_size}; not read")
    files = {rank: _in_order(rank, process, warnings) for rank, process in processes.items() if rank not in strangers}
    missing = set(range(world_size)) - set(files)
    if missing:
        warnings.append(f"{rank_list(missing)}: no file; {len(files)} of {world_size} ranks are here")
    attempt = max(header.attempt for found in files.values() for header in found)
    return Selection(kept[0].run_id, attempt, world_size, files, tuple(warnings))


def _of_run(headers: list[Header], run_id: str | None, warnings: list[str]) -> list[Header]:
    runs: dict[str, list[Header]] = defaultdict(list)
    for header in headers:
        runs[header.run_id].append(header)
    newest = max(runs, key=lambda run: (max(h.started_unix_ns for h in runs[run]), run))
    chosen = newest if run_id is None else run_id
    if chosen not in runs:
        known = ", ".join(printable(run) for run in sorted(runs))
        raise ValueError(f"no files of run '{printable(chosen)}' here, only of: {known}")
    others = ", ".join(f"'{printable(run)}'" for run in sorted(runs) if run != chosen)
    if others:
        warnings.append(f"files of {len(runs)} runs in one place: run '{printable(chosen)}' is read, not {others}")
    return runs[chosen]


def _last_processes(headers: list[Header], warnings: list[str]) -> dict[int, list[Header]]:
    """Files of the last process of each rank, without ranks that only an earlier attempt left files of."""
    processes: dict[int, dict[tuple[int, str, int], list[Header]]] = defaultdict(lambda: defaultdict(list))
    for header in headers:
        processes[header.rank][header.attempt, header.host, header.pid].append(header)
    in_turn = {
        rank: sorted(of_rank.values(), key=lambda files: (max(h.started_unix_ns for h in files), files[0].attempt))
        for rank, of_rank in sorted(processes.items())
    }
    last = {rank: turns[-1] for rank, turns in in_turn.items()}
    again = [rank for rank, turns in in_turn.items() if len(turns) > 1]
    if not again:
        return last
    if 2 * len(again) < len(last):  # not a restart of the job, but single ranks that two processes claim
        for rank in again:
            kept, names = _names(last[rank]), _names(header for files in in_turn[rank][:-1] for header in files)
            warnings.append(f"rank {rank} is claimed by several processes: {kept} read, {names} not")
        return last
    warnings.append(
        f"run '{printable(headers[0].run_id)}' was started again: its last attempt is read, not earlier ones"
    )
    # The number of an attempt may differ between ranks (the recorder raises it until the name is free): go by time.
    starts = [statistics.median(in_turn[rank][turn][0].started_unix_ns for rank in again) for turn in (-2, -1)]
    stale = [rank for rank, files in last.items() if files[0].started_unix_ns < sum(starts) / 2]
    if stale:
        warnings.append(f"{rank_list(stale)}: only files of an earlier attempt; not read")
    return {rank: files for rank, files in last.items() if rank not in stale}


def _in_order(rank: int, headers: list[Header], warnings: list[str]) -> list[Header]:
    """Files of one process in the order they were written, without copies."""
    files: dict[int, Header] = {}
    copies: list[Header] = []
    for header in sorted(headers, key=lambda h: (h.file_index, -h.path.stat().st_size, str(h.path))):
        if header.file_index in files:
            copies.append(header)
        else:
            files[header.file_index] = header
    if copies:
        warnings.append(f"rank {rank} is claimed by several files: {_names(files.values())} read, {_names(copies)} not")
    gaps = sorted(set(range(max(files) + 1)) - set(files))
    if gaps:
        warnings.append(f"rank {rank}: part {', '.join(map(str, gaps))} of its files is missing")
    return list(files.values())


def _names(headers: Iterable[Header]) -> str:
    return ", ".join(printable(header.path.name) for header in headers)
