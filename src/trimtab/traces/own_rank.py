"""Read the files of one rank: batch by batch as far as they go, without what no reader could make sense of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.topology import Coordinates, Topology
from trimtab.traces.own_header import Header, metadata_of, printable
from trimtab.traces.table import COLUMNS

TIMES = ("ready", "start", "end")
MOST_TIME_NS = 1 << 62
"""Times further from 1970 (146 years) are damage; within, differences do not overflow."""
DRIFT_NS = 1_000_000_000
"""Over less than this, a drift of clocks is not told from the error of reading them."""
MERGE_ROWS = 1 << 18
"""Frames of single files are copied together at this size, which frees the buffers they were read into."""


@dataclass(slots=True)
class RankFiles:
    """What the files of one rank held."""

    groups: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    topology: Topology | None = None
    coordinates: Coordinates | None = None
    dropped: int = 0
    unknown_times: int = 0
    device_name: str = ""
    anchors: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """The first and the last pair of device and host times."""
    oversubscribed: int = 0
    faults: tuple[str, ...] = ()
    closed: bool = False
    events: int = 0
    problems: list[str] = field(default_factory=list[str])

    @property
    def drift_ppm(self) -> float | None:
        """How much faster the device's clock ran than the host's, in parts per million; None if that is not known."""
        if len(self.anchors) < 2:
            return None
        (device_from, host_from), (device_to, host_to) = self.anchors
        if host_to - host_from < DRIFT_NS:
            return None
        return ((device_to - device_from) / (host_to - host_from) - 1) * 1e6


class Merged:
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


def read_rank(
    headers: list[Header], offsets: dict[str, int], merged: Merged, steps: Collection[int] | None = None
) -> RankFiles:
    """Events (of ``steps``, if given) go into ``merged``, with their times moved by the ``offsets`` of their clocks."""
    part = RankFiles()
    for header in headers:
        batches = read_batches(header, part, merged.columns, steps)
        if not batches:
            continue
        try:
            frame = to_frame(pa.Table.from_batches(batches), header.rank, offsets[header.clock], merged.columns)
        except (pl.exceptions.PolarsError, pa.ArrowException, ValueError) as error:
            part.problems.append(f"{printable(header.path)}: not of the event schema ({printable(error)}); left out")
            continue
        frame = _plausible(frame, header, part)
        part.events += len(frame)
        merged.add(frame)
    return part


def read_batches(
    header: Header, part: RankFiles, columns: list[str], steps: Collection[int] | None = None
) -> list[pa.RecordBatch]:
    """All complete batches of a file, of their rows those of ``steps``; what their metadata says goes into ``part``."""
    batches: list[pa.RecordBatch] = []
    chosen = None if steps is None else pc.SetLookupOptions(value_set=pa.array(sorted(steps), pa.int32()))
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
                    batches.append(_chosen(item.batch, chosen))
                    _take_metadata(item.custom_metadata, part, header)
    except StopIteration:
        pass
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, MemoryError):
        part.problems.append(
            f"{printable(header.path)}: its end is cut off or damaged ({size - good} bytes after "
            f"{len(batches)} good batches are lost)"
        )
    return batches


def _chosen(batch: pa.RecordBatch, steps: Any) -> pa.RecordBatch:
    place = batch.schema.get_field_index("step")
    if steps is None or place < 0:
        return batch
    return batch.filter(pc.call_function("is_in", [batch.column(place)], options=steps))


def _take_metadata(raw: Any, part: RankFiles, header: Header) -> None:
    try:
        said = metadata_of(raw)
        for name, ranks in said.get("groups", {}).items():
            part.groups[str(name)] = tuple(int(rank) for rank in ranks)
        if "topology" in said:
            part.topology = Topology(**{key: int(value) for key, value in said["topology"].items()})
        if "coordinates" in said:
            part.coordinates = Coordinates(**{key: int(value) for key, value in said["coordinates"].items()})
        part.dropped = int(said.get("dropped", part.dropped))
        part.unknown_times = int(said.get("unknown_times", part.unknown_times))
        part.device_name = str(said.get("device_name", part.device_name))
        for device_ns, host_ns in said.get("anchors", []):
            part.anchors[1:] = [(int(device_ns), int(host_ns))]
        part.oversubscribed = int(said.get("oversubscribed", part.oversubscribed))
        part.faults = tuple(str(fault) for fault in said.get("faults", part.faults))
        part.closed = bool(said.get("closed", False))
    except (ValueError, TypeError, AttributeError) as error:
        problem = f"{printable(header.path)}: a batch's metadata is not understood ({printable(error)})"
        if problem not in part.problems:
            part.problems.append(problem)


def read_metadata(headers: list[Header], part: RankFiles) -> None:
    """What the files of summaries say about their rank."""
    for header in headers:
        read_batches(header, part, ["step"])


def to_frame(table: pa.Table, rank: int | None, offset: int, columns: list[str]) -> pl.DataFrame:
    """``table`` as part of an event table, its times moved by ``offset``; ``rank`` is None where it has that column."""
    frame = pl.DataFrame(pl.from_arrow(table.unify_dictionaries()))
    expressions: list[pl.Expr] = []
    for name in columns:
        if name == "rank" and rank is not None:
            expressions.append(pl.lit(rank, pl.Int32).alias(name))
        elif name not in frame.columns:
            expressions.append(pl.lit(None, COLUMNS[name]).alias(name))
        elif name in TIMES:
            expressions.append(pl.col(name).cast(pl.Int64) + offset)
        elif name == "kind":
            expressions.append(pl.col(name).cast(COLUMNS[name], strict=False))
        else:
            expressions.append(pl.col(name).cast(COLUMNS[name]))
    return frame.select(expressions)


def _plausible(frame: pl.DataFrame, header: Header, part: RankFiles) -> pl.DataFrame:
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
