"""From the scan's numbers to what the report draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Floats, Ints, sums
from trimtab.scan.candidates import Context
from trimtab.scan.measure import COMPUTE_CODES, others
from trimtab.scan.model import Finding
from trimtab.scan.plots import Category, ReportPlots, Segment
from trimtab.scan.replay import Replayed, Replayer
from trimtab.scan.table import KINDS, Table

MOST_TIMELINE_RANKS = 32
MOST_SEGMENTS = 20_000

_CATEGORY = {
    Kind.FORWARD: Category.FORWARD,
    Kind.RECOMPUTE: Category.FORWARD,
    Kind.BACKWARD: Category.BACKWARD,
    Kind.WGRAD: Category.WGRAD,
    Kind.OPTIMIZER: Category.OPTIMIZER,
    Kind.KERNEL: Category.KERNEL,
    Kind.HOST: Category.GAP,
}


def draw(
    context: Context, replayer: Replayer, actual: Replayed, error_ns: Floats, findings: Sequence[Finding]
) -> ReportPlots:
    """Everything the figures show. The timeline is of the longest step that the first finding concerns."""
    table, measures = context.table, context.measures
    ids = tuple(int(rank) for rank in table.ids)
    compute = measures.of(COMPUTE_CODES)
    reference = others(compute, measures.peers.group)
    own = np.median(compute, axis=1, keepdims=True) if compute.size else compute
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = compute / np.where(measures.peers.alone[:, None], own, reference) - 1
    lasted = (table.steps.end - table.steps.begin).max(axis=0)
    first, last = findings[0].steps if findings else (context.steps[0], context.steps[-1])
    concerned = (context.steps >= first) & (context.steps <= last)
    worst = int(np.where(concerned, lasted, -1).argmax())
    waited = sums(replayer.lanes.nodes.rank[context.transfers.node], actual.waited, table.ranks)
    per_step = 1e9 * max(1, table.steps.count)
    return ReportPlots(
        heatmap_ranks=ids,
        heatmap_steps=tuple(int(step) for step in context.steps),
        heatmap=np.where(np.isfinite(excess), excess, np.nan),
        timeline=_timeline(context, replayer, worst),
        timeline_step=int(context.steps[worst]),
        lost_by_rank=dict(zip(ids, (_lost(context, replayer, actual, reference) / per_step).tolist(), strict=True)),
        waited_by_rank=dict(zip(ids, (waited / per_step).tolist(), strict=True)),
        clock_error_us_by_rank=dict(zip(ids, (error_ns / 1e3).tolist(), strict=True)),
        step_time_s={int(n): float(t) / 1e9 for n, t in zip(context.steps, lasted, strict=True)},
    )


def _lost(context: Context, replayer: Replayer, actual: Replayed, reference: Floats) -> Floats:
    """Nanoseconds beyond its peers that each rank spent on the critical path."""
    measures, pieces = context.measures, context.measures.pieces
    on_path = np.isin(pieces.edge, replayer.critical_path(actual))
    compute = measures.mask(COMPUTE_CODES)
    total = measures.of(COMPUTE_CODES)
    usual = np.where(np.isfinite(reference), reference, np.median(total, axis=1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.nan_to_num(1 - usual / total)
    host = np.zeros(measures.seconds.shape)
    for code in range(len(KINDS)):
        seconds = measures.seconds[code]
        if code in COMPUTE_CODES or not seconds.any():
            continue
        peers = np.nan_to_num(others(seconds, measures.peers.group), nan=np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            host[code] = np.nan_to_num(np.maximum(0.0, 1 - peers / seconds))
    part = np.where(compute, share.ravel()[measures.cell], host.reshape(len(KINDS), -1)[pieces.kind, measures.cell])
    excess = sums(pieces.rank[on_path], (pieces.duration * part)[on_path], context.table.ranks)
    return np.maximum(0.0, excess)


def _timeline(context: Context, replayer: Replayer, step: int) -> tuple[Segment, ...]:
    """Segments of one step, for as many ranks as can be told apart."""
    table, pieces = context.table, context.measures.pieces
    shown = _shown_ranks(np.flatnonzero(context.measures.replayed))
    origin = int(table.steps.begin[:, step].min())
    out: list[Segment] = []
    mine = np.flatnonzero((pieces.step == step) & np.isin(pieces.rank, shown))
    mine = mine[:MOST_SEGMENTS]
    start = pieces.start[mine] - origin
    columns = (table.ids[pieces.rank[mine]], start / 1e9, (start + pieces.duration[mine]) / 1e9, pieces.kind[mine])
    for rank, begin, end, kind, label in zip(
        *(c.tolist() for c in columns), _labels(table, pieces.row[mine]), strict=True
    ):
        out.append(Segment(rank, begin, end, _CATEGORY.get(KINDS[kind], Category.OTHER), label))
    return tuple(out + _communication(context, replayer, step, shown, origin))


def _shown_ranks(ranks: Ints) -> Ints:
    if len(ranks) <= MOST_TIMELINE_RANKS:
        return ranks
    return ranks[np.unique(np.linspace(0, len(ranks) - 1, MOST_TIMELINE_RANKS).astype(np.int64))]


def _labels(table: Table, rows: Ints) -> list[str]:
    """What is written on the pieces of ``rows`` (-1: nothing was recorded)."""
    columns = [table.name, table.kind, table.layer]
    said = zip(*(np.where(rows >= 0, c[rows] if len(c) else -1, -2).tolist() for c in columns), strict=True)
    names = [_name(table, *one) if one[1] >= 0 else "nothing recorded" for one in said]
    return [name + where for name, where in zip(names, _places(table, rows), strict=True)]


def _name(table: Table, name: int, kind: int, layer: int) -> str:
    shown = table.names[name] if name >= 0 else KINDS[kind].value
    return shown + (f" {layer}" if layer >= 0 else "")


def _places(table: Table, rows: Ints) -> list[str]:
    """For which part of the model and which microbatch the events of ``rows`` are, as far as that is known and is not
    the same for all."""
    known = [at for at in table.coordinates if at is not None]
    staged = len(known) == table.ranks and any(at.pp for at in known)
    chunked = bool((table.chunk > 0).any())
    at = np.maximum(rows, 0)
    columns = (table.rank, table.chunk, table.microbatch) if len(table.rank) else ()
    said = zip(*(np.where(rows >= 0, column[at], -1).tolist() for column in columns), strict=True)
    return [
        (f", stage {known[rank].pp}" if staged and microbatch >= 0 else "")
        + (f", chunk {chunk}" if chunked and chunk >= 0 else "")
        + (f", microbatch {microbatch}" if microbatch >= 0 else "")
        for rank, chunk, microbatch in said
    ] or [""] * len(rows)


def _communication(context: Context, replayer: Replayer, step: int, shown: Ints, origin: int) -> list[Segment]:
    """Each stop for a communication: what it waited for others, then the transfer."""
    table, transfers, nodes = context.table, context.transfers, replayer.lanes.nodes
    node = transfers.node
    mine = np.flatnonzero((nodes.step[node] == step) & np.isin(nodes.rank[node], shown))
    mine = mine[:MOST_SEGMENTS]
    at, row = node[mine], context.row_of_transfer[mine]
    begin, end = nodes.blocked[at], nodes.time[at]
    arrived = np.where(transfers.joint[mine], np.clip(transfers.last_post[transfers.comm[mine]], begin, end), begin)
    columns = (
        table.ids[nodes.rank[at]],
        begin - origin,
        arrived - origin,
        end - origin,
        table.op[row],
        table.kind[row],
    )
    out: list[Segment] = []
    places = _places(table, row)
    for rank, since, there, until, op, kind, where in zip(*(c.tolist() for c in columns), places, strict=True):
        label = (table.ops[op] if op >= 0 else KINDS[kind].value) + where
        for category, a, b in ((Category.WAIT, since, there), (Category.TRANSFER, there, until)):
            if b > a:
                out.append(Segment(rank, a / 1e9, b / 1e9, category, label))
    return out
