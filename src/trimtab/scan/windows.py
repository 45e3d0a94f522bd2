"""How much time the schedule leaves to communication: send windows of the pipeline, reduce windows of gradients."""

from __future__ import annotations

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import factorize
from trimtab.scan.lanes import Nodes
from trimtab.scan.model import Windows
from trimtab.scan.table import CODE, Table
from trimtab.scan.transfers import Transfers

_REDUCTIONS = ("all_reduce", "allreduce", "reduce_scatter")


def windows(table: Table, nodes: Nodes, transfers: Transfers) -> Windows:
    """Mean windows over the judged steps.

    A send window runs from the producer's send to the consumer going on with what it received. A reduce window
    runs from the start of an asynchronous gradient reduction to the moment the rank stops to wait for it.
    """
    row = nodes.comm_row[transfers.node]
    kind = table.kind[row]
    received = np.flatnonzero(
        (kind == CODE[Kind.RECV]) & (transfers.last_post > np.iinfo(np.int64).min)[transfers.comm]
    )
    pp = None
    if len(received):
        sends = np.flatnonzero(table.kind == CODE[Kind.SEND])
        keys = np.r_[sends, row[received]]
        pair, _ = factorize(table.group[keys], table.seq[keys], table.src[keys], table.dst[keys], table.tag[keys])
        sent = np.full(int(pair.max()) + 1, -1)
        sent[pair[: len(sends)]] = table.ready[sends]
        of = sent[pair[len(sends) :]]
        known = of >= 0
        if known.any():
            pp = float((nodes.time[transfers.node[received]][known] - of[known]).mean() / 1e9)
    reductions = [code for code, name in enumerate(table.ops) if name.strip("_").startswith(_REDUCTIONS)]
    beside = np.flatnonzero(np.isin(table.op[row], reductions) & ~table.in_place[row])
    dp = None
    if len(beside):
        dp = float((nodes.blocked[transfers.node[beside]] - table.ready[row[beside]]).mean() / 1e9)
    return Windows(pp, dp)
