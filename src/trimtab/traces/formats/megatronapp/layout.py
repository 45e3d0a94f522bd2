"""Which rank each row of MegatronApp's files is of, where that stands in the layout, and the groups that follow."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from trimtab.topology import Coordinates, Topology
from trimtab.traces.own_header import MAX_WORLD, printable

PLACE = ("dp", "pp", "tp")


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of a job."""

    ranks: pl.DataFrame
    """``rank, dp, pp, tp``, a row each."""
    topology: Topology | None
    """None where the ranks' numbers do not fit their places."""
    world_size: int
    groups: dict[str, tuple[int, ...]]
    member: pl.DataFrame
    """``rank, which`` (dp, pp or tp), ``group``."""

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` is."""
        dp, pp, tp = self.ranks.filter(pl.col("rank") == rank).select(PLACE).row(0)
        return Coordinates(dp=dp, pp=pp, tp=tp)


def locate(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of a merged file with ``rank, dp, pp, tp``; those that do not tell are left out.

    The newer program writes all four. The older one makes a process of each (dp, pp) and a thread of each tp.
    """
    stages = int(rows["pp_rank"].max() or 0) + 1  # type: ignore[arg-type]
    tensor = pl.col("tid").rank("dense") - 1
    older = rows["g_rk"].null_count() == len(rows)
    if not older:
        placed = rows.with_columns(rank="g_rk", dp="dp_rk", pp="pp_rk", tp="tp_rk")
    else:
        placed = rows.with_columns(dp=pl.col("pid") // stages, pp=pl.col("pid") % stages, tp=tensor.cast(pl.Int64))
        sizes = {name: int(placed[name].max() or 0) + 1 for name in PLACE}  # type: ignore[arg-type]
        number = pl.col("tp") + sizes["tp"] * (pl.col("dp") + sizes["dp"] * pl.col("pp"))
        placed = placed.with_columns(rank=number)
    return placed.filter(pl.all_horizontal(pl.col(name).is_between(0, MAX_WORLD) for name in ("rank", *PLACE)))


def layout_of(rows: pl.DataFrame, where: str) -> Layout:
    """The layout of the ranks in ``rows``; ValueError where one rank is in two places."""
    ranks = rows.select("rank", *PLACE).unique().sort("rank")
    if ranks["rank"].n_unique() < len(ranks):
        raise ValueError(f"{printable(where)}: one rank in several places of the layout; is this more than one job?")
    sizes = {name: int(ranks[name].max() or 0) + 1 for name in PLACE}  # type: ignore[arg-type]
    number = pl.col("tp") + sizes["tp"] * (pl.col("dp") + sizes["dp"] * pl.col("pp"))
    fits = bool(ranks.select((pl.col("rank") == number).all()).item())
    chunks = int(rows["chunk"].max() or 0) + 1  # type: ignore[arg-type]
    topology = Topology(**sizes, vpp=chunks) if fits else None
    world = topology.world_size if topology else int(ranks["rank"].max()) + 1  # type: ignore[arg-type]
    parts: list[pl.DataFrame] = []
    for which in PLACE:
        others = [name for name in PLACE if name != which]
        number = pl.struct(others).rank("dense") - 1
        parts.append(ranks.select("rank", which=pl.lit(which), group=pl.format("{}{}", pl.lit(which), number)))
    member = pl.concat(parts)
    by_group = member.sort("rank").group_by("group", maintain_order=True).agg("rank")
    groups = {str(name): tuple(members) for name, members in by_group.iter_rows()}
    return Layout(ranks, topology, world, groups, member)
