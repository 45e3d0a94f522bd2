"""Rows of the event table of one rank, as columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trimtab.events import Kind
from trimtab.traces.formats.kineto.communication import Message
from trimtab.traces.table import COLUMNS, KIND, integers, texts

Integers = NDArray[np.int64]

KINDS: Final = tuple(kind.value for kind in Kind)
MOST_NAME: Final = 1_000
"""Characters of a name; the rest of longer ones is cut."""
_MESSAGE: Final = ("group", "op", "bytes", "dtype", "src", "dst", "seq")


@dataclass(slots=True)
class Rows:
    """n rows; -1 stands for unknown."""

    start: Integers
    end: Integers
    kind: Sequence[Kind]
    """One for each row, or a single one for all."""
    name: NDArray[Any]
    """Positions in ``names``."""
    names: Sequence[str]
    stream: NDArray[Any]
    """Positions in ``streams``."""
    streams: Sequence[str]
    ready: Integers | None = None
    step: Integers | None = None
    correlation: Integers | None = None
    shape: NDArray[Any] | None = None
    """Positions in ``shapes``."""
    shapes: Sequence[Sequence[int]] = ()
    messages: dict[int, Message] = field(default_factory=dict[int, Message])
    """By row."""

    def __len__(self) -> int:
        return len(self.start)

    def frame(self, rank: int) -> pl.DataFrame:
        """As an event table."""
        n = len(self)
        kinds = pl.Series([kind.value for kind in self.kind], dtype=KIND) if n else pl.Series([], dtype=KIND)
        columns: dict[str, pl.Series] = {
            "rank": pl.Series([rank], dtype=pl.Int32).new_from_index(0, n),
            "kind": kinds if len(kinds) == n else kinds.new_from_index(0, n),
            "name": texts(self.name, [printable_name(name) for name in self.names]),
            "stream": texts(self.stream, list(self.streams)),
            "start": pl.Series(self.start),
            "end": pl.Series(self.end),
            **self._messages(n),
        }
        for name, values in (("ready", self.ready), ("step", self.step), ("correlation_id", self.correlation)):
            if values is not None:
                columns[name] = integers(values, COLUMNS[name])
        if self.shape is not None and len(self.shapes):
            known = pl.Series([list(one) or None for one in self.shapes], dtype=COLUMNS["shape"])
            columns["shape"] = known.gather(integers(self.shape, pl.UInt32))
        return pl.DataFrame(schema=COLUMNS).clear(n).with_columns(**columns)

    def _messages(self, n: int) -> dict[str, pl.Series]:
        if not self.messages:
            return {}
        at = np.full(n, -1, np.int64)
        at[list(self.messages)] = np.arange(len(self.messages))
        place = integers(at, pl.UInt32)
        return {
            name: pl.Series([getattr(one, name) for one in self.messages.values()], dtype=COLUMNS[name]).gather(place)
            for name in _MESSAGE
        }


def printable_name(name: str) -> str:
    """``name``, cut if it is very long, in text that any column can hold."""
    return name[:MOST_NAME].encode("utf-8", "replace").decode()
