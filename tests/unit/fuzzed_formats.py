"""Every format's reader with a small valid file of it: what the fuzzers start from. A new format is one entry."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import format_files as made
import kineto_files
import polars as pl

from trimtab.traces.formats import (
    bytedance,
    chrome_events,
    flight_recorder,
    kineto,
    megatronapp,
    nccl_inspector,
    nsight,
)
from trimtab.traces.read import read
from trimtab.traces.table import COLUMNS, Trace


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """One reader and what it is fuzzed with."""

    name: str
    file: str
    """A name that its files may have."""
    seed: Callable[[], bytes]
    read: Callable[[Sequence[Path]], Trace]

    def try_on(self, content: bytes, folder: Path) -> None:
        """Reads ``content`` by the reader and through the registry; AssertionError where it breaks its promise."""
        path = folder / self.file
        path.write_bytes(content)
        try:
            for reader in (lambda: self.read([path]), lambda: read(path)):
                check(reader)
        finally:
            path.unlink(missing_ok=True)


def check(reader: Callable[[], Trace]) -> None:
    """A trace as it should be, or a ValueError of one line."""
    refused: ValueError | None = None
    trace: Trace | None = None
    try:
        trace = reader()
    except ValueError as error:
        refused = error
    if trace is None:
        assert "\n" not in str(refused), refused
        assert len(str(refused)) < 1_000, refused
        return
    assert trace.events.schema == pl.DataFrame(schema=COLUMNS).schema
    assert set(trace.events["rank"].unique()) <= set(trace.ranks)
    assert trace.world_size > max(trace.ranks)
    assert not (trace.events["end"] < trace.events["start"]).any()
    assert not any("\n" in warning for warning in trace.warnings)


def _file(write: Callable[[Path], Path]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write(Path(folder) / "seed").read_bytes()


FUZZED = (
    Fuzzed(
        "bytedance",
        "job.parquet",
        lambda: _file(lambda path: made.write_bytedance(path, made.rows_of_bytedance(steps=1))),
        bytedance.read,
    ),
    Fuzzed(
        "megatronapp",
        "benchmark-data-0-pipeline-0-tensor-0.json",
        lambda: json.dumps(made.megatronapp_rank(0, 0)).encode(),
        megatronapp.read,
    ),
    Fuzzed(
        "megatronapp-merged",
        "merged.json",
        lambda: json.dumps(made.megatronapp_merged(iterations=1)).encode(),
        megatronapp.read,
    ),
    Fuzzed(
        "flight-recorder",
        "nccl_trace_rank_0",
        lambda: pickle.dumps(made.flight_recorder(0, 2), protocol=2),
        flight_recorder.read,
    ),
    Fuzzed(
        "flight-recorder-json",
        "rank0.json",
        lambda: json.dumps(made.flight_recorder(0, 2)).encode(),
        flight_recorder.read,
    ),
    Fuzzed("nccl-inspector", "n0.log", lambda: made.nccl_inspector(0, count=2).encode(), nccl_inspector.read),
    Fuzzed("nsight", "rank0.sqlite", lambda: _file(made.write_nsight), nsight.read),
    Fuzzed("chrome", "trace.json", lambda: json.dumps(made.chrome()).encode(), chrome_events.read),
    Fuzzed("kineto", "rank0.json", lambda: json.dumps(kineto_files.gpu_rank()).encode(), kineto.read),
)
