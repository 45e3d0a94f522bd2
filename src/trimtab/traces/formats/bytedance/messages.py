"""Sends and receives of ByteDance's traces: which microbatch each is about, and with whom.

The rows of messages name no microbatch and no peer. But every computation of a stage has one message of each kind, in
the same order; so the n-th receive belongs to the n-th computation, and what that is about says who the peer is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from trimtab.events import Kind

_TOLERANCE_NS: Final = 50_000
"""Of the clocks and of times that are 32-bit floats of seconds."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one type of message is."""

    kind: Kind
    computation: str
    direction: int
    """Towards later chunks of the model (1) or earlier ones (-1)."""

    @property
    def to_peer(self) -> int:
        """From this side's chunk of the model to that of the other."""
        return self.direction if self.kind == Kind.SEND else -self.direction


MESSAGES: Final = {
    "forward-send": Message(Kind.SEND, "forward-compute", 1),
    "forward-recv": Message(Kind.RECV, "forward-compute", 1),
    "backward-send": Message(Kind.SEND, "backward-compute", -1),
    "backward-recv": Message(Kind.RECV, "backward-compute", -1),
}


def number_messages(rows: pl.DataFrame, workers: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """The messages among ``rows`` with peers, ``seq``, ``tag``, microbatch and chunk, and warnings.

    Receives have ``needed``, too: when the computation that they are for began.

    ``rows`` has the columns of the file, ``start``, ``end`` and ``place`` (of the step); ``workers`` has ``rank,
    dp_rank, stage``. Messages that the profiler wrote down though nothing was sent are left out.
    """
    stages, chunks = (int(rows[name].max()) + 1 for name in ("stage", "gmc"))  # type: ignore[arg-type]
    batches = int(rows["mb_id"].max()) + 1  # type: ignore[arg-type]
    parts: list[pl.DataFrame] = []
    lost = 0
    for name, message in MESSAGES.items():
        peer = pl.col("gmc") + message.to_peer
        computations = rows.filter(pl.col("optype") == message.computation)
        computations = computations.with_columns(real=(pl.col("gmc") < 0) | peer.is_between(0, chunks - 1))
        mine, missing = _with_computation(rows.filter(pl.col("optype") == name), computations, message.kind)
        lost += missing
        peer = pl.col("of_gmc") + message.to_peer
        mine = mine.filter(peer.is_between(0, chunks - 1).fill_null(True)).with_columns(
            receiver=peer if message.kind == Kind.SEND else pl.col("of_gmc"),
            peer_stage=(pl.col("stage") + message.to_peer) % stages,
            tag=pl.lit(0 if message.direction > 0 else 1),
        )
        peers = workers.select("dp_rank", peer_stage="stage", peer="rank")
        mine = mine.join(peers, on=["dp_rank", "peer_stage"], how="left")
        ends = ("rank", "peer") if message.kind == Kind.SEND else ("peer", "rank")
        parts.append(mine.with_columns(src=ends[0], dst=ends[1]))
    numbered = pl.concat(parts).with_columns(
        seq=(pl.col("place").cast(pl.Int64) * batches + pl.col("of_mb")) * chunks + pl.col("receiver"),
        microbatch=pl.col("of_mb"),
        chunk=pl.col("of_mc"),
    )
    if not lost:
        return numbered, []
    return numbered, [f"{lost} of {len(numbered)} messages belong to no computation that is here; they are not matched"]


def _with_computation(messages: pl.DataFrame, computations: pl.DataFrame, kind: Kind) -> tuple[pl.DataFrame, int]:
    """``messages`` of one type with what the computation of each is about, and how many have none."""
    step = ["rank", "step"]
    known = computations.sort(*step, "start", "seq_id").with_columns(
        of_gmc=pl.when(pl.col("gmc") >= 0).then("gmc"),
        of_mc=pl.when(pl.col("mc") >= 0).then("mc"),
        of_mb=pl.when(pl.col("mb_id") >= 0).then("mb_id"),
        needed=pl.col("start") if kind == Kind.RECV else pl.lit(None, pl.Int64),
    )
    bounds = known.group_by(step).agg(
        last=pl.col("start").max(), first=pl.col("end").min(), all=pl.len(), real=pl.col("real").sum()
    )
    messages = messages.join(bounds, on=step, how="left")
    # Some are written down before the first computation or after the last one; nothing was sent then.
    if kind == Kind.RECV:
        sent = pl.col("start") <= pl.col("last") + _TOLERANCE_NS
    else:
        sent = pl.col("end") >= pl.col("first") - _TOLERANCE_NS
    messages = messages.filter(sent.fill_null(True)).sort(*step, "start", "seq_id")
    there = pl.len().over(step)
    # With several chunks there is a message for each computation, also where there is nobody to talk to, but for the
    # very first receive; with one chunk the first and the last stage have none of those.
    shift = pl.when(there == pl.col("all")).then(0)
    if kind == Kind.RECV:
        shift = shift.when((there + 1 == pl.col("all")) & (there != pl.col("real"))).then(1)
    number = pl.int_range(pl.len(), dtype=pl.Int64).over(step)
    messages = messages.with_columns(
        number=number + shift, number_of_real=pl.when(shift.is_null() & (there == pl.col("real"))).then(number)
    ).drop("last", "first", "all", "real")
    about = ("of_gmc", "of_mc", "of_mb", "needed")
    by_all = known.with_columns(number=number).select(*step, "number", *about)
    by_real = known.filter("real").with_columns(number_of_real=number).select(*step, "number_of_real", *about)
    found = pl.concat(
        [
            messages.filter(pl.col("number_of_real").is_null()).join(by_all, on=[*step, "number"], how="left"),
            messages.filter(pl.col("number_of_real").is_not_null()).join(
                by_real, on=[*step, "number_of_real"], how="left"
            ),
        ]
    )
    return found.drop("number", "number_of_real"), int(found["of_gmc"].is_null().sum())
