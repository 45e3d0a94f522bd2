"""Answers to what-if questions, by replay of the recorded run with the changed durations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trimtab.events import Kind
from trimtab.scan.arrays import Bools, Floats, Ints, factorize, medians
from trimtab.scan.candidates import Context
from trimtab.scan.causes.kernels import fix_by_segment
from trimtab.scan.measure import COMPUTE_CODES, PASS_CODES
from trimtab.scan.model import WhatIf
from trimtab.scan.replay import Replayed, Replayer
from trimtab.scan.table import CODE
from trimtab.scan.whatif.questions import (
    Change,
    FixHost,
    FixKind,
    FixRanks,
    FixStage,
    Question,
    SetLink,
    SlowRank,
    Speed,
    Unit,
)

_BUS_SHARE: Final = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Bytes that each link carries for a byte of the message, times (n - 1) / n for n ranks (the bus bandwidth of
nccl-tests); of other operations each byte passes once."""


def answer(
    questions: Sequence[Question], context: Context, replayer: Replayer, actual: Replayed, hosts: Sequence[str]
) -> tuple[WhatIf, ...]:
    """The step time of each question. ``hosts`` is by dense rank.

    Raises ValueError, in one line, where a question names what the run does not have.
    """
    return tuple(_answer(question, context, replayer, actual, hosts) for question in questions)


def _answer(question: Question, context: Context, replayer: Replayer, actual: Replayed, hosts: Sequence[str]) -> WhatIf:
    scenario = _Scenario(context, hosts)
    try:
        for change in question.changes:
            scenario.apply(change)
    except ValueError as error:
        raise ValueError(f"what-if {question.text!r}: {error}") from None
    run = replayer.run(scenario.pieces, scenario.transfers, scenario.extra)
    return WhatIf(
        fix=question.text,
        step_time_s=run.step_ns / 1e9,
        seconds_saved_per_step=(actual.step_ns - run.step_ns) / 1e9,
        asked=True,
        detail="; ".join(scenario.notes),
    )


class _Scenario:
    """Factors of all pieces and transfers, and what was done to them in words."""

    def __init__(self, context: Context, hosts: Sequence[str]) -> None:
        self._context, self._hosts = context, hosts
        self.pieces: Floats = np.ones(len(context.measures.pieces.duration))
        self.transfers: Floats = np.ones(len(context.transfers.duration))
        self.extra: Floats = np.zeros(len(context.transfers.duration))
        """Nanoseconds beside the scaled ones: transfers that took no time have nothing to scale."""
        self.notes: list[str] = []

    def apply(self, change: Change) -> None:
        match change:
            case FixRanks():
                self._like_peers(np.array([self._dense(rank) for rank in change.ranks]))
            case FixHost():
                self._like_peers(self._on_host(change.host))
            case FixStage():
                self._level_stages(change.stage)
            case FixKind():
                self.pieces[self._context.measures.pieces.kind == CODE[change.kind]] = 0.0
            case SetLink():
                self._set_link(change.link, change.speed)
            case SlowRank():
                pieces = self._context.measures.pieces
                hit = self._context.measures.mask(COMPUTE_CODES) & (pieces.rank == self._dense(change.rank))
                self.pieces[hit] *= change.ratio

    def _dense(self, rank: int) -> int:
        found = np.flatnonzero(self._context.table.ids == rank)
        if not len(found):
            raise ValueError(f"there is no rank {rank} among the {self._context.table.ranks} that were recorded")
        return int(found[0])

    def _on_host(self, name: str) -> Ints:
        found = np.flatnonzero(np.array([host == name for host in self._hosts]))
        if not len(found):
            known = ", ".join(sorted(set(self._hosts))[:4]) or "no host by name"
            raise ValueError(f"there is no host {name!r}; the trace has {known}")
        return found

    def _like_peers(self, ranks: Ints) -> None:
        """Each kind of work takes what the peers that are not fixed took for it in the same step.

        Without such peers it takes what it usually does on the rank itself.
        """
        measures = self._context.measures
        seconds, group = measures.seconds, measures.peers.group
        factor = np.ones_like(seconds)
        for rank in ranks:
            peers = np.setdiff1d(np.flatnonzero(group == group[rank]), ranks)
            own = seconds[:, rank]
            usual = np.median(seconds[:, peers], axis=1) if len(peers) else _steady(own)
            more = own.sum(axis=1) > usual.sum(axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                factor[:, rank] = np.where(more[:, None] & (own > 0), usual / own, 1.0)
            if not len(peers):
                self.notes.append(
                    f"rank {self._context.table.ids[rank]} has no peer to be like: its steps become like its usual one"
                )
            elif self._context.segments is not None:
                self._kernels_like_peers(int(rank), factor)
        pieces = measures.pieces
        self.pieces *= factor[pieces.kind, pieces.rank, pieces.step]

    def _kernels_like_peers(self, rank: int, factor: Floats) -> None:
        """Between two meetings its kernels take what the peers' do there: an even factor would shift the meetings."""
        measures, kernel = self._context.measures, CODE[Kind.KERNEL]
        seconds = measures.seconds[kernel, rank]
        ratio = float(seconds.sum() / max((seconds * factor[kernel, rank]).sum(), 1e-12))
        if ratio <= 1:
            return
        pieces = np.flatnonzero((measures.pieces.kind == kernel) & (measures.pieces.rank == rank))
        self.pieces[pieces] *= fix_by_segment(self._context, pieces, ratio)
        factor[kernel, rank] = 1.0

    def _level_stages(self, stage: int | None) -> None:
        """The passes of a stage take the mean of the other stages; of all stages the mean of all."""
        measures = self._context.measures
        peers, pieces = measures.peers, measures.pieces
        count = peers.count
        if count < 2:
            raise ValueError("the job has one pipeline stage only")
        names = [part if name is None else name for part, name in enumerate(peers.stage)]
        if stage is not None and stage not in names:
            raise ValueError(f"there is no stage {stage}; the job has {', '.join(map(str, names))}")
        # kinds x stages: seconds a step of one rank of the stage
        spent = np.stack([measures.seconds[:, peers.group == part].mean(axis=(1, 2)) for part in range(count)], axis=1)
        factor = np.ones_like(spent)
        for code in PASS_CODES:
            for part in range(count) if stage is None else [names.index(stage)]:
                rest = spent[code] if stage is None else np.delete(spent[code], part)
                if spent[code, part] > 0 and (stage is None or rest.mean() < spent[code, part]):
                    factor[code, part] = rest.mean() / spent[code, part]
        self.pieces *= factor[pieces.kind, peers.group[pieces.rank]]

    def _set_link(self, link: tuple[int, int] | None, speed: Speed | None) -> None:
        transfers = self._context.transfers
        hit = np.ones(len(transfers.comm), dtype=bool) if link is None else self._between(*link)
        if not hit.any():
            raise ValueError(
                "no message and no collective of just these two ranks was recorded: "
                "what their link does to a larger group is not known"
                if link
                else "no communication was recorded"
            )
        if speed is None:
            usual = self._usual_elsewhere(hit)
            self.transfers[hit] = np.minimum(1.0, usual / np.maximum(transfers.duration[hit], 1.0))
        elif speed.unit is Unit.TIMES:
            self.transfers[hit] /= speed.value
        else:
            carried, wanted = self._carried()[hit], speed.value
            self._say_bandwidth(carried, transfers.duration[hit])
            self.extra[hit] = carried / wanted * 1e9
            self.transfers[hit] = 0.0

    def _between(self, one: int, other: int) -> Bools:
        """Transfers of messages between two ranks, and of collectives that nobody else is part of."""
        for rank in (one, other):
            self._dense(rank)
        context = self._context
        table, transfers, row = context.table, context.transfers, context.row_of_transfer
        src, dst = table.src[row], table.dst[row]
        message = table.kind[row] != CODE[Kind.COLLECTIVE]
        hit = message & (((src == one) & (dst == other)) | ((src == other) & (dst == one)))
        member = np.isin(table.ids[table.rank[row]], (one, other))
        comm, _ = factorize(transfers.comm)
        size = np.bincount(comm)
        both = (np.bincount(comm, weights=member) == size) & (size == 2)
        return hit | (~message & both[comm])

    def _usual_elsewhere(self, hit: Bools) -> Floats:
        """Median transfer of the same class on other links; on this one where there is no other."""
        transfers = self._context.transfers
        size = int(transfers.cls.max(initial=-1)) + 1
        cls = transfers.cls[hit]
        away = medians(transfers.cls[~hit], transfers.duration[~hit], size)[cls]
        here = medians(cls, transfers.duration[hit], size)[cls]
        if np.isnan(away).all():
            self.notes.append("no other link carries the like: its transfers become like its usual ones")
        return np.where(np.isnan(away), here, away)

    def _carried(self) -> Floats:
        """Bytes that the busiest link carries for each transfer."""
        table, row = self._context.table, self._context.row_of_transfer
        nbytes = np.maximum(table.bytes[row], 0).astype(np.float64)
        collective = table.kind[row] == CODE[Kind.COLLECTIVE]
        comm, _ = factorize(self._context.transfers.comm)
        members = np.bincount(comm)[comm]
        share = np.array([_BUS_SHARE.get(op.strip("_"), 0.0) for op in (*table.ops, "")])[table.op[row]]
        return np.where(collective & (share > 0), nbytes * share * (members - 1) / np.maximum(members, 1), nbytes)

    def _say_bandwidth(self, carried: Floats, duration: Floats) -> None:
        seen = (duration > 0) & (carried > 0)
        if not seen.any():
            raise ValueError("the sizes of these transfers are not known, so a bandwidth says nothing about them")
        now = float(np.median(carried[seen] / duration[seen]))
        self.notes.append(f"as recorded: {now:.3g} GB/s (median of {int(seen.sum()):,} transfers; latency is left out)")


def _steady(seconds: Floats) -> Floats:
    """Kinds x steps: the median step of each kind, in every step."""
    return np.repeat(np.median(seconds, axis=1, keepdims=True), seconds.shape[1], axis=1)
