"""On which stream operations ran in ByteDance's traces, and where a rank waited.

The format has one row an operation and says neither. What overlaps with a computation of its rank ran beside it; who
waits for it follows from what the computations need: the received activation, the gathered parameters of their chunk,
and, after the last of them, the reduced gradients.

Between the last computation of a step and the first communication of its gradients nothing is recorded, and yet ranks
wait for each other there (the last stage reduces the loss): in the published traces a rank goes on when the slowest of
its peers has got there. That time is a wait for something unknown, and no work of the rank's own.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from trimtab.events import COMM_KINDS, NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, Kind

_ROUNDING_NS: Final = 1_000_000
"""Times are 32-bit floats of seconds: what overlaps by less than this came one after the other."""
_COMPUTATIONS: Final = (Kind.FORWARD.value, Kind.BACKWARD.value)
_STEP: Final = ("rank", "step")


def place(rows: pl.DataFrame) -> pl.DataFrame:
    """``rows`` on the streams where they ran, and the waits.

    ``rows`` are all operations with ``event_id``, ``stream`` and, for receives, ``needed``: when the computation that
    it is for began. On the stream ``compute`` none overlaps with the next one any more.
    """
    is_comm = pl.col("kind").is_in([kind.value for kind in COMM_KINDS])
    busy = rows.filter(pl.col("kind").is_in(_COMPUTATIONS)).select("rank", "start", "end").sort("rank", "start")
    beside = _overlapping(rows.filter(is_comm & (pl.col("stream") == STREAM_COMPUTE)), busy)
    stream = pl.when(pl.col("event_id").is_in(beside["event_id"].implode())).then(pl.lit(STREAM_COMM))
    rows = rows.with_columns(stream=stream.otherwise("stream"))
    in_place = pl.col("stream") == STREAM_COMPUTE
    in_turn = _one_after_the_other(rows.filter(in_place))
    waits = pl.concat([_waits_for(beside, rows, busy), _wait_for_unknown(in_turn)], how="diagonal")
    return pl.concat([in_turn, rows.filter(~in_place), waits.filter(pl.col("end") > pl.col("start"))], how="diagonal")


def _overlapping(communications: pl.DataFrame, busy: pl.DataFrame) -> pl.DataFrame:
    """Those that have more than rounding in common with a computation that is ``busy`` on their rank."""
    starts, ends = communications.sort("start"), busy.sort("start")
    before = starts.join_asof(
        ends.rename({"start": "busy_from", "end": "busy_to"}),
        left_on="start",
        right_on="busy_from",
        by="rank",
        check_sortedness=False,
    )
    during = before.sort("end").join_asof(
        ends.rename({"start": "next_from", "end": "next_to"}),
        left_on="end",
        right_on="next_from",
        by="rank",
        check_sortedness=False,
    )
    common = pl.when(pl.col("busy_to").is_not_null()).then(pl.min_horizontal("busy_to", "end") - pl.col("start"))
    later = pl.when(pl.col("next_from") >= pl.col("start")).then(
        pl.min_horizontal("next_to", "end") - pl.col("next_from")
    )
    overlaps = pl.max_horizontal(common, later).fill_null(0) > _ROUNDING_NS
    return during.filter(overlaps).select(communications.columns)


def _one_after_the_other(rows: pl.DataFrame) -> pl.DataFrame:
    """``rows`` of the compute stream, each of which ends where the next of its rank begins, if not before."""
    moments = rows.select("rank", "start").unique().sort("rank", "start")
    following = moments.with_columns(following=pl.col("start").shift(-1).over("rank"))
    joined = rows.join(following, on=["rank", "start"], how="left", maintain_order="left")
    return joined.with_columns(end=pl.min_horizontal("end", "following")).drop("following")


def _wait_for_unknown(rows: pl.DataFrame) -> pl.DataFrame:
    """From the last computation or message of a step to the first collective after it; see above."""
    collective = pl.col("kind") == Kind.COLLECTIVE.value
    worked = rows.filter(pl.col("kind").is_in(_COMPUTATIONS) | (~collective & pl.col("op").is_null()))
    worked = worked.filter(pl.col("kind") != Kind.OPTIMIZER.value).group_by(_STEP).agg(begin=pl.col("end").max())
    after = rows.filter(collective).join(worked, on=list(_STEP)).filter(pl.col("start") >= pl.col("begin"))
    return _wait(after.group_by(_STEP).agg(pl.col("begin").first(), until=pl.col("start").min()))


def _wait(frame: pl.DataFrame) -> pl.DataFrame:
    """Events from ``begin`` to ``until``, with the columns that name the rank, the step and what is waited for."""
    return frame.select(
        *_STEP,
        *([pl.col("correlation_id")] if "correlation_id" in frame.columns else []),
        kind=pl.lit(Kind.HOST.value),
        name=pl.lit(NAME_WAIT),
        stream=pl.lit(STREAM_COMPUTE),
        ready="begin",
        start="begin",
        end=pl.max_horizontal("begin", "until"),
    )


def _waits_for(beside: pl.DataFrame, rows: pl.DataFrame, busy: pl.DataFrame) -> pl.DataFrame:
    """The waits of the compute stream for what ran beside it."""
    forwards = rows.filter(pl.col("kind") == Kind.FORWARD.value)
    first = forwards.group_by(*_STEP, "mc").agg(first_forward=pl.col("start").min())
    last = rows.filter(pl.col("kind") == Kind.BACKWARD.value).group_by(_STEP).agg(last_backward=pl.col("end").max())
    is_gather, is_reduction = pl.col("op") == "all_gather", pl.col("op") == "reduce_scatter"
    needed = pl.when(is_gather).then("first_forward").when(is_reduction).then("last_backward").otherwise("needed")
    awaited = beside.join(first, on=[*_STEP, "mc"], how="left").join(last, on=list(_STEP), how="left")
    awaited = awaited.with_columns(needed=needed).filter(pl.col("needed").is_not_null()).sort("needed")
    before = busy.select("rank", idle_from="end").sort("idle_from")
    awaited = awaited.join_asof(
        before.with_columns(idle=pl.col("idle_from") - _ROUNDING_NS),
        left_on="needed",
        right_on="idle",
        by="rank",
        check_sortedness=False,
    )
    begin = pl.max_horizontal(pl.min_horizontal("idle_from", "needed"), "start")
    until = pl.when(is_reduction).then("end").otherwise(pl.min_horizontal("end", "needed"))
    return _wait(awaited.with_columns(begin=begin, until=until, correlation_id="event_id"))
