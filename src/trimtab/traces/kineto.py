"""Read one file of torch.profiler: Chrome JSON as Kineto writes it, compressed or not, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trimtab.traces.own_header import printable
from trimtab.traces.trace_events import TraceEvents


class Args(msgspec.Struct, gc=False):
    """What is read of a slice's arguments; all that is unknown is passed over."""

    correlation: int = -1
    """Equal for a kernel and the call of the runtime that launched it."""
    stream: int | str = -1
    device: int | str = -1


class Slice(msgspec.Struct, gc=False):
    """One event of the file; ``ph`` is ``X`` for those with a duration."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: Args = msgspec.field(default_factory=Args)


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a file, n of them in the file's order; times in nanoseconds since 1970."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    slices: list[Slice]

    def where(self, *categories: str) -> NDArray[np.int64]:
        """Positions of the slices of these categories."""
        return np.array([i for i, one in enumerate(self.slices) if one.cat in categories], np.int64)


def read_kineto(path: Path) -> tuple[Slices, Any]:
    """Slices of the file, and what the recorder wrote into it (unchecked; None where it is not the recorder's).

    Raises ValueError, in one line, where it cannot be read, or is damaged.
    """
    events: TraceEvents[Slice] = TraceEvents(path, Slice)
    slices = [one for batch in events for one in batch if one.ph == "X"]
    if events.problems:
        raise ValueError(events.problems[0])
    base = events.metadata.get("baseTimeNanoseconds", 0)
    base = base if isinstance(base, int) else 0
    microseconds = np.array([one.ts for one in slices], np.float64)
    lengths = np.array([one.dur for one in slices], np.float64)
    limit = 2**62 - abs(base)
    if not (np.abs(microseconds) + np.abs(lengths) < limit / 1e3).all():
        raise ValueError(f"{printable(path)}: times that are a century or more away")
    start = np.rint(microseconds * 1e3).astype(np.int64) + base
    ends = start + np.rint(np.maximum(lengths, 0.0) * 1e3).astype(np.int64)
    return Slices(start, ends, slices), events.metadata.get("trimtab")
