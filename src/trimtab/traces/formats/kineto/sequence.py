"""Whether the numbers that PyTorch gives communications (``Seq``) can be trusted to be the same on all ranks."""

from __future__ import annotations

from typing import Final

import polars as pl

from trimtab.events import Kind

LEAST_SHARED: Final = 0.9
"""Of the communications of a group, this share of the fewest that a member recorded must be found on all members."""


def numbered(events: pl.DataFrame, said: list[str]) -> tuple[pl.DataFrame, bool]:
    """``events``, without numbers that contradict each other, and whether all communications have one that is left.

    Some releases count for each process instead of each group; then what happened together does not share a number.
    """
    comms = events.lazy().filter(pl.col("op").is_not_null()).collect()
    if not comms["seq"].is_not_null().any():
        return events, False
    if _agree(comms.filter(pl.col("seq").is_not_null())):
        whole = not comms.filter(pl.col("kind") == Kind.COLLECTIVE.value)["seq"].has_nulls()
        return events, whole and not comms["seq"].has_nulls()
    said.append("the numbers of communications (Seq) differ between ranks: they are not used")
    return events.with_columns(pl.lit(None, pl.Int64).alias("seq")), False


def _agree(comms: pl.DataFrame) -> bool:
    """Whether equal numbers in a group are equal operations, each once on each rank, and most are found on all."""
    collectives = comms.filter((pl.col("kind") == Kind.COLLECTIVE.value) & pl.col("group").is_not_null())
    if collectives.select("rank", "group", "seq").is_duplicated().any():
        return False
    each = collectives.group_by("group", "seq").agg(pl.len().alias("n"), pl.col("op").n_unique().alias("ops"))
    by_rank = collectives.group_by("group", "rank").len()
    groups = by_rank.group_by("group").agg(pl.len().alias("members"), pl.col("len").min().alias("fewest"))
    each = each.join(groups, on="group")
    found = each.group_by("group").agg(
        (pl.col("n") == pl.col("members")).sum().alias("found"), pl.col("fewest").first()
    )
    return not (each["ops"] > 1).any() and bool((found["found"] >= LEAST_SHARED * found["fewest"]).all())
