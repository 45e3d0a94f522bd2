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
from trimtab.scan.table import KINDS

MOST_TIMELINE_RANKS = 32
MOST_SEGMENTS = 20_000

_CATEGORY = {
    Kind.FORWARD: Category.FORWARD,
    Kind.RECOMPUTE: Category.FORWARD,
    Kind.BACKWARD: Category.BACKWARD,
    Kind.WGRAD: Category.BACKWARD,
    Kind.OPTIMIZER: Category.OPTIMIZER,
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
    shown = _shown_ranks(table.ranks)
    origin = int(table.steps.begin[:, step].min())
    out: list[Segment] = []
    mine = np.flatnonzero((pieces.step == step) & np.isin(pieces.rank, shown))
    for piece in mine[:MOST_SEGMENTS]:
        kind, row = KINDS[pieces.kind[piece]], int(pieces.row[piece])
        category = _CATEGORY.get(kind, Category.OTHER)
        start = int(pieces.start[piece]) - origin
        end = start + int(pieces.duration[piece])
        rank = int(table.ids[pieces.rank[piece]])
        out.append(Segment(rank, start / 1e9, end / 1e9, category, _label(context, row)))
    return tuple(out + _communication(context, replayer, step, shown, origin))


def _shown_ranks(ranks: int) -> Ints:
    if ranks <= MOST_TIMELINE_RANKS:
        return np.arange(ranks)
    return np.unique(np.linspace(0, ranks - 1, MOST_TIMELINE_RANKS).astype(np.int64))


def _label(context: Context, row: int) -> str:
    if row < 0:
        return "nothing recorded"
    table = context.table
    name = table.names[table.name[row]] if table.name[row] >= 0 else KINDS[table.kind[row]].value
    layer = f" {table.layer[row]}" if table.layer[row] >= 0 else ""
    microbatch = f", microbatch {table.microbatch[row]}" if table.microbatch[row] >= 0 else ""
    return f"{name}{layer}{microbatch}"


def _communication(context: Context, replayer: Replayer, step: int, shown: Ints, origin: int) -> list[Segment]:
    """Each stop for a communication: what it waited for others, then the transfer."""
    table, transfers, nodes = context.table, context.transfers, replayer.lanes.nodes
    node = transfers.node
    mine = np.flatnonzero((nodes.step[node] == step) & np.isin(nodes.rank[node], shown))
    out: list[Segment] = []
    for one in mine[:MOST_SEGMENTS]:
        begin, end = int(nodes.blocked[node[one]]), int(nodes.time[node[one]])
        row = int(context.row_of_transfer[one])
        arrived = int(np.clip(transfers.last_post[transfers.comm[one]], begin, end)) if transfers.joint[one] else begin
        rank = int(table.ids[nodes.rank[node[one]]])
        op = table.ops[table.op[row]] if table.op[row] >= 0 else KINDS[table.kind[row]].value
        for category, a, b in ((Category.WAIT, begin, arrived), (Category.TRANSFER, arrived, end)):
            if b > a:
                out.append(Segment(rank, (a - origin) / 1e9, (b - origin) / 1e9, category, op))
    return out
