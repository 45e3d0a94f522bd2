"""What a unit's files come to: seconds of work by kind, rank and step, its links, and the rows that others need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trimtab.events import FILE_SCHEMA, Kind
from trimtab.scan.arrays import Bools, Ints, sums
from trimtab.scan.fold.columns import COLUMNS_READ, OddRank, RankTable, rank_table
from trimtab.scan.fold.joining import Meetings
from trimtab.scan.fold.units import Units
from trimtab.scan.lanes import Pieces, cut
from trimtab.scan.measure import PASS_CODES
from trimtab.scan.table import CODE, KINDS, Table, is_of
from trimtab.traces.own_header import Header
from trimtab.traces.own_rank import RankFiles, read_batches, to_frame
from trimtab.traces.table import COLUMNS

ROWS: list[str] = [name for name in COLUMNS if name == "rank" or name in COLUMNS_READ]
"""Columns of the rows that are kept."""
MOST_PASSES = 10_000_000
"""Steps times microbatches of one rank; more are damage."""
_FORWARD = (CODE[Kind.FORWARD],)
_BACKWARD = (CODE[Kind.BACKWARD], CODE[Kind.WGRAD])


@dataclass(frozen=True, slots=True)
class Digest:
    """One unit."""

    unit: int
    rows: pl.DataFrame
    """Part of an event table: steps, counters, windows, and all that has to do with communication across units."""
    cells: pl.DataFrame
    """``rank, step`` and of each kind of work ``ns_<code>`` and the instances ``n_<code>`` (see measure)."""
    passes: pl.DataFrame
    """``rank, step, microbatch, forward_ns, backward_ns``."""
    links: pl.DataFrame
    """Transfers within the unit; see :class:`trimtab.scan.fold.joining.Joined`."""
    matched: pl.DataFrame
    """``step, matched, unmatched``: communications within the unit."""
    parts: dict[int, RankFiles]
    odd: tuple[int, ...]
    """Ranks that have to be read in full."""


Columns = dict[str, NDArray[np.generic]]


@dataclass(slots=True)
class _Collected:
    rows: list[pa.Table] = field(default_factory=list[pa.Table])
    cells: list[Columns] = field(default_factory=list[Columns])
    passes: list[Columns] = field(default_factory=list[Columns])
    parts: dict[int, RankFiles] = field(default_factory=dict[int, RankFiles])
    odd: list[int] = field(default_factory=list[int])


def digest(
    unit: int,
    files: Mapping[int, list[Header]],
    offsets: Mapping[str, int],
    units: Units,
    steps: Collection[int] | None = None,
) -> Digest:
    """Read the files of ``unit`` rank by rank (of their events those of ``steps``, if given), and sum them up."""
    out = _Collected()
    meetings = Meetings(units)
    for rank, headers in files.items():
        part = RankFiles()
        try:
            _add_rank(rank, headers, offsets, part, meetings, out, steps)
        except OddRank:
            out.odd.append(rank)
        out.parts[rank] = part
    joined = meetings.join()
    return Digest(
        unit,
        _rows(out.rows),
        _frame(out.cells, _CELLS),
        _frame(out.passes, _PASSES),
        joined.links,
        joined.matched,
        out.parts,
        tuple(out.odd),
    )


def _add_rank(
    rank: int,
    headers: list[Header],
    offsets: Mapping[str, int],
    part: RankFiles,
    meetings: Meetings,
    out: _Collected,
    steps: Collection[int] | None,
) -> None:
    batches: list[pa.RecordBatch] = []
    for header in headers:
        batches += [b.replace_schema_metadata(None) for b in read_batches(header, part, list(COLUMNS_READ), steps)]
    part.events = sum(batch.num_rows for batch in batches)
    if not batches or len({header.clock for header in headers}) > 1:
        raise OddRank("no events, or clocks that changed")
    try:
        whole = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    except pa.ArrowException:
        raise OddRank("files of different schemas") from None
    seen = rank_table(whole, headers[-1].device)
    pieces = cut(seen.table, np.flatnonzero(seen.table.is_comm)).pieces
    cells, passes = _cells(rank, seen.table, pieces), _passes(rank, seen.table, pieces)
    shared = meetings.add(seen.table, part.groups)
    kept = _kept_rows(seen, shared)
    out.rows.append(_shifted(whole.take(pa.array(kept)), rank, offsets[headers[-1].clock]))
    out.cells.append(cells)
    out.passes.append(passes)


def _kept_rows(seen: RankTable, shared: Bools) -> Ints:
    """Rows of the files that others need: ``shared`` communications, waits for them, and what is no work."""
    table = seen.table
    waits = table.is_wait & np.isin(table.correlation, table.event[shared & (table.event >= 0)])
    last = [seen.last_work] if seen.last_work >= 0 else []
    return np.unique(np.r_[seen.row[shared | waits], seen.marks, np.array(last, dtype=np.int64)])


def _shifted(rows: pa.Table, rank: int, offset: int) -> pa.Table:
    for name in ("ready", "start", "end"):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, FILE_SCHEMA.field(name), pc.call_function("add", [rows.column(name), offset]))
    return rows.append_column("rank", pa.array(np.full(rows.num_rows, rank, dtype=np.int32)))


def _rows(parts: list[pa.Table]) -> pl.DataFrame:
    if not parts:
        return pl.DataFrame(schema={name: COLUMNS[name] for name in ROWS})
    return to_frame(pa.concat_tables(parts).combine_chunks(), None, 0, ROWS)


def _cells(rank: int, table: Table, pieces: Pieces) -> Columns:
    """Nanoseconds and instances of each kind of work, by step."""
    steps = table.steps.count
    shape = len(KINDS), steps
    cell = pieces.kind * steps + pieces.step
    spent = sums(cell, pieces.duration, len(KINDS) * steps).reshape(shape)
    instance = cell
    row = np.where(pieces.row >= 0, pieces.row, len(table.kind))
    for column in (table.chunk, table.microbatch):
        said = np.append(column, -1)[row]
        instance = instance * (int(said.max(initial=-1)) + 2) + said + 1
        if instance.max(initial=0) > 1 << 40:
            raise OddRank("numbers of chunks or microbatches that make no sense")
    new = np.flatnonzero(np.diff(instance, prepend=-1))  # most pieces are of the same instance as the one before
    _, first = np.unique(instance[new], return_index=True)
    count = np.bincount(cell[new[first]], minlength=len(KINDS) * steps).reshape(shape)
    columns: Columns = {"rank": np.full(steps, rank), "step": table.steps.numbers}
    columns |= {f"ns_{code}": spent[code] for code in range(len(KINDS))}
    return columns | {f"n_{code}": count[code] for code in range(len(KINDS))}


def _passes(rank: int, table: Table, pieces: Pieces) -> Columns:
    """Forward and backward by microbatch."""
    pick = np.flatnonzero(is_of(pieces.kind, PASS_CODES) & (pieces.row >= 0))
    microbatch = table.microbatch[pieces.row[pick]]
    pick, microbatch = pick[microbatch >= 0], microbatch[microbatch >= 0]
    count = int(microbatch.max(initial=0)) + 1
    size = table.steps.count * count
    if size > MOST_PASSES:
        raise OddRank("numbers of microbatches that make no sense")
    index = pieces.step[pick] * count + microbatch
    seen = np.flatnonzero(np.bincount(index, minlength=size))
    columns: Columns = {"rank": np.full(len(seen), rank), "step": table.steps.numbers[seen // count]}
    columns["microbatch"] = seen % count
    for label, codes in (("forward_ns", _FORWARD), ("backward_ns", _BACKWARD)):
        mine = is_of(pieces.kind[pick], codes)
        columns[label] = sums(index[mine], pieces.duration[pick][mine], size)[seen]
    return columns


_CELLS = {
    **dict.fromkeys(("rank", "step"), pl.Int64),
    **{f"ns_{code}": pl.Float64 for code in range(len(KINDS))},
    **{f"n_{code}": pl.Int64 for code in range(len(KINDS))},
}
_PASSES = {
    **dict.fromkeys(("rank", "step", "microbatch"), pl.Int64),
    **dict.fromkeys(("forward_ns", "backward_ns"), pl.Float64),
}


def _frame(parts: list[Columns], schema: Mapping[str, Any]) -> pl.DataFrame:
    if not parts:
        return pl.DataFrame(schema=schema)
    return pl.DataFrame({name: np.concatenate([part[name] for part in parts]) for name in schema}, schema=schema)
