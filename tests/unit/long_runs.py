"""A rank that records steps into real files, on a clock that the test moves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.config import RecordConfig
from trimtab.events import FILE_SUFFIX, SUMMARY_SUFFIX
from trimtab.record.files.ring import COLUMN, WIDTH, Rows
from trimtab.record.files.rows import Site, Sites
from trimtab.record.files.storage import Storage
from trimtab.record.run_identity import Identity, make_header

MS = 1_000_000
PLENTY = (1 << 40, 1 << 41)
"""Free space and size of a file system that is nearly empty."""


def site(kind: str, name: str, stream: str = "compute", layer: int = -1, group: str = "", op: str = "") -> Site:
    return (kind, name, stream, layer, group, op, "", -1, -1, -1, ())


class Rank:
    """Records steps of ``layers`` forward and backward calls, an all-reduce in place, and a batch of data."""

    def __init__(
        self,
        directory: Path,
        rank: int = 0,
        world: int = 1,
        *,
        attempt: int = 0,
        run_id: str = "run",
        layers: int = 4,
        started: int | None = None,
        space: tuple[int, int] = PLENTY,
        **settings: Any,
    ) -> None:
        self.seconds = 0.0
        self.space = space
        self.now = 10**12
        header = make_header(
            Identity(rank, world, run_id, attempt),
            device="cpu",
            device_name="",
            granularity="layer",
            unix_offset_ns=0,
            clock_domain=f"host{rank}",
        )
        if started is not None:
            header |= {"started_unix_ns": started}
        self.directory = directory
        self.sites = Sites()
        self.storage = Storage(
            RecordConfig(dir=str(directory), **settings),
            header,
            clock=lambda: self.seconds,
            space=lambda _: self.space,
        )
        self.storage.append(self.rows([]), self.sites, [], {"groups": {"dp": list(range(world))}})
        self._ids = 0
        self._seq = 0
        self._shape = self._one_step(layers)

    @property
    def attempt(self) -> int:
        return int(self.storage.path.name.split("-")[1][1:])

    def rows(self, events: Iterable[dict[str, Any]]) -> Rows:
        rows = [[event.get(name, -1) for name in COLUMN] for event in events]
        return np.array(rows, np.int64).reshape(-1, WIDTH)

    def event(self, site: Site, step: int, start: int, end: int, **more: Any) -> dict[str, Any]:
        self._ids += 1
        found = {"site": self.sites.intern(site), "step": step, "event_id": self._ids, "start": start, "end": end}
        return found | {"extra": 0} | more

    def step(
        self, number: int, *, compute_ms: float = 1.0, comm_ms: float = 2.0, data_ms: float = 0.5, seconds: float = 1.0
    ) -> None:
        """Record one step and do a round of the writer; ``seconds`` pass."""
        compute, comm, data = (int(ms * MS) for ms in (compute_ms, comm_ms, data_ms))
        rows = self._shape.copy()
        start, end = rows[:, COLUMN["start"]], rows[:, COLUMN["end"]]
        lengths = np.array([data] + [compute] * (len(rows) - 3) + [comm])
        end[:-1] = self.now + np.cumsum(lengths)
        start[:-1] = end[:-1] - lengths
        start[-1], end[-1] = self.now, end[-2]
        rows[-2, COLUMN["ready"]] = start[-2] - 1_000
        rows[-2, COLUMN["seq"]] = self._seq = self._seq + 1
        rows[:, COLUMN["step"]] = number
        rows[:, COLUMN["event_id"]] = self._ids + np.arange(len(rows))
        self._ids += len(rows)
        self.now = int(end[-1])
        self.storage.append(rows, self.sites, [None] * len(rows), {})
        self.storage.tend()
        self.seconds += seconds

    def _one_step(self, layers: int) -> Rows:
        """Its events, but for the times."""
        order = [(kind, layer) for kind in ("forward", "backward") for layer in range(layers)]
        reduce = site("collective", "all_reduce", group="dp", op="all_reduce")
        sites = [site("data", "next", "host"), *(site(kind, "layer", layer=layer) for kind, layer in order), reduce]
        rows = self.rows(self.event(found, 0, 0, 0) for found in (*sites, site("host", "step", "host")))
        rows[-2, COLUMN["bytes"]] = 4_096
        return rows

    def record(self, events: list[dict[str, Any]], args: list[str | None] | None = None) -> None:
        self.storage.append(self.rows(events), self.sites, args or [None] * len(events), {})
        self.storage.tend()

    def close(self) -> None:
        self.storage.append(self.rows([]), self.sites, [], {"closed": True})
        self.storage.close()


def names(directory: Path, suffix: str) -> list[str]:
    """Of the files with this ending, without it."""
    return sorted(path.name.removesuffix(suffix) for path in directory.glob(f"*{suffix}"))


def details(directory: Path) -> list[str]:
    return names(directory, FILE_SUFFIX)


def summaries(directory: Path) -> list[str]:
    return names(directory, SUMMARY_SUFFIX)


def size(directory: Path) -> int:
    """Of the rank's data, in bytes."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.suffix == ".arrow")


def ledger(directory: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((directory / f"rank{rank:05d}.ledger.json").read_text())
