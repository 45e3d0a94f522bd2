"""The files of a synthetic job, written rank by rank: a job of thousands of ranks need not fit into memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from trimtab.events import FILE_SCHEMA, FILE_SUFFIX, HEADER_KEY, SCHEMA_VERSION
from trimtab.traces.own_write import UPTIME_NS, to_arrow
from trimtab.traces.synthetic_job import FaultKind, SyntheticJob
from trimtab.traces.synthetic_run import Run, StageRun, simulate
from trimtab.traces.synthetic_table import (
    Clocks,
    draw_clocks,
    fault_texts,
    group_members,
    stage_columns,
    template_of,
)
from trimtab.traces.synthetic_times import Layout
from trimtab.traces.table import COLUMNS, integers

Integers = NDArray[np.int64]
_TIMES = ("ready", "start", "end")
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")  # as the recorder writes


def write_files(job: SyntheticJob, directory: Path, dp: int | None = None) -> int:
    """Simulate ``job`` and write what its ranks would have recorded into ``directory``; returns the number of events.

    With ``dp`` the job that is written has that many data parallel replicas: those beyond the simulated ones do, to the
    nanosecond, what the simulated ones but the last do, in turn, and the last one, which may be faulty, stays the last.
    So the times of a job of any size fit together: at each reduction the latest replica is among the simulated ones.

    Raises ValueError where a file exists, or the job has what this cannot copy (counters; experts across replicas).
    """
    if job.counter_seconds > 0 or any(fault.kind == FaultKind.GC_PAUSE for fault in job.faults):
        raise ValueError("synthetic job: counters and pauses of the collector are not written rank by rank")
    if dp is not None and (job.topology.ep > 1 or job.topology.dp < 2 or dp < job.topology.dp):
        raise ValueError("synthetic job: to be written with more replicas, a job needs two of them and no experts")
    directory.mkdir(parents=True, exist_ok=True)
    run = simulate(job)
    written = _Writer(job, run, directory, dp or job.topology.dp)
    return sum(written.write(stage) for stage in run.stages)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all ranks of a stage have in common: rows by step, then event."""

    columns: dict[str, pa.Array]
    times: dict[str, Integers]
    """Simulated rank x row, nanoseconds since the job's start on a clock that is right."""
    dims: Integers
    """By row: the dimension of the communication's group, -1 where there is none."""
    source: Integers
    """By row: the stage that sends, -1 where there is none."""
    destination: Integers


class _Writer:
    def __init__(self, job: SyntheticJob, run: Run, directory: Path, dp: int) -> None:
        self.job, self.run, self.directory = job, run, directory
        self.topology = replace(job.topology, dp=dp)
        large = replace(job, topology=self.topology, faults=())
        self.layout = Layout.of(large)
        self.clocks: Clocks = draw_clocks(large)
        self.groups, self.member_of = group_members(self.topology, self.layout)
        self.names = list(self.groups)
        self.members: dict[str, str] = {}
        """JSON of the members of groups, which many ranks share."""

    def write(self, stage: StageRun) -> int:
        """The files of one stage's ranks; returns the number of their events."""
        shared = self._shared(stage)
        events = 0
        for index in range(self.layout.width):
            rank = index + stage.program.stage * self.layout.width
            events += self._write_rank(rank, self._simulated(index), shared)
        return events

    def _simulated(self, index: int) -> int:
        """Which simulated rank of the stage the one at ``index`` is like."""
        corner = self.topology.tp * self.topology.cp
        replica, at = divmod(index, corner)
        last, copied = self.topology.dp - 1, self.job.topology.dp - 1
        like = copied if replica == last else replica % copied if copied else 0
        return like * corner + at

    def _shared(self, stage: StageRun) -> _Shared:
        """Columns of the first rank of the stage, which are everybody's but for times, groups and ends of messages."""
        calm = Clocks(np.ones_like(self.clocks.rate), np.zeros_like(self.clocks.offset))
        small = self.run.layout
        _, member_of = group_members(self.job.topology, small)
        columns = stage_columns(self.job, self.run, stage, calm, member_of)
        rows = len(columns["rank"]) // small.width
        times = {name: columns[name].reshape(small.width, rows) - self.job.start_unix_ns for name in _TIMES}
        events = [event for event in stage.program.events if event.recorded]
        first = {name: values[:rows] for name, values in columns.items() if name not in (*_TIMES, "rank", "group")}
        template = template_of(events).select(pl.all().gather(np.arange(rows) % len(events)))
        series = {column.name: column for column in template}
        for name in ("step", "event_id", "parent_id", "correlation_id", "seq"):
            series[name] = integers(first[name], COLUMNS[name])
        for name in ("cpu_ns", "shape", "args"):
            series[name] = pl.Series(name, [None], COLUMNS[name]).new_from_index(0, rows)
        for name in (*_TIMES, "src", "dst"):
            series[name] = pl.Series(name, [0], COLUMNS[name]).new_from_index(0, rows)
        series["group"] = pl.Series("group", [None], COLUMNS["group"]).new_from_index(0, rows)
        table = to_arrow(pl.DataFrame(series)).combine_chunks()
        whole = {name: table.column(name).chunk(0) for name in table.column_names}

        def by_row(values: list[int]) -> Integers:
            return np.tile(np.array(values, np.int64), self.job.steps)

        return _Shared(
            whole,
            times,
            by_row([int(event.dim) for event in events]),
            by_row([event.source for event in events]),
            by_row([event.destination for event in events]),
        )

    def _write_rank(self, rank: int, like: int, shared: _Shared) -> int:
        width = self.layout.width
        host = rank // self.job.ranks_per_host
        shown = {
            name: np.rint(times[like] * self.clocks.rate[rank] + self.clocks.offset[rank]).astype(np.int64)
            for name, times in shared.times.items()
        }
        zero = self._zero_of_host(host)
        columns = dict(shared.columns)
        columns |= {name: pa.array(times - zero) for name, times in shown.items()}
        for name, ends in (("src", shared.source), ("dst", shared.destination)):
            other = ends * width + rank % width
            columns[name] = pa.array(other.astype(np.int32), mask=ends < 0)
        columns["group"], used = self._groups(rank, shared.dims)
        batch = pa.RecordBatch.from_arrays([columns[name] for name in FILE_SCHEMA.names], schema=FILE_SCHEMA)
        batch = batch.take(pa.array(np.argsort(shown["end"], kind="stable")))  # a row is written when it has ended
        path = self.directory / f"rank{rank:05d}-a0-000{FILE_SUFFIX}"
        self._write_file(path, batch, rank, f"node{host:03d}", zero + self.job.start_unix_ns, used)
        return batch.num_rows

    def _zero_of_host(self, host: int) -> int:
        """What the host's clock shows an hour before the job, since the job's start."""
        return round(float(self.clocks.offset[host * self.job.ranks_per_host])) - UPTIME_NS

    def _groups(self, rank: int, dims: Integers) -> tuple[pa.Array, list[str]]:
        used = np.unique(dims[dims >= 0])
        names = [self.names[self.member_of[rank, dim]] for dim in used]
        codes = np.where(dims < 0, -1, np.searchsorted(used, dims))
        index = pa.array(codes.astype(np.int32), mask=codes < 0)
        return pa.DictionaryArray.from_arrays(index, pa.array(names, pa.string())), names

    def _write_file(
        self, path: Path, batch: pa.RecordBatch, rank: int, host: str, unix_ns: int, groups: list[str]
    ) -> None:
        header = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.job.run_id,
            "attempt": 0,
            "rank": rank,
            "world_size": self.topology.world_size,
            "host": host,
            "pid": 1000 + rank,
            "device": self.job.device,
            "device_name": "synthetic",
            "clock_domain": host,
            "unix_offset_ns": unix_ns,
            "granularity": "layer",
            "versions": {},
            "file_index": 0,
            "started_unix_ns": self.job.start_unix_ns,
        }
        schema = FILE_SCHEMA.with_metadata({HEADER_KEY: json.dumps(header).encode()})
        try:
            sink = path.open("xb")
        except FileExistsError:
            raise ValueError(f"{path}: exists already; choose an empty directory") from None
        with sink, pa.ipc.new_stream(sink, schema, options=_OPTIONS) as writer:
            writer.write_batch(batch, custom_metadata={HEADER_KEY: self._metadata(rank, groups).encode()})

    def _metadata(self, rank: int, groups: list[str]) -> str:
        known: dict[str, Any] = {
            "dropped": 0,
            "oversubscribed": 0,
            "faults": fault_texts(self.job, self.run.layout, *self._origin(rank)),
            "topology": self.topology.as_dict(),
            "coordinates": self.topology.coordinates(rank).as_dict(),
            "closed": True,
        }
        members = ", ".join(f"{json.dumps(name)}: {self._members(name)}" for name in groups)
        return f'{{"groups": {{{members}}}, {json.dumps(known)[1:]}'

    def _origin(self, rank: int) -> tuple[int, int]:
        """Stage and place of the simulated rank that ``rank`` is like."""
        stage, index = divmod(rank, self.layout.width)
        return stage, self._simulated(index)

    def _members(self, name: str) -> str:
        if name not in self.members:
            self.members[name] = json.dumps(list(self.groups[name]))
        return self.members[name]
