"""How much time the schedule leaves to communication: send windows of the pipeline, reduce windows of gradients."""

from __future__ import annotations

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Ints
from trimtab.scan.lanes import Nodes
from trimtab.scan.match import Matches
from trimtab.scan.model import Windows
from trimtab.scan.table import CODE, Table
from trimtab.scan.transfers import Transfers

_REDUCTIONS = ("all_reduce", "allreduce", "reduce_scatter")


def windows(table: Table, matches: Matches, nodes: Nodes, transfers: Transfers) -> Windows:
    """Mean windows over the judged steps.

    A send window runs from the producer's send to the consumer going on with what it received, of messages between
    pipeline stages (of all messages where stages are not known). A reduce window runs from the start of an asynchronous
    gradient reduction to the moment the rank stops to wait for it.
    """
    return Windows(_sends(table, matches, nodes, transfers), _reductions(table, nodes, transfers))


def _sends(table: Table, matches: Matches, nodes: Nodes, transfers: Transfers) -> float | None:
    row = nodes.comm_row[transfers.node]
    whole = (transfers.last_post > np.iinfo(np.int64).min)[transfers.comm]
    received = np.flatnonzero((table.kind[row] == CODE[Kind.RECV]) & whole & _between_stages(table, row))
    if not len(received):
        return None
    sends = table.kind[matches.rows] == CODE[Kind.SEND]
    sent = np.full(matches.count, -1)
    sent[matches.comm[sends]] = table.ready[matches.rows[sends]]
    since = sent[transfers.comm[received]]
    return float((nodes.time[transfers.node[received]] - since).mean() / 1e9)


def _between_stages(table: Table, row: Ints) -> Bools:
    """Messages that leave their stage."""
    if any(at is None for at in table.coordinates):
        return np.ones(len(row), dtype=bool)
    stage = np.array([at.pp for at in table.coordinates if at is not None])
    peer = np.minimum(np.searchsorted(table.ids, table.src[row]), table.ranks - 1)
    return stage[peer] != stage[table.rank[row]]


def _reductions(table: Table, nodes: Nodes, transfers: Transfers) -> float | None:
    row = nodes.comm_row[transfers.node]
    reductions = [code for code, name in enumerate(table.ops) if name.strip("_").startswith(_REDUCTIONS)]
    beside = np.flatnonzero(np.isin(table.op[row], reductions) & ~table.in_place[row])
    if not len(beside):
        return None
    return float((nodes.blocked[transfers.node[beside]] - table.ready[row[beside]]).mean() / 1e9)
