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
    of_rank = {key[0]: part for key, part in marks.sort("start").partition_by("rank", as_dict=True).items()}
    by_rank = [_ends(of_rank[rank]) if rank in of_rank else None for rank in streams.ids.tolist()]
    ends = [mine - origin for mine, origin in zip(by_rank, streams.origin, strict=True) if mine is not None]
    most = max((len(mine) for mine in ends), default=0)
    if len(ends) < streams.ranks or most > MOST_MARKS:
        return None
    shift = _shifts([mine + origin for mine, origin in zip(ends, streams.origin, strict=True)])
    firsts = streams.first_start()
    begins = [np.r_[min(first, mine[0]), mine[:-1]] for first, mine in zip(firsts, ends, strict=True)]
    said = [f"the trace names no steps; {most} were told by where the optimizer ends"]
    if len({len(mine) for mine in ends}) > 1:
        said.append("some ranks recorded fewer optimizer steps than others, and are compared in those")
    rank = np.repeat(np.arange(streams.ranks), [len(mine) for mine in ends])
    step = np.concatenate([before + np.arange(len(mine)) for mine, before in zip(ends, shift, strict=True)])
    begin, end = np.concatenate(begins), np.concatenate(ends)
    whole = np.concatenate(
        [(np.arange(len(mine)) > 0) | (before == 0) for mine, before in zip(ends, shift, strict=True)]
    )
    return Boundaries(rank[whole], step[whole], begin[whole], end[whole], tuple(said))


def _shifts(ends: list[Ints]) -> list[int]:
    """Which of the steps of the rank that recorded the most is the first of each rank.

    The one nearest in time, where clocks agree to less than half a step; else ranks are taken to have ended together.
    """
    longest = max(ends, key=len)
    period = np.diff(longest).mean() if len(longest) > 1 else np.inf
    shifts: list[int] = []
    for mine in ends:
        spare = len(longest) - len(mine)
        away = np.abs(longest[: spare + 1] - mine[0])
        near = int(away.argmin())
        shifts.append(near if away[near] < period / 2 else spare)
    return shifts


def _ends(marks: pl.DataFrame) -> Ints:
    """Ends of the last optimizer of each step."""
    start, end = (marks[name].to_numpy().astype(np.int64) for name in ("start", "end"))
    end = np.maximum.accumulate(end)
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
    length = streams.last_start() - streams.first_start()
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
