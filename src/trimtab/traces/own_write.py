"""Write a trace as the recorder would have: one Arrow IPC stream per rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from trimtab.events import FILE_SCHEMA, FILE_SUFFIX, HEADER_KEY, SCHEMA_VERSION
from trimtab.traces.table import COLUMNS, RankInfo, Trace

UPTIME_NS = 3_600_000_000_000
"""What a host's monotonic clock shows at the first event."""


def write(trace: Trace, directory: Path, *, batch_rows: int = 65_536, rotate_rows: int | None = None) -> list[Path]:
    """Write ``trace`` into ``directory`` (created if absent) and return the files, in order of rank.

    Batches hold ``batch_rows`` events; a new file begins after ``rotate_rows``. ValueError where a file exists.
    """
    directory.mkdir(parents=True, exist_ok=True)
    events = trace.events.sort("rank", "end", maintain_order=True)
    offsets = _offsets(events, trace)
    table = to_arrow(_rebase(events, trace, offsets))
    ranks = events["rank"].to_numpy()
    started = int(events["start"].min() or 0)  # type: ignore[arg-type]
    files: list[Path] = []
    for rank, info in sorted(trace.ranks.items()):
        first, last = np.searchsorted(ranks, [rank, rank + 1])
        rows = table.slice(first, last - first)
        pieces = [rows] if not rotate_rows else [rows.slice(k, rotate_rows) for k in range(0, len(rows), rotate_rows)]
        for index, piece in enumerate(pieces):
            path = directory / f"rank{rank:05d}-a{trace.attempt}-{index:03d}{FILE_SUFFIX}"
            header = _header(trace, info, offsets[info.clock], index, started)
            said = _metadata(trace, info)
            _write_file(path, piece, header, said, batch_rows, closed=info.closed and index == len(pieces) - 1)
            files.append(path)
    return files


def to_arrow(events: pl.DataFrame) -> pa.Table:
    """An event table as Arrow, in the types of the recorder's files."""
    arrays: list[Any] = []
    for name, wanted in zip(FILE_SCHEMA.names, FILE_SCHEMA.types, strict=True):
        column = events[name]
        if pa.types.is_dictionary(wanted):
            words = column.cast(pl.String).unique().drop_nulls().sort().to_list()
            codes = column.cast(pl.Enum(words)).to_physical().to_arrow().cast(pa.int32())
            arrays.append(pa.DictionaryArray.from_arrays(codes, pa.array(words, pa.string())))
        else:
            arrays.append(column.to_arrow().cast(wanted))
    return pa.Table.from_arrays(arrays, schema=FILE_SCHEMA)


def _offsets(events: pl.DataFrame, trace: Trace) -> dict[str, int]:
    """Unix time of each clock's zero."""
    firsts = dict(events.group_by("rank").agg(pl.min_horizontal("ready", "start").min()).iter_rows())
    offsets: dict[str, int] = {}
    for rank, info in trace.ranks.items():
        offsets.setdefault(info.clock, int(firsts.get(rank) or UPTIME_NS) - UPTIME_NS)
    return offsets


def _rebase(events: pl.DataFrame, trace: Trace, offsets: dict[str, int]) -> pl.DataFrame:
    """Times as the ranks' monotonic clocks showed them."""
    of_rank = {rank: offsets[info.clock] for rank, info in trace.ranks.items()}
    offset = pl.col("rank").replace_strict(of_rank, return_dtype=pl.Int64)
    return events.with_columns([pl.col(name) - offset for name in ("ready", "start", "end")])


def _header(trace: Trace, info: RankInfo, offset: int, index: int, started: int) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": trace.run_id,
        "attempt": trace.attempt,
        "rank": info.rank,
        "world_size": trace.world_size,
        "host": info.host,
        "pid": 1000 + info.rank,
        "device": info.device,
        "device_name": info.device_name,
        "clock_domain": info.clock,
        "unix_offset_ns": offset,
        "granularity": "layer",
        "versions": {},
        "file_index": index,
        "started_unix_ns": started,
    }


def _metadata(trace: Trace, info: RankInfo) -> dict[str, Any]:
    said: dict[str, Any] = {
        "groups": {name: list(ranks) for name, ranks in trace.groups.items() if info.rank in ranks},
        "dropped": info.dropped,
        "oversubscribed": info.oversubscribed,
        "faults": list(info.faults),
    }
    if trace.topology is not None:
        said["topology"] = trace.topology.as_dict()
    if info.coordinates is not None:
        said["coordinates"] = info.coordinates.as_dict()
    return said


def _write_file(
    path: Path, rows: pa.Table, header: dict[str, Any], said: dict[str, Any], batch_rows: int, *, closed: bool
) -> None:
    schema = FILE_SCHEMA.with_metadata({HEADER_KEY: json.dumps(header).encode()})
    batches = rows.combine_chunks().to_batches(max_chunksize=batch_rows) or [_empty()]
    try:
        sink = path.open("xb")
    except FileExistsError:
        raise ValueError(f"{path}: exists already; choose an empty directory") from None
    with sink, pa.ipc.new_stream(sink, schema) as writer:
        for number, batch in enumerate(batches):
            changed = dict(said) if number == 0 else {}
            if closed and number == len(batches) - 1:
                changed["closed"] = True
            writer.write_batch(batch, custom_metadata={HEADER_KEY: json.dumps(changed).encode()})


def _empty() -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=FILE_SCHEMA)


assert set(COLUMNS) == {"rank", *FILE_SCHEMA.names}
