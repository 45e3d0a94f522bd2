"""Which units are read whole: those that stand out in what was summed up, and a few sound ones to compare them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from trimtab.scan.arrays import Floats, Ints
from trimtab.scan.candidates import Candidate, Context
from trimtab.scan.causes.links import LEAST_RATIO
from trimtab.scan.fold.units import Units
from trimtab.scan.measure import COMPUTE_CODES, others

REPRESENTATIVES = 3
FEW = 4
"""A candidate of more units than this is told by ..."""
SOME = 2
"""... so many of them: those that have most to do."""
MOST_SUSPECTS = 12
"""Units beyond are left folded, which is said."""
WORTH_A_LOOK = 0.5
"""Part of the least share of the step time that a slow link must cost at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Units to read whole."""

    units: tuple[int, ...]
    reference: int | None
    """A sound one of them."""
    left: int
    """Units that stand out, too, but are too many."""


def choose(
    context: Context,
    candidates: Sequence[Candidate],
    links: pl.DataFrame,
    units: Units,
    unfit: frozenset[int],
    asked: Sequence[int] = (),
) -> Choice:
    """Units to read whole. ``unfit`` are no models for others (odd, or not complete), ``asked`` ranks that questions
    are about."""
    suspects = [int(unit) for unit in units.of_rank[list(asked)]]
    for candidate in sorted(candidates, key=lambda c: -c.certain * c.ratio):
        suspects += _units_of(context, candidate, units)
    suspects += slow_links(links, context)
    ordered = list(dict.fromkeys(suspects))
    chosen = ordered[:MOST_SUSPECTS]
    sound = [unit for unit in _usual_first(context, units) if unit not in ordered and unit not in unfit]
    if not sound:  # everybody stands out
        sound = [unit for unit in _usual_first(context, units) if unit not in unfit]
    models = sound[:REPRESENTATIVES]
    whole = tuple(sorted({*chosen, *models}))
    return Choice(whole, models[0] if models else None, len(ordered) - len(chosen))


def _units_of(context: Context, candidate: Candidate, units: Units) -> list[int]:
    of_rank = units.of_rank[context.table.ids[candidate.ranks]]
    found = np.unique(of_rank)
    if len(found) <= FEW:
        return [int(unit) for unit in found]
    busy = context.measures.of(COMPUTE_CODES)[candidate.ranks].sum(axis=1)
    most = np.array([busy[of_rank == unit].max() for unit in found])
    return [int(unit) for unit in found[np.argsort(-most, kind="stable")[:SOME]]]


def _usual_first(context: Context, units: Units) -> list[int]:
    """Units in order of how little the compute of their ranks differs from their peers'."""
    measures = context.measures
    compute = measures.of(COMPUTE_CODES)
    usual = others(compute, measures.peers.group)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.nan_to_num(np.log(compute / usual), nan=0.0, posinf=0.0, neginf=0.0)
    off: Floats = np.zeros(units.count)
    np.maximum.at(off, units.of_rank[context.table.ids], np.abs(x.mean(axis=1)))
    present: Ints = np.unique(units.of_rank[context.table.ids])
    return [int(unit) for unit in present[np.argsort(off[present], kind="stable")]]


def slow_links(links: pl.DataFrame, context: Context) -> list[int]:
    """Units with a link whose transfers take longer than the same ones elsewhere, most costly first.

    A screen, wider than what makes a finding: those units are read, and then judged as any other.
    """
    step_ns = context.measures.step_s * 1e9
    steps = context.steps.tolist()
    alike = ("op", "bytes", "members", "step")
    seen = links.filter(pl.col("step").is_in(steps)).with_columns(
        usual=pl.col("transfer_ns").median().over(*alike), links=pl.len().over(*alike)
    )
    spent = pl.col("transfer_ns") * pl.col("count")
    by_link = (
        seen.filter(pl.col("links") > 1)
        .group_by("unit", "link")
        .agg(
            more=((pl.col("transfer_ns") - pl.col("usual")) * pl.col("count")).sum() / len(steps),
            spent=spent.sum(),
            expected=(pl.col("usual") * pl.col("count")).sum(),
        )
        .filter(
            (pl.col("more") > WORTH_A_LOOK * context.config.min_share * step_ns)
            & (pl.col("spent") > LEAST_RATIO * pl.col("expected"))
        )
        .sort("more", "unit", "link", descending=[True, False, False])
    )
    return [int(unit) for unit in by_link["unit"].unique(maintain_order=True)]
