"""Communication that MegatronApp's merged files of the plain pipeline do not hold, as far as the schedule implies it.

There are only the computations and the moment at which the gradients are reduced. A computation of one stage needs what
the stage before it computed: that was sent when it was complete, and received when the computation began. So the time
between the two is the window that the schedule leaves for sending; when within it the message was under way, nobody
knows. Likewise the gradients of a chunk of the model are complete after its last backward, and could be reduced from
then until the moment of the reduction.
"""

from __future__ import annotations

import polars as pl

from trimtab.events import NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, Kind
from trimtab.traces.formats.megatronapp.files import REDUCE
from trimtab.traces.formats.megatronapp.layout import Layout
from trimtab.traces.formats.tables import event_table

_STEP = ("rank", "step")
_AT = ("dp", "tp", "pp")


def messages(computations: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """Sends and receives between ``computations``, events that have microbatch, chunk and ``dp, pp, tp``."""
    stages, chunks = (int(computations[name].max() or 0) + 1 for name in ("pp", "chunk"))  # type: ignore[arg-type]
    batches = int(computations["microbatch"].max() or 0) + 1  # type: ignore[arg-type]
    total = stages * chunks
    needed = ("kind", "start", "end", "microbatch", "chunk", *_AT)
    work = computations.select(*_STEP, *needed).sort(*_STEP, "start")
    work = work.with_columns(
        place=pl.col("chunk") * stages + pl.col("pp"),
        forward=pl.col("kind") == Kind.FORWARD.value,
        free=pl.coalesce(pl.col("end").shift(1).over(_STEP), pl.col("start").min().over("step")),
    )
    work = work.with_columns(pl.min_horizontal("free", "start").alias("free"))
    onward = pl.when("forward").then(1).otherwise(-1)
    sent = work.with_columns(peer_place=pl.col("place") + onward, receiver=pl.col("place") + onward)
    sent = sent.with_columns(kind=pl.lit(Kind.SEND.value), ready="end", start="end", src="rank")
    received = work.with_columns(peer_place=pl.col("place") - onward, receiver="place")
    received = received.with_columns(kind=pl.lit(Kind.RECV.value), ready="free", end="start", start="free", dst="rank")
    found = pl.concat([sent, received], how="diagonal").filter(pl.col("peer_place").is_between(0, total - 1))
    peers = layout.ranks.select("dp", "tp", peer_pp="pp", peer="rank")
    found = found.with_columns(peer_pp=pl.col("peer_place") % stages).join(peers, on=["dp", "tp", "peer_pp"])
    group = layout.member.filter(pl.col("which") == "pp").select("rank", "group")
    return found.join(group, on="rank").select(
        *_STEP,
        "kind",
        "ready",
        "start",
        "end",
        "microbatch",
        "chunk",
        "group",
        name=pl.when(pl.col("kind") == Kind.SEND.value).then(pl.lit("send")).otherwise(pl.lit("receive")),
        stream=pl.lit(STREAM_COMPUTE),
        seq=(pl.col("step") * batches + pl.col("microbatch")) * total + pl.col("receiver"),
        src=pl.coalesce("src", "peer"),
        dst=pl.coalesce("dst", "peer"),
        tag=pl.when("forward").then(0).otherwise(1),
    )


def reductions(computations: pl.DataFrame, moments: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """One reduction a chunk, from its last backward to the moment of the reduction, and the wait for it there.

    ``moments`` has ``rank, step, start, name``.
    """
    group = layout.member.filter(pl.col("which") == "dp").select("rank", "group")
    reduced = moments.filter(pl.col("name") == REDUCE).group_by(_STEP).agg(until=pl.col("start").min())
    last = computations.filter(pl.col("kind") == Kind.BACKWARD.value).group_by(*_STEP, "chunk").agg(pl.col("end").max())
    window = last.join(reduced, on=list(_STEP)).filter(pl.col("until") >= pl.col("end")).join(group, on="rank")
    window = window.sort(*_STEP, "chunk").with_row_index("number").with_columns(pl.col("number").cast(pl.Int64))
    reduction = window.select(
        *_STEP,
        "chunk",
        "group",
        event_id="number",
        kind=pl.lit(Kind.COLLECTIVE.value),
        name=pl.lit("gradients (window)"),
        op=pl.lit("all_reduce"),
        stream=pl.lit(STREAM_COMM),
        ready="end",
        start="end",
        end="until",
        seq=pl.col("step") * (pl.col("chunk").max() + 1) + pl.col("chunk"),
    )
    wait = window.select(
        *_STEP,
        correlation_id="number",
        kind=pl.lit(Kind.HOST.value),
        name=pl.lit(NAME_WAIT),
        stream=pl.lit(STREAM_COMPUTE),
        ready="until",
        start="until",
        end="until",
    )
    return pl.concat([event_table(reduction), event_table(wait)])
