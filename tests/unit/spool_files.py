"""Reading the recorder's files back, batch by batch, as far as they go."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from trimtab.config import RecordConfig
from trimtab.events import FILE_SUFFIX, HEADER_KEY
from trimtab.record.clocks import CpuDevice, Device
from trimtab.record.recorder import Recorder
from trimtab.record.run_identity import Identity, make_header


class FakeClock:
    """A clock that stands still unless told otherwise."""

    def __init__(self, now: int = 0) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def advance(self, ns: int) -> int:
        self.now += ns
        return self.now


@dataclass
class File:
    """One file: its header, rows as dicts, and the metadata of each batch that had any."""

    header: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)

    @property
    def merged(self) -> dict[str, Any]:
        """The last word on each key."""
        return dict(itertools.chain.from_iterable(m.items() for m in self.metadata))


def read_file(path: Path) -> File:
    """All batches that are whole."""
    stream = pa.ipc.open_stream(path.read_bytes())
    file = File(json.loads(stream.schema.metadata[HEADER_KEY]))
    while True:
        try:
            batch, custom = stream.read_next_batch_with_custom_metadata()
        except (StopIteration, OSError, pa.ArrowInvalid):
            return file
        file.rows += batch.to_pylist()
        if custom:
            file.metadata.append(json.loads(custom[HEADER_KEY]))


def files_of(directory: Path) -> list[File]:
    """Every file of events in a directory, in the order of their names."""
    return [read_file(path) for path in sorted(directory.glob(f"*{FILE_SUFFIX}"))]


def header(rank: int = 0, attempt: int = 0) -> dict[str, Any]:
    return make_header(
        Identity(rank, rank + 1, "test", attempt),
        device="cpu",
        device_name="",
        granularity="layer",
        unix_offset_ns=0,
        clock_domain="here",
    )


def make_recorder(
    directory: Path, clock: FakeClock, device: Device | None = None, threaded: bool = False, **settings: Any
) -> Recorder:
    """A recorder whose writer runs when the test says so."""
    opener: Mapping[str, Any] = {"opener": settings.pop("opener")} if "opener" in settings else {}
    config = RecordConfig(dir=str(directory), **settings)
    return Recorder(config, device or CpuDevice(clock), header(), clock=clock, threaded=threaded, **opener)
