"""Communications within a unit, joined over its ranks: how long transfers took, and whether all members are there.

Of the members of one communication the last to arrive waits least: the shortest time from reaching it to its end is
that of the transfer. That compares times of one clock only, so it needs no alignment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians
from trimtab.scan.fold.units import Units
from trimtab.scan.table import CODE, Table

_SEQ_BITS = 40


@dataclass(frozen=True, slots=True)
class Joined:
    """What the communications of a unit come to."""

    links: pl.DataFrame
    """``link`` (a number within the unit), ``p2p, op, bytes, members, step``, the median ``transfer_ns``, ``count``."""
    matched: pl.DataFrame
    """``step, matched, unmatched``."""


@dataclass(slots=True)
class Meetings:
    """Collects the communications of a unit, rank by rank."""

    units: Units
    _links: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    _members: list[int] = field(default_factory=list[int])
    _ops: dict[str, int] = field(default_factory=dict[str, int])
    _columns: list[tuple[Ints, ...]] = field(default_factory=list[tuple[Ints, ...]])
    _crossing: dict[tuple[int, ...], bool] = field(default_factory=dict[tuple[int, ...], bool])

    def add(self, table: Table, groups: dict[str, tuple[int, ...]]) -> Bools:
        """Take those of one rank within the unit; returns which rows of ``table`` are of several units."""
        shared = np.zeros(len(table.kind), dtype=bool)
        rows = np.flatnonzero(table.is_comm)
        p2p = table.kind[rows] != CODE[Kind.COLLECTIVE]
        members = [groups.get(name, ()) for name in table.groups]
        crossing = np.array([*map(self._crosses, members), True])  # -1, no group, is looked up last
        across = np.where(p2p, self.units.cross(table.src[rows], table.dst[rows]), crossing[table.group[rows]])
        shared[rows] = across
        rows, p2p = rows[~across], p2p[~across]
        link = np.empty(len(rows), dtype=np.int64)
        by_group = [self._link((name, ranks), len(ranks)) for name, ranks in zip(table.groups, members, strict=True)]
        link[~p2p] = np.array([*by_group, -1])[table.group[rows[~p2p]]]
        link[p2p] = self._pairs(table, rows[p2p])
        op = np.array([*(self._ops.setdefault(name, len(self._ops)) for name in table.ops), -1])[table.op[rows]]
        took = table.end[rows] - table.ready[rows]
        step = table.steps.numbers[table.step[rows]]
        self._columns.append((link, table.seq[rows], np.where(p2p, -1, op), table.bytes[rows], step, took))
        return shared

    def _crosses(self, members: tuple[int, ...]) -> bool:
        """Memorised, as the tuples of large groups come again with every rank."""
        if members not in self._crossing:
            self._crossing[members] = self.units.crosses(np.array(members, dtype=np.int64))
        return self._crossing[members]

    def _link(self, key: tuple[object, ...], members: int) -> int:
        if key not in self._links:
            self._links[key] = len(self._links)
            self._members.append(members)
        return self._links[key]

    def _pairs(self, table: Table, rows: Ints) -> Ints:
        ids, first = factorize(table.group[rows], table.src[rows], table.dst[rows], table.tag[rows])
        names = (*table.groups, "")
        links = [
            self._link((names[table.group[row]], int(table.src[row]), int(table.dst[row]), int(table.tag[row])), 2)
            for row in rows[first]
        ]
        return np.array(links, dtype=np.int64)[ids]

    def join(self) -> Joined:
        """Over all ranks that were added."""
        columns = [np.concatenate(parts) for parts in zip(*self._columns, strict=True)] if self._columns else []
        if not columns or not len(columns[0]):
            return Joined(_no_links(), pl.DataFrame(schema=dict.fromkeys(("step", "matched", "unmatched"), pl.Int64)))
        known = (columns[1] >= 0) & (columns[1] < 1 << _SEQ_BITS)
        link, seq, op, nbytes, step, took = (column[known] for column in columns)
        order = np.argsort((link << _SEQ_BITS) | seq, kind="stable")
        link, seq, op, nbytes, step, took = (column[order] for column in (link, seq, op, nbytes, step, took))
        first = np.flatnonzero(np.r_[True, (link[1:] != link[:-1]) | (seq[1:] != seq[:-1])]) if len(link) else link
        size = np.diff(np.r_[first, len(link)])
        shortest = np.minimum.reduceat(took, first) if len(first) else took
        members = np.array(self._members, dtype=np.int64)[link[first]]
        complete = size == members
        found = np.unique(step)
        at = np.searchsorted(found, step[first])
        matched = np.bincount(at[complete], minlength=len(found))
        unmatched = np.bincount(at[~complete], minlength=len(found))
        lone = np.bincount(
            np.searchsorted(found, columns[4][~known & np.isin(columns[4], found)]), minlength=len(found)
        )
        good = first[complete]
        classes = (link[good], op[good], nbytes[good], members[complete], step[good])
        return Joined(
            self._typical(classes, shortest[complete].astype(np.float64)),
            pl.DataFrame({"step": found, "matched": matched, "unmatched": unmatched + lone}),
        )

    def _typical(self, classes: tuple[Ints, ...], took: Floats) -> pl.DataFrame:
        if not len(took):
            return _no_links()
        ids, first = factorize(*classes)
        link, op, nbytes, members, step = (column[first] for column in classes)
        names = [*self._ops, None]
        return pl.DataFrame(
            {
                "link": link,
                "op": [names[code] for code in op],
                "bytes": nbytes,
                "members": members,
                "step": step,
                "transfer_ns": medians(ids, took, len(first)),
                "count": np.bincount(ids, minlength=len(first)),
            },
            schema_overrides={"op": pl.String},
        )


def _no_links() -> pl.DataFrame:
    numbers = dict.fromkeys(("bytes", "members", "step"), pl.Int64)
    return pl.DataFrame(
        schema={"link": pl.Int64, "op": pl.String, **numbers, "transfer_ns": pl.Float64, "count": pl.Int64}
    )
