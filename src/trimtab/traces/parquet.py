"""Write a trace's event table as Parquet, for other programs: the columns of the event schema, all steps."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.events import EVENT_SCHEMA, HEADER_KEY, SCHEMA_VERSION
from trimtab.traces.own_write import to_arrow
from trimtab.traces.table import Trace
from trimtab.traces.window import Written, whole_file


def write_parquet(trace: Trace, path: str | os.PathLike[str], steps: tuple[int, int] | None = None) -> Written:
    """Write ``steps`` (first, last) or everything; what is known of the ranks and groups goes into the metadata.

    Raises ValueError where there is nothing to write, or the file cannot be written.
    """
    events = trace.events
    if steps is not None:
        events = events.filter(pl.col("step").is_between(*steps))
    if not len(events):
        raise ValueError("nothing to write: the trace holds no events" + (" in these steps" if steps else ""))
    events = events.sort("rank", "start")
    table = to_arrow(events)
    count = len(events)
    run_id = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([trace.run_id], pa.string()))
    constants = [run_id, np.full(count, trace.attempt, np.int32), events["rank"].to_numpy()]
    arrays = [pa.array(column) for column in constants] + table.columns
    said = {
        "schema_version": SCHEMA_VERSION,
        "world_size": trace.world_size,
        "topology": trace.topology.as_dict() if trace.topology else None,
        "groups": {name: list(ranks) for name, ranks in trace.groups.items()},
        "ranks": {str(rank): asdict(info) for rank, info in trace.ranks.items()},
    }
    schema = EVENT_SCHEMA.with_metadata({HEADER_KEY: json.dumps(said).encode()})
    target = Path(path)
    with whole_file(target) as sink:
        pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    return Written(target, count, steps)
