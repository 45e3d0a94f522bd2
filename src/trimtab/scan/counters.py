"""Counters of the judged steps: samples by rank and step, parsed only where somebody asks.

Their values are text that anybody may have written, and a long run of a large job has millions of them. So they stay
text, in order, and a question takes a bounded number of them, evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from trimtab.events import NAME_GPU, NAME_HOST, Kind
from trimtab.scan.arrays import Floats, Ints
from trimtab.scan.table import EARLIEST_NS, LATEST_NS, Table, step_at
from trimtab.traces.counters import Sample, parse_sample

MOST_SAMPLES = 64
"""Of one rank in one answer."""
SOURCES = (NAME_GPU, NAME_HOST)


@dataclass(frozen=True, slots=True)
class Readings:
    """Samples of one rank, in order of time."""

    samples: tuple[Sample, ...] = ()

    def values(self, name: str) -> Floats:
        """What the samples that have it say of ``name``."""
        return np.array([sample.numbers[name] for sample in self.samples if name in sample.numbers])

    def median(self, name: str) -> float:
        """Median of ``name``, NaN where no sample has it."""
        values = self.values(name)
        return float(np.median(values)) if len(values) else float("nan")

    def rate(self, name: str) -> float:
        """Per second, of a count that covers the time since the sample before; NaN where unknown."""
        counted = [
            (sample.numbers[name], sample.numbers["interval_s"])
            for sample in self.samples
            if name in sample.numbers and sample.numbers.get("interval_s", 0.0) > 0
        ]
        return sum(count for count, _ in counted) / sum(time for _, time in counted) if counted else float("nan")

    def growth(self, name: str) -> float:
        """By how much a total grew from the first sample to the last; NaN with fewer than two."""
        values = self.values(name)
        return float(values[-1] - values[0]) if len(values) > 1 else float("nan")

    def throttled(self) -> dict[str, float]:
        """Share of the samples that name each throttle reason."""
        said = [sample.throttle for sample in self.samples if sample.throttle is not None]
        return {reason: sum(reason in one for one in said) / len(said) for reason in sorted(frozenset().union(*said))}

    def busy(self) -> Readings:
        """Without the samples of an idle GPU, which has no reason to run fast."""
        return Readings(tuple(s for s in self.samples if s.throttle is None or "gpu_idle" not in s.throttle))


@dataclass(frozen=True, slots=True)
class Counters:
    """All samples within the judged steps."""

    ranks: int = 0
    steps: int = 0
    key: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(source, rank, step) as one number, ascending; equal ones in order of time."""
    row: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of each of them, the row of ``args``."""
    args: pl.Series = field(default_factory=lambda: pl.Series([], dtype=pl.String))

    def of(self, source: str, rank: int, first: int, last: int) -> Readings:
        """Samples of ``source`` on a (dense) rank in the judged steps with the indices ``first`` to ``last``."""
        base = (SOURCES.index(source) * self.ranks + rank) * self.steps
        begin, end = np.searchsorted(self.key, (base + first, base + last + 1))
        count = min(end - begin, MOST_SAMPLES)
        if count <= 0:
            return Readings()
        chosen = np.unique(np.linspace(begin, end - 1, count).round().astype(np.int64))
        return Readings(tuple(parse_sample(args) for args in self.args.gather(self.row[chosen])))


def collect(events: pl.DataFrame, table: Table) -> Counters:
    """The samples among ``events`` that lie in the judged steps of ``table``, whose clocks are not aligned yet."""
    samples = events.filter(
        (pl.col("kind") == Kind.COUNTER.value)
        & (pl.col("start").is_between(EARLIEST_NS, LATEST_NS))
        & pl.col("args").is_not_null()
    )
    if not len(samples):
        return Counters()
    of_rank = samples["rank"].to_numpy().astype(np.int64)
    rank = np.minimum(np.searchsorted(table.ids, of_rank), table.ranks - 1)
    start = samples["start"].to_numpy()
    step = step_at(table.steps, rank, start - table.origin[rank])
    source = np.full(len(samples), -1)
    for place, name in enumerate(SOURCES):
        source[(samples["name"] == name).fill_null(False).to_numpy()] = place
    key = (source * table.ranks + rank) * table.steps.count + step
    order = np.lexsort((start, key))
    order = order[((step >= 0) & (source >= 0) & (table.ids[rank] == of_rank))[order]]
    return Counters(table.ranks, table.steps.count, key[order], order, samples["args"])


def spread(ranks: Sequence[int] | Ints, most: int) -> list[int]:
    """At most ``most`` of ``ranks``, evenly chosen."""
    places = np.unique(np.linspace(0, len(ranks) - 1, min(len(ranks), most)).round().astype(np.int64))
    return [int(ranks[place]) for place in places] if len(ranks) else []
