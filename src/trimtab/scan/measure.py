"""How long each rank worked on what, and what its peers needed for the same: the numbers that causes compare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.events import COMPUTE_KINDS, Kind
from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians, medians_of_others, sums
from trimtab.scan.kernels.peers import stages_of
from trimtab.scan.kernels.segments import Segments, cut
from trimtab.scan.lanes import Nodes, Pieces
from trimtab.scan.summed import Summed
from trimtab.scan.table import CODE, KINDS, Table, is_of
from trimtab.scan.transfers import Transfers

COMPUTE_CODES = tuple(CODE[kind] for kind in COMPUTE_KINDS)
PASS_CODES = tuple(CODE[kind] for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WGRAD, Kind.RECOMPUTE, Kind.KERNEL))
"""Work on microbatches. Where kernels are all that is known, nobody knows which of them are the optimizer's."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Which ranks do the same work: those of one pipeline stage, by coordinates or by the layers they run."""

    group: Ints
    """By dense rank."""
    stage: tuple[int | None, ...]
    """Pipeline stage of each group, None where coordinates are not known."""
    replica: Ints
    """Data parallel replica of each rank: ranks of one work on the same microbatches."""

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.stage)

    @property
    def alone(self) -> Bools:
        """Ranks without any peer."""
        return np.bincount(self.group, minlength=self.count)[self.group] == 1


def peers_of(table: Table) -> Peers:
    """Peers by coordinates if every rank has them, else by the set of (chunk, layer) that a rank runs forward, or,
    where only kernels are known, by who exchanges messages with whom."""
    known = [at for at in table.coordinates if at is not None]
    if len(known) == table.ranks:
        stages = sorted({at.pp for at in known})
        group = np.array([stages.index(at.pp) for at in known], dtype=np.int64)
        replica, _ = factorize(np.array([at.dp for at in known]), np.array([at.cp for at in known]))
        return Peers(group, tuple(stages), replica)
    forward = table.kind == CODE[Kind.FORWARD]
    if not forward.any():
        group, pipeline = stages_of(table)
        stages = tuple(range(int(group.max()) + 1)) if pipeline else (None,)
        return Peers(group, stages, np.arange(table.ranks))
    signature: dict[bytes, int] = {}
    group = np.zeros(table.ranks, dtype=np.int64)
    for rank in range(table.ranks):
        mine = forward & (table.rank == rank)
        key = np.unique(np.stack([table.chunk[mine], table.layer[mine]]), axis=1).tobytes()
        group[rank] = signature.setdefault(key, len(signature))
    return Peers(group, (None,) * len(signature), np.arange(table.ranks))


@dataclass(frozen=True, slots=True)
class Measures:
    """Seconds by kind of work, and the pieces they are made of."""

    pieces: Pieces
    peers: Peers
    seconds: Floats
    """kinds x ranks x steps."""
    cell: Ints
    """By piece: flat index into ranks x steps."""
    step_s: float
    """Mean step time."""
    summed: Summed | None = None
    """Ranks that have no pieces."""

    @property
    def replayed(self) -> Bools:
        """Ranks whose work is there piece by piece."""
        return np.ones(self.shape[0], dtype=bool) if self.summed is None else ~self.summed.ranks

    @property
    def single(self) -> Bools:
        """Those of them that no other rank is replayed after."""
        return self.replayed if self.summed is None else self.replayed & ~self.summed.models

    @property
    def shape(self) -> tuple[int, int]:
        """(ranks, steps)."""
        return self.seconds.shape[1], self.seconds.shape[2]

    def of(self, codes: tuple[int, ...]) -> Floats:
        """Seconds spent on the kinds ``codes``, ranks x steps."""
        return self.seconds[list(codes)].sum(axis=0)

    def mask(self, codes: tuple[int, ...]) -> Bools:
        """Pieces of the kinds ``codes``."""
        return is_of(self.pieces.kind, codes)


def measure(table: Table, pieces: Pieces, summed: Summed | None = None) -> Measures:
    """Sum the pieces by kind, rank and step; of some ranks the sums may be known already."""
    ranks, steps = table.ranks, table.steps.count
    cell = pieces.rank * steps + pieces.step
    flat = sums(pieces.kind * ranks * steps + cell, pieces.duration, len(KINDS) * ranks * steps)
    seconds = flat.reshape(len(KINDS), ranks, steps) / 1e9
    if summed is not None:
        seconds = np.where(summed.ranks[None, :, None], summed.seconds, seconds)
    return Measures(pieces, peers_of(table), seconds, cell, table.steps.mean_seconds(), summed)


def others(x: Floats, group: Ints) -> Floats:
    """For each rank and step the median of ``x`` over its peers, itself left out; NaN without peers."""
    steps = x.shape[1]
    index = group[:, None] * steps + np.arange(steps)
    return medians_of_others(index.ravel(), x.ravel()).reshape(x.shape)


def instance_of(table: Table, pieces: Pieces) -> tuple[Ints, Ints]:
    """Instances of work: (rank, step, kind, chunk, microbatch). Id by piece, and one piece of each instance."""
    row = np.maximum(pieces.row, 0)
    known = pieces.row >= 0
    return factorize(
        pieces.kind,
        pieces.rank,
        pieces.step,
        np.where(known, table.chunk[row], -1),
        np.where(known, table.microbatch[row], -1),
    )


def segments_of(measures: Measures, nodes: Nodes, comm_of_post: Ints) -> Segments:
    """The segments of the compute between the meetings of ranks that are peers."""
    return cut(nodes, measures.pieces, comm_of_post, measures.peers.group, measures.mask(COMPUTE_CODES))


def ideal_scales(
    table: Table, measures: Measures, transfers: Transfers, segments: Segments | None = None
) -> tuple[Floats, Floats]:
    """Factors that turn the run into the ideal one, for pieces and for transfers.

    Each instance of compute takes the mean time of all instances of its kind, over ranks, stages, microbatches
    and steps; each transfer the median of its class; host work no more than the median of its peers
    (the what-if of ByteDance's straggler study, arXiv 2505.05713). Kernels are no instances of anything: each of
    the ``segments`` takes what it takes in the mean of its stage, and each stage what stages take in the mean.
    """
    pieces = measures.pieces
    instance, first = instance_of(table, pieces)
    total = sums(instance, pieces.duration, len(first))
    kind = pieces.kind[first]
    count, work = np.bincount(kind, minlength=len(KINDS)).astype(np.float64), sums(kind, total, len(KINDS))
    if measures.summed is not None:
        count += measures.summed.instances[:, measures.summed.ranks].sum(axis=(1, 2))
        work += measures.summed.seconds[:, measures.summed.ranks].sum(axis=(1, 2)) * 1e9
    mean = work / np.maximum(1, count)
    scale = (mean[kind] / np.maximum(total, 1))[instance]
    if segments is not None:
        scale = _by_segment(measures, segments, scale)
    host = ~measures.mask(COMPUTE_CODES)
    usual = _usual_host(measures)
    spent = measures.seconds[pieces.kind, pieces.rank, pieces.step]
    scale = np.where(host, np.minimum(1.0, usual[pieces.kind, pieces.rank] / np.maximum(spent, 1e-12)), scale)
    typical = medians(transfers.cls, transfers.duration, int(transfers.cls.max(initial=-1)) + 1)[transfers.cls]
    return scale, np.where(transfers.duration > 0, typical / np.maximum(transfers.duration, 1.0), 1.0)


def _by_segment(measures: Measures, segments: Segments, scale: Floats) -> Floats:
    """``scale`` for pieces, but for kernels by segment, and so that all ranks have as much to do together."""
    pieces, kernels = measures.pieces, measures.seconds[CODE[Kind.KERNEL]].sum(axis=1)
    mine = np.flatnonzero((pieces.kind == CODE[Kind.KERNEL]) & (segments.of_piece >= 0))
    factor = segments.factor(mine, segments.mean)
    reached = sums(pieces.rank[mine], pieces.duration[mine] * factor, len(kernels)) / 1e9
    even = np.divide(kernels.mean(), reached, out=np.ones_like(kernels), where=reached > 0)
    out = scale.copy()
    out[mine] = factor * even[pieces.rank[mine]]
    return out


def _usual_host(measures: Measures) -> Floats:
    """Median seconds of each kind over a rank's peer group and all steps (kinds x ranks)."""
    group = measures.peers.group
    out = np.zeros(measures.seconds.shape[:2])
    for part in range(measures.peers.count):
        members = group == part
        median = np.median(measures.seconds[:, members].reshape(len(KINDS), -1), axis=1)
        out[:, members] = median[:, None]
    return out
