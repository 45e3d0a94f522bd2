"""Read the files of summaries: what is left of steps whose detail was removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from trimtab.events import NAME_STEP, Kind
from trimtab.traces.own_header import Header, parse_header, printable

SPENT = ("compute_ns", "comm_ns", "beside_ns", "data_ns", "events")
"""What a step's row says, see :data:`trimtab.events.HEADER_KEY`."""
SUMS = ("count", "total_ns", "min_ns", "max_ns", "max_step", "last_step", "wait_ns", "max_wait_ns")
"""What a site's row says."""
_TEXTS = ("kind", "name", "stream", "group", "op")

STEP_COLUMNS: dict[str, Any] = {"rank": pl.Int32, "step": pl.Int32, "start": pl.Int64, "end": pl.Int64} | dict.fromkeys(
    SPENT, pl.Int64
)
SITE_COLUMNS: dict[str, Any] = (
    {"rank": pl.Int32, "step": pl.Int32, "start": pl.Int64, "end": pl.Int64, "layer": pl.Int32, "bytes": pl.Int64}
    | dict.fromkeys(_TEXTS, pl.String)
    | dict.fromkeys(SUMS, pl.Int64)
)
EVENT_COLUMNS: dict[str, Any] = STEP_COLUMNS | dict.fromkeys(_TEXTS, pl.String) | {"args": pl.String}
EVENT_COLUMNS = {name: kind for name, kind in EVENT_COLUMNS.items() if name not in SPENT}


@dataclass(frozen=True, slots=True)
class Summaries:
    """What the files of summaries of a run say. Times are Unix nanoseconds on each rank's clock."""

    steps: pl.DataFrame
    """One row for each rank and step, columns :data:`STEP_COLUMNS`: its span, the time spent on each class of work
    (null where the file does not say), and the number of events."""
    sites: pl.DataFrame
    """One row for each rank, stretch of steps (``step`` to ``last_step``) and site, columns :data:`SITE_COLUMNS`."""
    events: pl.DataFrame
    """Rare events (gc, checkpoint, evaluation, user, counters) as they were, columns :data:`EVENT_COLUMNS`."""
    warnings: tuple[str, ...] = ()


def read_summaries(files: Iterable[Path]) -> Summaries:
    """The summaries in ``files`` (:attr:`trimtab.traces.table.Trace.summaries`); damage is said in the warnings."""
    steps = [pl.DataFrame(schema=STEP_COLUMNS)]
    sites = [pl.DataFrame(schema=SITE_COLUMNS)]
    events = [pl.DataFrame(schema=EVENT_COLUMNS)]
    warnings: list[str] = []
    for file in files:
        try:
            header, table = _read(file, warnings)
            frame = _frame(table, header)
        except (ValueError, OSError, pa.ArrowException, pl.exceptions.PolarsError) as error:
            warnings.append(f"{printable(file)}: cannot be read ({printable(error)}); it is left out")
            continue
        alone = pl.col("event_id").is_not_null()
        is_step = alone & (pl.col("kind") == Kind.HOST.value) & (pl.col("name") == NAME_STEP)
        steps.append(_with_args(frame.filter(is_step), SPENT, STEP_COLUMNS))
        sites.append(_with_args(frame.filter(~alone), SUMS, SITE_COLUMNS))
        events.append(_with_args(frame.filter(alone & ~is_step), (), EVENT_COLUMNS))
    return Summaries(pl.concat(steps).unique(["rank", "step"]), pl.concat(sites), pl.concat(events), tuple(warnings))


def _read(file: Path, warnings: list[str]) -> tuple[Header, pa.Table]:
    """Every complete batch."""
    batches: list[pa.RecordBatch] = []
    with pa.OSFile(str(file)) as source, pa.ipc.open_stream(source) as reader:
        header = parse_header(file, reader.schema)
        schema = reader.schema
        try:
            while True:
                batch = reader.read_next_batch()
                batch.validate(full=True)
                batches.append(batch)
        except StopIteration:
            pass
        except (pa.ArrowException, OSError, EOFError):
            warnings.append(f"{printable(file)}: its end is cut off or damaged; {len(batches)} batches are read")
    return header, pa.Table.from_batches(batches, schema=schema)


def _frame(table: pa.Table, header: Header) -> pl.DataFrame:
    frame = pl.DataFrame(pl.from_arrow(table.unify_dictionaries()))
    return frame.with_columns(
        pl.lit(header.rank, pl.Int32).alias("rank"),
        *[pl.col(name).cast(pl.Int64) + header.unix_offset_ns for name in ("start", "end")],
        *[pl.col(name).cast(pl.String) for name in _TEXTS],
    )


def _with_args(frame: pl.DataFrame, names: tuple[str, ...], columns: dict[str, Any]) -> pl.DataFrame:
    """With what the args say as columns; null where they do not say it, or make no sense."""
    said = [pl.col("args").str.json_path_match(f"$.{name}").cast(pl.Int64, strict=False).alias(name) for name in names]
    return frame.with_columns(said).select(pl.col(name).cast(kind, strict=False) for name, kind in columns.items())
