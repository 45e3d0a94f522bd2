"""Process groups of communications that name none, as gloo's in torch.profiler: told by who is in them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from trimtab.events import Kind
from trimtab.scan.arrays import Ints, factorize

TOGETHER_NS = 1_000_000
"""A member of a collective that is out of it this long before another one is in was not in it with that one."""
LEAST_TOGETHER = 0.9
"""Share of a group's collectives in which its members have to be together."""
MOST_GROUPS = 10_000


def name_groups(
    events: pl.DataFrame, members: Mapping[str, tuple[int, ...]], clocks: Mapping[int, str]
) -> tuple[pl.DataFrame, list[str]]:
    """``events`` with a group for collectives without one, where the times leave no other of those in ``members``.

    Of the known groups, larger ones first, all ranks of which made as many collectives of one operation and size: the
    members must have been in them at the same time. Only ranks that read one clock can be told (``clocks`` by rank).
    """
    nameless = events.with_row_index("row").filter(
        (pl.col("kind") == Kind.COLLECTIVE.value) & pl.col("group").is_null() & pl.col("rank").is_in(list(clocks))
    )
    known = [(name, ranks) for name, ranks in members.items() if len(ranks) > 1 and _one_clock(ranks, clocks)]
    if not len(nameless) or not known or len(known) > MOST_GROUPS:
        return events, []
    known.sort(key=lambda group: -len(group[1]))
    nameless = nameless.sort("rank", "start")
    sort, _ = factorize(
        nameless["op"].cast(pl.String).fill_null("").to_numpy().astype(str),
        nameless["bytes"].fill_null(-1).to_numpy().astype(np.int64),
    )
    rank, start, end = (nameless[name].to_numpy().astype(np.int64) for name in ("rank", "start", "end"))
    named = np.full(len(nameless), -1)
    for one in range(int(sort.max()) + 1):
        _name(np.flatnonzero(sort == one), rank, start, end, known, named)
    told = named >= 0
    if not told.any():
        return events, []
    group = np.full(len(events), -1)
    group[nameless["row"].to_numpy()[told]] = named[told]
    text = pl.Series("group", [name for name, _ in known]).gather(pl.Series(np.maximum(group, 0)))
    events = events.with_columns(
        pl.when(pl.lit(pl.Series("told", group >= 0)))
        .then(text)
        .otherwise(pl.col("group").cast(pl.String))
        .cast(events.schema["group"])
        .alias("group")
    )
    return events, [f"the groups of {told.sum()} communications were told by which ranks were in them at once"]


def _one_clock(ranks: Sequence[int], clocks: Mapping[int, str]) -> bool:
    return len({clocks.get(rank, f"none of {rank}") for rank in ranks}) == 1


def _name(
    rows: Ints, rank: Ints, start: Ints, end: Ints, known: Sequence[tuple[str, tuple[int, ...]]], named: Ints
) -> None:
    """Name the collectives ``rows`` of one operation and size, in ``named``: positions in ``known``."""
    free = {int(one): rows[rank[rows] == one] for one in np.unique(rank[rows])}
    for number, (_, ranks) in enumerate(known):
        mine = [free.get(one) for one in ranks]
        if any(one is None for one in mine):
            continue
        lines = [one for one in mine if one is not None]
        if len({len(line) for line in lines}) > 1:
            continue
        table = np.stack(lines)
        apart = start[table].max(axis=0) - end[table].min(axis=0)
        if np.mean(apart <= TOGETHER_NS) >= LEAST_TOGETHER:
            named[table.ravel()] = number
            for one in ranks:
                del free[one]
