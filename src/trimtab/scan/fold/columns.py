"""The files of one rank as the flat arrays that scan works on, without a detour over an event table."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.events import COMM_KINDS, COMPUTE_KINDS, FILE_SCHEMA, NAME_STEP, NAME_WAIT, STREAM_COMPUTE, Kind
from trimtab.scan.arrays import Bools, Ints
from trimtab.scan.table import CODE, COMM_CODES, KINDS, Steps, Table, is_of, step_at
from trimtab.traces.own_rank import MOST_TIME_NS

COLUMNS_READ = tuple(name for name in FILE_SCHEMA.names if name not in ("parent_id", "dtype", "shape"))
"""What scan looks at."""
_NUMBERS = ("microbatch", "chunk", "layer", "seq", "bytes", "src", "dst", "tag")
_SPANS = (Kind.FORWARD, Kind.BACKWARD, Kind.WGRAD, Kind.RECOMPUTE, Kind.OPTIMIZER)
_WORK = tuple(CODE[kind] for kind in (*COMPUTE_KINDS, *COMM_KINDS))


class OddRank(Exception):  # noqa: N818
    """Something of a rank is out of the ordinary: it has to be looked at in full, by those who know what to do then."""


@dataclass(frozen=True, slots=True)
class RankTable:
    """The events of one rank in its steps."""

    table: Table
    row: Ints
    """By row of the table: the row of the files' that it is."""
    marks: Ints
    """Rows of the files that are no work, but tell of it: steps, profiler windows, samples of counters ..."""
    last_work: int
    """... and the work that ended last, by which the last step is closed."""


def rank_table(files: pa.Table, device: str) -> RankTable:
    """``files`` (all batches of one rank) as a table of one rank, its times counted from the start of its first step.

    Raises OddRank where not every row makes sense by itself, or the steps are not in order.
    """
    _check_types(files)
    kind, kind_words = _codes(files, "kind")
    codes = np.array([*(CODE.get(word, -1) for word in kind_words), -1], dtype=np.int64)  # type: ignore[call-overload]
    kind = codes[kind]
    start, end = _times(files, "start"), _times(files, "end")
    ready = _times(files, "ready", start)
    _check_rows(kind, ready, start, end)
    name, names = _codes(files, "name")
    stream, streams = _codes(files, "stream")
    group, groups = _codes(files, "group")
    op, ops = _codes(files, "op")
    step = _integers(files, "step")
    counter = kind == CODE[Kind.COUNTER]
    host = kind == CODE[Kind.HOST]
    is_step = host & (name == _code(names, NAME_STEP))
    origin, steps = _steps(step, start, end, is_step)
    steps, last_work = _closed(steps, step, kind, end, origin)
    moment = np.where(is_of(kind, COMM_CODES), ready, start) - origin
    zero = np.zeros(len(kind), dtype=np.int64)
    index = step_at(steps, zero, moment)
    kept = (index >= 0) & ~is_step & ~counter & ~_kernels_within_spans(kind)
    row = np.flatnonzero(kept)
    columns = {name: _integers(files, name)[row] for name in _NUMBERS}
    columns |= {"cpu": _integers(files, "cpu_ns")[row], "event": _integers(files, "event_id")[row]}
    columns |= {"correlation": _integers(files, "correlation_id")[row]}
    columns |= {"rank": zero[row], "step": index[row], "kind": kind[row], "name": name[row]}
    columns |= {"group": group[row], "op": op[row]}
    columns |= {label: times[row] - origin for label, times in (("ready", ready), ("start", start), ("end", end))}
    known = set(columns) | {"ids", "origin", "steps", "in_place", "is_wait", "names", "groups", "ops", "coordinates"}
    known |= {"synchronous_device", "transfers_on_host"}
    columns |= {field.name: np.full(len(row), -1) for field in fields(Table) if field.name not in known}
    table = Table(
        ids=np.zeros(1, dtype=np.int64),
        origin=np.array([origin]),
        steps=steps,
        in_place=stream[row] == _code(streams, STREAM_COMPUTE),
        is_wait=host[row] & (name[row] == _code(names, NAME_WAIT)),
        names=names,
        groups=groups,
        ops=ops,
        coordinates=(None,),
        synchronous_device=np.array([device == "cpu"]),
        transfers_on_host=device != "cuda",
        **columns,
    )
    window = host & (name == _code(names, "window"))
    return RankTable(table, row, np.flatnonzero(is_step | counter | window), last_work)


def _check_types(files: pa.Table) -> None:
    for name in COLUMNS_READ:
        place = files.schema.get_field_index(name)
        if place < 0 or files.schema.field(place).type != FILE_SCHEMA.field(name).type:
            raise OddRank(f"{name} is not of the schema's type")


def _check_rows(kind: Ints, ready: Ints, start: Ints, end: Ints) -> None:
    """Whoever is to leave rows out, and say so, needs all of them."""
    if not len(kind):
        raise OddRank("no events")
    if kind.min() < 0:
        raise OddRank("events of unknown kind")
    if (end < start).any() or (ready > end).any():
        raise OddRank("events end before they start")
    if min(ready.min(), start.min()) <= -MOST_TIME_NS or end.max() >= MOST_TIME_NS:
        raise OddRank("events without a time, or far away")


def _kernels_within_spans(kind: Ints) -> Bools:
    """Kernels of ranks that tell their layers, too, say nothing new; without layers, they are all there is."""
    kernel = kind == CODE[Kind.KERNEL]
    if kernel.any() and not is_of(kind, [CODE[span] for span in _SPANS]).any():
        raise OddRank("kernels only")
    return kernel


def _steps(step: Ints, start: Ints, end: Ints, is_step: Bools) -> tuple[int, Steps]:
    rows = np.flatnonzero(is_step & (step >= 0))
    if not len(rows):
        raise OddRank("no steps")
    rows = rows[np.argsort(step[rows], kind="stable")]
    numbers, begin, stop = step[rows], start[rows], end[rows]
    if (np.diff(numbers) <= 0).any() or (np.diff(begin) <= 0).any() or (begin[1:] < stop[:-1]).any():
        raise OddRank("steps that are there twice, or not in order")
    origin = int(begin[0])
    return origin, Steps(numbers, (begin - origin)[None, :], (stop - origin)[None, :])


def _closed(steps: Steps, step: Ints, kind: Ints, end: Ints, origin: int) -> tuple[Steps, int]:
    """The last step lasts until the rank's last work in it, as :func:`trimtab.scan.table.build` has it."""
    work = np.flatnonzero((step == steps.numbers[-1]) & is_of(kind, _WORK))
    if not len(work):
        return steps, -1
    last = int(work[np.argmax(end[work])])
    closed = steps.end.copy()
    closed[0, -1] = min(closed[0, -1], int(end[last]) - origin)
    return Steps(steps.numbers, steps.begin, closed), last


def _integers(files: pa.Table, name: str) -> Ints:
    column = files.column(name)
    return np.asarray((pc.fill_null(column, -1) if column.null_count else column).to_numpy(), dtype=np.int64)


def _times(files: pa.Table, name: str, default: Ints | None = None) -> Ints:
    column = files.column(name)
    if not column.null_count:
        return np.asarray(column.to_numpy(), dtype=np.int64)
    missing = column.is_null().to_numpy()
    times = pc.fill_null(column, -MOST_TIME_NS).to_numpy()
    return np.asarray(times if default is None else np.where(missing, default, times), dtype=np.int64)


def _codes(files: pa.Table, name: str) -> tuple[Ints, tuple[str, ...]]:
    """Positions in the words that follow; -1: null."""
    column = files.column(name)
    if column.num_chunks != 1:
        column = column.combine_chunks() if column.num_chunks else column
    chunk = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    indices = chunk.indices
    codes = (pc.fill_null(indices, -1) if indices.null_count else indices).to_numpy(zero_copy_only=False)
    return codes.astype(np.int64), tuple(chunk.dictionary.to_pylist())


def _code(words: tuple[str, ...], word: str) -> int:
    return words.index(word) if word in words else -2


assert len(KINDS) == len(Kind)
