"""Training steps of traces that tell of kernels: when the device came to their boundaries, or where these must be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from trimtab.events import NAME_STEP, Kind
from trimtab.scan.arrays import Ints
from trimtab.scan.kernels.streams import Streams

OPTIMIZER = "Optimizer.step#"
"""What PyTorch annotates each step of an optimizer with, before the optimizer's name."""
CHAINED_SHARE = 0.25
"""Optimizers that follow each other within this share of the usual time between two are of one step."""
LEAST_MARKS = 3
MOST_MARKS = 10_000
MOST_RARE = 0.05
LEAST_COVERED = 0.7
"""Steps fill the trace; what comes back in a part of it only is a microbatch, say."""
REGULAR = 0.3
"""Marks at more uneven distances (their standard deviation over their mean) do not mark steps."""


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Begins and ends of steps by the host, in the times of :class:`Streams`."""

    rank: Ints
    step: Ints
    begin: Ints
    end: Ints
    said: tuple[str, ...] = ()


def on_device(streams: Streams, rank: Ints, moment: Ints) -> Ints:
    """When the device came to a point at which its host was at ``moment``: after all that was launched before."""
    return np.where(streams.on_device[rank], np.maximum(moment, streams.finished_before(rank, moment)), moment)


def infer_steps(events: pl.DataFrame, streams: Streams) -> Boundaries | None:
    """Steps of a trace that names none; None where nothing repeats that could be one.

    They end with the optimizer, which PyTorch annotates. Failing that, they begin at a kernel that every rank ran
    equally often and at even distances.
    """
    return _by_optimizer(events, streams) or _by_kernel(events, streams)


def _by_optimizer(events: pl.DataFrame, streams: Streams) -> Boundaries | None:
    marks = events.filter(
        pl.col("name").cast(pl.String).str.starts_with(OPTIMIZER)
        & (pl.col("kind").cast(pl.String) != Kind.KERNEL.value)
        & pl.col("rank").is_in(streams.ids.tolist())
    ).select("rank", "start", "end")
    by_rank = [_ends(marks.filter(pl.col("rank") == rank).sort("start")) for rank in streams.ids.tolist()]
    count = min((len(ends) for ends in by_rank), default=0)
    if count < 1 or count > MOST_MARKS:
        return None
    dropped = max(len(ends) for ends in by_rank) - count
    ends = np.stack([mine[-count:] for mine in by_rank]) - streams.origin[:, None]
    first = np.array([streams.start[streams.rank == rank].min() for rank in range(streams.ranks)])
    begins = np.concatenate([np.minimum(first, ends[:, 0])[:, None], ends[:, :-1]], axis=1)
    said = [f"the trace names no steps; {count} were told by where the optimizer ends"]
    if dropped:
        said.append(f"some ranks recorded {dropped} more optimizer steps than others; the last {count} are compared")
    rank, step = np.divmod(np.arange(ends.size), count)
    return Boundaries(rank, step, begins.ravel(), ends.ravel(), tuple(said))


def _ends(marks: pl.DataFrame) -> Ints:
    """Ends of the last optimizer of each step."""
    start, end = (marks[name].to_numpy().astype(np.int64) for name in ("start", "end"))
    if len(end) < 2:
        return end
    pause = start[1:] - end[:-1]
    return end[np.r_[pause > CHAINED_SHARE * pause.max(), True]]


def _by_kernel(events: pl.DataFrame, streams: Streams) -> Boundaries | None:
    """By the kernel that took the longest of those that may mark a step; the time before the first is in none."""
    work = events.filter((pl.col("kind") == Kind.KERNEL.value) & pl.col("rank").is_in(streams.ids.tolist()))
    counts = (
        work.group_by("rank", "name")
        .agg(
            pl.len().alias("n"),
            pl.col("start").sort().diff().mean().alias("mean"),
            pl.col("start").sort().diff().std().alias("std"),
            pl.col("end").sub("start").sum().alias("spent"),
        )
        .filter(pl.col("n").is_between(LEAST_MARKS, MOST_MARKS) & (pl.col("std") < REGULAR * pl.col("mean")))
    )
    common = (
        counts.group_by("name")
        .agg(pl.len().alias("ranks"), pl.col("n").n_unique().alias("sorts"), pl.col("n").first(), pl.col("spent").sum())
        .filter((pl.col("ranks") == streams.ranks) & (pl.col("sorts") == 1))
    )
    if common.is_empty() or _rare_share(work, common) > MOST_RARE:
        return None
    # What is there once a step is there least often; of that, the longest.
    fewest = int(common["n"].min())  # pyright: ignore[reportArgumentType]
    chosen = common.filter(pl.col("n") == fewest).sort("spent", "name", descending=[True, False])["name"][0]
    times = work.filter(pl.col("name") == chosen).sort("rank", "start")["start"].to_numpy().astype(np.int64)
    marks = times.reshape(streams.ranks, fewest) - streams.origin[:, None]
    covered = (marks[:, -1] - marks[:, 0]) * fewest / (fewest - 1)
    length = np.array([np.ptp(streams.start[streams.rank == rank]) for rank in range(streams.ranks)])
    if (covered < LEAST_COVERED * length).any():
        return None
    rank, step = np.divmod(np.arange(streams.ranks * (fewest - 1)), fewest - 1)
    said = f"the trace names no steps and no optimizer; {fewest - 1} were told by a kernel that comes back once in each"
    return Boundaries(rank, step, marks[:, :-1].ravel(), marks[:, 1:].ravel(), (said,))


def _rare_share(work: pl.DataFrame, common: pl.DataFrame) -> float:
    """Share of the time in kernels that run less often than any possible mark, which then marks less than a step."""
    fewest = common["n"].min()
    spent = work.group_by("rank", "name").agg(pl.len().alias("n"), pl.col("end").sub("start").sum().alias("spent"))
    rare = spent.filter(pl.col("n") < fewest)["spent"].sum()
    return float(rare) / max(1.0, float(spent["spent"].sum()))


def step_rows(boundaries: Boundaries, streams: Streams) -> pl.DataFrame:
    """Step events (rank, step, kind, name, stream, ready, start, end) with the device's times."""
    rank = boundaries.rank
    origin = streams.origin[rank]
    begin, end = on_device(streams, rank, boundaries.begin), on_device(streams, rank, boundaries.end)
    return pl.DataFrame(
        {
            "rank": streams.ids[rank],
            "step": boundaries.step,
            "kind": Kind.HOST.value,
            "name": NAME_STEP,
            "stream": "host",
            "ready": boundaries.begin + origin,
            "start": begin + origin,
            "end": end + origin,
        }
    )
