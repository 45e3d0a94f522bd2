"""Which ranks do the same work, where neither coordinates nor layers are known: by who talks to whom, or by kernels."""

from __future__ import annotations

import re

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Ints, factorize, lookup
from trimtab.scan.table import CODE, Table

_OF_CONTEXT = re.compile(r"CONTEXT_PARALLEL|(?:^|[^a-z])cp(?:[^a-z]|$)", re.IGNORECASE)
"""Groups whose ranks exchange messages within a stage (ring attention)."""
_MESSAGES = ("send", "recv", "send_recv")
LEAST_COMMON = 0.75
"""Of the kernels' names that two ranks use, the share that both do if they are of one stage (H200, Megatron: 0.99
within a stage, where one rank is slow by additional kernels; 0.59 between the stages of a pipeline of two)."""


def stages_of(table: Table) -> tuple[Ints, bool]:
    """The stage of each (dense) rank, numbered by their first ranks, and whether there is a pipeline at all.

    Ranks that are joined by messages are the stages of one pipeline; those that share a group which joins no two stages
    of a pipeline are of one stage. Where there are messages, but not said between whom, ranks that use the same kernels
    are of one stage.
    """
    of_context = [code for code, name in enumerate(table.groups) if _OF_CONTEXT.search(name)]
    between = ~np.isin(table.group, of_context)
    known = between & np.isin(table.src, table.ids) & np.isin(table.dst, table.ids) & (table.src >= 0)
    if known.any():
        return _numbered(_by_messages(table, known)), True
    codes = [code for code, name in enumerate(table.ops) if name in _MESSAGES]
    if (between & np.isin(table.op, codes)).any():
        return _numbered(_by_names(table)), True
    return np.zeros(table.ranks, dtype=np.int64), False


def _by_messages(table: Table, message: Bools) -> Ints:
    ends = lookup(table.ids, table.src[message]), lookup(table.ids, table.dst[message])
    pipeline = _connected(*ends, table.ranks)
    rows = np.flatnonzero((table.kind == CODE[Kind.COLLECTIVE]) & (table.group >= 0))
    _, first = factorize(table.group[rows], table.rank[rows])
    group, rank = table.group[rows][first], table.rank[rows][first]
    of_pipeline, _ = factorize(group, pipeline[rank])
    joins_stages = np.bincount(of_pipeline, minlength=len(rank))[of_pipeline] > 1
    within = ~np.isin(group, group[joins_stages])
    return _connected(rank[within], table.ranks + group[within], table.ranks + len(table.groups))[: table.ranks]


def _by_names(table: Table) -> Ints:
    kernels = np.flatnonzero(table.variant >= 0)
    uses = np.zeros((table.ranks, len(table.names) + 1), dtype=bool)
    uses[table.rank[kernels], table.name[kernels]] = True
    stage = np.zeros(table.ranks, dtype=np.int64)
    firsts: list[int] = []
    for rank in range(table.ranks):
        mine, theirs = uses[rank], uses[firsts]
        common = (mine & theirs).sum(axis=1) / np.maximum(1, (mine | theirs).sum(axis=1))
        if not len(common) or common.max() < LEAST_COMMON:
            firsts.append(rank)
            stage[rank] = len(firsts) - 1
        else:
            stage[rank] = int(common.argmax())
    return stage


def _connected(one: Ints, other: Ints, size: int) -> Ints:
    """The connected component of each of ``size`` vertices."""
    edges = coo_array((np.ones(len(one), dtype=np.int8), (one, other)), shape=(size, size))
    return np.asarray(connected_components(edges, directed=False)[1], dtype=np.int64)


def _numbered(stage: Ints) -> Ints:
    """Stages in the order of their first ranks, without gaps."""
    _, first, place = np.unique(stage, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[place]
