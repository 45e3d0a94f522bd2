"""Headers of the recorder's files, and which of the files found belong to the run to be read."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from trimtab.events import DETAIL_KEY, DETAIL_SUMMARY, HEADER_KEY, SCHEMA_VERSION

MAX_WORLD = 10_000_000
"""Larger worlds and ranks are taken for damage."""
_COPIES_NAMED = 3
"""Where more ranks than this have files twice, somebody copied a directory."""


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
    summary: bool
    """The file holds summaries."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to read: one attempt at one run, the last unless another was asked for."""

    run_id: str
    attempt: int
    world_size: int
    files: dict[int, list[Header]]
    """By rank, in the order they were written; empty where only summaries are left."""
    summaries: dict[int, list[Header]]
    """The same for the files of summaries, of ranks that have any."""
    warnings: tuple[str, ...]

    def header(self, rank: int) -> Header:
        """The last of the rank's files, which speaks for it."""
        return (self.files[rank] or self.summaries[rank])[-1]


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
        summary=raw.get(DETAIL_KEY) == DETAIL_SUMMARY,
    )


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key, "")
    return value if isinstance(value, str) else str(value)


def _integer(raw: dict[str, Any], key: str, least: int, most: int = 1 << 62, default: int | None = None) -> int:
    value = raw.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"its header says {key} = {printable(repr(value))}, expected a whole number {least}..{most}")
    return value


def select(headers: list[Header], run_id: str | None = None, attempt: int | None = None) -> Selection:
    """The newest run (or ``run_id``), of each rank its last process (or that of ``attempt``).

    What is left out is said in the warnings. Raises ValueError where nothing fits.
    """
    warnings: list[str] = []
    kept = _of_run(headers, run_id, warnings)
    if attempt is not None:
        kept = _of_attempt(kept, attempt)
    kept = _of_one_world(kept, warnings)
    world_size = kept[0].world_size
    processes = _last_processes(kept, warnings)
    files, summaries = _in_order(processes, warnings)
    last = max(header.attempt for found in processes.values() for header in found)
    return Selection(kept[0].run_id, last, world_size, files, summaries, tuple(warnings))


def _of_run(headers: list[Header], run_id: str | None, warnings: list[str]) -> list[Header]:
    runs: dict[str, list[Header]] = defaultdict(list)
    for header in headers:
        runs[header.run_id].append(header)
    chosen = max(runs, key=lambda run: (*_newness(runs[run]), run)) if run_id is None else run_id
    if chosen not in runs:
        known = ", ".join(printable(run) for run in sorted(runs))
        raise ValueError(f"no files of run '{printable(chosen)}' here, only of: {known}")
    others = ", ".join(f"'{printable(run)}'" for run in sorted(runs) if run != chosen)
    if others:
        warnings.append(f"files of {len(runs)} runs in one place: run '{printable(chosen)}' is read, not {others}")
    return runs[chosen]


def _newness(headers: list[Header]) -> tuple[bool, int, int]:
    """To tell which of several runs, or of its worlds, is the one to read.

    One that half of its ranks left files of comes before a single file whose header may be damaged; then it is the
    later one, by the median of its ranks' last starts.
    """
    starts: dict[int, int] = {}
    for header in headers:
        starts[header.rank] = max(starts.get(header.rank, 0), header.started_unix_ns)
    world_size = statistics.mode(header.world_size for header in headers)
    return 2 * len(starts) >= world_size, statistics.median_low(starts.values()), len(starts)


def _of_attempt(headers: list[Header], attempt: int) -> list[Header]:
    kept = [header for header in headers if header.attempt == attempt]
    if not kept:
        known = ", ".join(map(str, sorted({header.attempt for header in headers})))
        raise ValueError(f"no attempt {attempt} at run '{printable(headers[0].run_id)}' here, only: {known}")
    return kept


def _of_one_world(headers: list[Header], warnings: list[str]) -> list[Header]:
    """Files of the newest number of ranks, if a restart changed it."""
    worlds: dict[int, list[Header]] = defaultdict(list)
    for header in headers:
        worlds[header.world_size].append(header)
    chosen = max(worlds, key=lambda size: _newness(worlds[size]))
    for size, others in sorted(worlds.items()):
        if size == chosen:
            continue
        if _newness(others)[0]:
            attempts = ", ".join(map(str, sorted({header.attempt for header in others})))
            warnings.append(
                f"run '{printable(headers[0].run_id)}' was started with {size} ranks, too (attempt {attempts}): "
                f"what its {chosen} ranks recorded is read"
            )
        else:
            strangers = rank_list(header.rank for header in others)
            warnings.append(f"{strangers}: recorded in a world of another size than {chosen}; not read")
    return worlds[chosen]


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


def _in_order(
    processes: dict[int, list[Header]], warnings: list[str]
) -> tuple[dict[int, list[Header]], dict[int, list[Header]]]:
    """Each rank's files of events and of summaries, in the order they were written, without copies."""
    files: dict[int, list[Header]] = {}
    summaries: dict[int, list[Header]] = {}
    copies: dict[int, list[Header]] = {}
    beheaded: list[int] = []
    for rank, headers in processes.items():
        parts, extra = _parts([header for header in headers if not header.summary])
        sums, more = _parts([header for header in headers if header.summary])
        files[rank] = list(parts.values())
        if sums:
            summaries[rank] = list(sums.values())
        if extra or more:
            copies[rank] = extra + more
        if parts and min(parts) > 0 and not sums:
            beheaded.append(rank)
        gaps = sorted(set(range(min(parts), max(parts) + 1)) - set(parts)) if parts else []
        if gaps:
            warnings.append(f"rank {rank}: part {', '.join(map(str, gaps))} of its files is missing")
    if beheaded:
        warnings.append(f"{rank_list(beheaded)}: the first of the files are gone, without summaries")
    warnings += _said_of_copies(copies, files)
    return files, summaries


def _parts(headers: list[Header]) -> tuple[dict[int, Header], list[Header]]:
    """Files by number, and copies, of which the largest counts."""
    files: dict[int, Header] = {}
    copies: list[Header] = []
    for header in sorted(headers, key=lambda h: (h.file_index, -h.path.stat().st_size, str(h.path))):
        if header.file_index in files:
            copies.append(header)
        else:
            files[header.file_index] = header
    return files, copies


def _said_of_copies(copies: dict[int, list[Header]], files: dict[int, list[Header]]) -> list[str]:
    if len(copies) > _COPIES_NAMED:
        count = sum(map(len, copies.values()))
        return [f"{rank_list(copies)}: {count} files are here twice; the larger one of two is read"]
    return [
        f"rank {rank} is claimed by several files: {_names(files[rank])} read, {_names(more)} not"
        for rank, more in copies.items()
    ]


def _names(headers: Iterable[Header]) -> str:
    return ", ".join(printable(header.path.name) for header in headers)
