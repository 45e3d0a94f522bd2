"""A job of which some units are there whole, and of the others what they share and the sums of their work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Floats, Ints
from trimtab.scan.fold.mirror import Mirror, fold
from trimtab.scan.fold.units import Units
from trimtab.scan.lanes import Lanes
from trimtab.scan.model import Matching
from trimtab.scan.summed import Summed
from trimtab.scan.table import CODE, KINDS, Table


@dataclass(frozen=True, slots=True)
class Folded:
    """What there is of the folded units; see :class:`trimtab.scan.fold.digest.Digest` for the frames."""

    units: Units
    whole: frozenset[int]
    """Units whose events are all in the trace."""
    reference: int | None
    """The one of them that folded units are replayed after; None: they take what they took."""
    groups: Mapping[str, tuple[int, ...]]
    """As in the trace."""
    cells: pl.DataFrame
    passes: pl.DataFrame
    matched: pl.DataFrame
    """With the column ``unit``."""

    def _folded(self, table: Table) -> Bools:
        return ~np.isin(self.units.of_rank[table.ids], sorted(self.whole))

    def sums(self, table: Table) -> Summed:
        """Of the ranks and steps of ``table``."""
        ranks, steps = table.ranks, table.steps.count
        cells = _within(self.cells, table)
        seconds, instances = np.zeros((len(KINDS), ranks, steps)), np.zeros((len(KINDS), ranks, steps))
        at = _place(cells, table)
        for code in range(len(KINDS)):
            seconds[code][at] = cells[f"ns_{code}"].to_numpy() / 1e9
            instances[code][at] = cells[f"n_{code}"].to_numpy()
        passes = _within(self.passes, table)
        numbers = passes["microbatch"].unique().sort().to_numpy().astype(np.int64)
        by_microbatch: Floats = np.zeros((2, ranks, steps, len(numbers)))
        place = (*_place(passes, table), np.searchsorted(numbers, passes["microbatch"].to_numpy()))
        by_microbatch[(0, *place)] = passes["forward_ns"].to_numpy()
        by_microbatch[(1, *place)] = passes["backward_ns"].to_numpy()
        models = np.zeros(ranks, dtype=bool)
        if self.reference is not None:
            models = self.units.of_rank[table.ids] == self.reference
        return Summed(self._folded(table), models, seconds, instances, numbers, by_microbatch)

    def fold(self, table: Table, lanes: Lanes) -> tuple[Lanes, Mirror]:
        """``lanes`` without the local work of folded ranks, and how long that takes."""
        nodes = lanes.nodes
        shared = np.where(nodes.comm_row >= 0, np.r_[self._shared_rows(table), False][nodes.comm_row], True)
        return fold(lanes, self._folded(table), self._models(table), shared)

    def _shared_rows(self, table: Table) -> Bools:
        """Communications of several units."""
        crossing = [self.units.crosses(np.array(self.groups.get(name, ()), dtype=np.int64)) for name in table.groups]
        of_group = np.array([*crossing, True])[table.group]
        message = np.isin(table.kind, (CODE[Kind.SEND], CODE[Kind.RECV]))
        return table.is_comm & np.where(message, self.units.cross(table.src, table.dst), of_group)

    def _models(self, table: Table) -> Ints:
        """For each rank that of the reference unit at the same place, -1 where there is none."""
        out = np.full(table.ranks, -1)
        if self.reference is None:
            return out
        models = np.flatnonzero(self.units.of_rank[table.ids] == self.reference)
        by_place = np.full(int(self.units.place.max()) + 1, -1)
        by_place[self.units.place[table.ids[models]]] = models
        return by_place[self.units.place[table.ids]]

    def matching(self, seen: Matching, table: Table) -> Matching:
        """``seen``, together with the communications within the folded units."""
        steps = self.matched.filter(
            pl.col("step").is_in(table.steps.numbers.tolist()) & ~pl.col("unit").is_in(sorted(self.whole))
        )
        matched, unmatched = int(steps["matched"].sum()), int(steps["unmatched"].sum())
        count, more = seen.matched + seen.unmatched, matched + unmatched
        if not more:
            return seen
        return replace(
            seen,
            matched=seen.matched + matched,
            unmatched=seen.unmatched + unmatched,
            confidence=round((seen.confidence * count + matched) / (count + more), 6),
            by=replace(seen.by, sequence_numbers=seen.by.sequence_numbers + matched),
        )


def _within(frame: pl.DataFrame, table: Table) -> pl.DataFrame:
    return frame.filter(pl.col("rank").is_in(table.ids.tolist()) & pl.col("step").is_in(table.steps.numbers.tolist()))


def _place(frame: pl.DataFrame, table: Table) -> tuple[Ints, Ints]:
    rank = np.searchsorted(table.ids, frame["rank"].to_numpy())
    return rank, np.searchsorted(table.steps.numbers, frame["step"].to_numpy())
