"""Read MegatronApp's traces: the files of a job's ranks, or one file into which its script has merged them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from trimtab.events import COMM_KINDS, NAME_STEP, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.traces.formats.heads import Head
from trimtab.traces.formats.megatronapp import implied
from trimtab.traces.formats.megatronapp.files import BEGIN, END, ITERATION, REDUCE, Rows, read_rows
from trimtab.traces.formats.megatronapp.layout import PLACE, Layout, layout_of, locate
from trimtab.traces.formats.tables import event_table
from trimtab.traces.own_header import printable
from trimtab.traces.own_rank import MOST_TIME_NS
from trimtab.traces.table import RankInfo, Trace

_MERGED_OLDER: Final = re.compile(rb'"name":\s*"iteration begin"')
_OWN_OR_NEWER: Final = re.compile(rb'"(?:pad_before|g_rk)":')
_LAYER: Final = r"_(\d{1,6})$"
_MOMENTS: Final = (BEGIN, END, REDUCE)


@dataclass(frozen=True, slots=True)
class _Op:
    """What a span is in an event table."""

    kind: Kind
    op: str | None = None
    group: str | None = None
    """Among which ranks: those that differ in ``tp``, ``dp`` or ``pp`` only."""
    towards: int = 0
    """Of messages: the stage that the other side has, less the own one."""
    tag: int | None = None
    """Of messages: 0 for activations, 1 for gradients."""


_OPS: Final = {
    "forward": (_Op(Kind.FORWARD),),
    "forward-warmup": (_Op(Kind.FORWARD),),
    "backward": (_Op(Kind.BACKWARD),),
    "backward-cooldown": (_Op(Kind.BACKWARD),),
    "optimizer": (_Op(Kind.OPTIMIZER),),
    "allreduce": (_Op(Kind.COLLECTIVE, "all_reduce", "dp"),),
    "grad-sync": (_Op(Kind.COLLECTIVE, "all_reduce", "dp"),),
    "_reduce": (_Op(Kind.COLLECTIVE, "all_reduce", "tp"),),
    "_gather_along_first_dim": (_Op(Kind.COLLECTIVE, "all_gather", "tp"),),
    "_gather_along_last_dim": (_Op(Kind.COLLECTIVE, "all_gather", "tp"),),
    "_reduce_scatter_along_first_dim": (_Op(Kind.COLLECTIVE, "reduce_scatter", "tp"),),
    "_reduce_scatter_along_last_dim": (_Op(Kind.COLLECTIVE, "reduce_scatter", "tp"),),
    "recv-warmup": (_Op(Kind.RECV, None, "pp", -1, 0),),
    "recv-extra": (_Op(Kind.RECV, None, "pp", -1, 0),),
    "send-warmup": (_Op(Kind.SEND, None, "pp", 1, 0),),
    "recv-cooldown": (_Op(Kind.RECV, None, "pp", 1, 1),),
    "send-extra": (_Op(Kind.SEND, None, "pp", -1, 1),),
    "send-cooldown": (_Op(Kind.SEND, None, "pp", -1, 1),),
    "exchange-next": (_Op(Kind.SEND, None, "pp", 1, 0), _Op(Kind.RECV, None, "pp", 1, 1)),
    "exchange-prev": (_Op(Kind.SEND, None, "pp", -1, 1), _Op(Kind.RECV, None, "pp", -1, 0)),
}
"""By name; what is not here is shown as a span of the user."""


def recognizes(head: Head) -> bool:
    """Whether it is a rank's own file or a merged one."""
    if not head.is_json:
        return False
    older = _MERGED_OLDER.search(head.data) is not None and b'"iteration":' in head.data
    return older or _OWN_OR_NEWER.search(head.data) is not None


def read(files: Sequence[Path]) -> Trace:
    """The job in ``files``."""
    parts, warnings = _parts(files)
    where = str(files[0].parent if len(parts) > 1 else files[0])
    merged = parts[0].merged
    placed, more = (locate(parts[0].frame), list[str]()) if merged else _by_rank(parts)
    warnings += more
    rows, more = _sane(placed)
    warnings += more
    if rows.is_empty():
        raise ValueError(f"{printable(where)}: of MegatronApp, but no span in it tells its rank, step and time")
    layout = layout_of(rows, where)
    events, steps, implied_only = _events(rows, layout)
    if implied_only:
        warnings.append(
            "communication and the optimizer are not in this file: messages are placed where the schedule implies "
            "them, and a step is counted from its first computation to the moment of the reduction"
        )
    elif merged or len(parts) > 1:
        warnings.append("times of different ranks count from the begin of each rank's own iteration")
    if layout.topology is None:
        warnings.append("the ranks' numbers do not fit their places in the layout, which is taken as unknown")
    return Trace(
        events=pl.concat([events, steps]),
        ranks={
            rank: RankInfo(
                rank,
                device="cuda",
                clock="job" if implied_only else f"rank {rank}",
                coordinates=layout.coordinates(rank),
            )
            for rank in layout.ranks["rank"]
        },
        world_size=layout.world_size,
        run_id=files[0].stem if merged else files[0].parent.name,
        topology=layout.topology,
        groups=layout.groups,
        sources=tuple(str(part.path) for part in parts),
        warnings=tuple(warnings),
        matching="exact" if implied_only else "order",
        aligned=implied_only,
    )


def _parts(files: Sequence[Path]) -> tuple[list[Rows], list[str]]:
    """What is read: the ranks' own files, or else the one merged file; and warnings."""
    parts: list[Rows] = []
    warnings: list[str] = []
    for file in files:
        try:
            part = read_rows(file)
        except ValueError as error:
            warnings.append(str(error))
            continue
        if any(part.frame.equals(other.frame) and part.place == other.place for other in parts):
            warnings.append(f"{printable(file)}: a copy of another file here; left out")
        else:
            parts.append(part)
            warnings += part.problems
    if not parts:
        raise ValueError(warnings[0])
    own = [part for part in parts if not part.merged]
    merged = [part for part in parts if part.merged]
    names = ", ".join(printable(part.path.name) for part in merged)
    if own and merged:
        warnings.append(f"merged files are not read, as those of the ranks are here: {names}")
    elif len(merged) > 1:
        raise ValueError(f"{printable(files[0].parent)}: several jobs in one place, name one of their files: {names}")
    return own or merged, warnings


def _by_rank(parts: Sequence[Rows]) -> tuple[pl.DataFrame, list[str]]:
    """Rows of the ranks' own files, on one axis of times, with ``rank, dp, pp, tp``; and warnings."""
    warnings: list[str] = []
    found: dict[tuple[int, int, int], tuple[Rows, pl.DataFrame]] = {}
    for part in parts:
        said = part.frame.select("dp_rk", "pp_rk", "tp_rk").drop_nulls().unique()
        place = (*said.row(0),) if len(said) else part.place
        if place is None:
            name = "benchmark-data-D-pipeline-P-tensor-T.json"
            warnings.append(f"{printable(part.path)}: does not tell its rank; give it the name {name}")
        elif place in found:
            warnings.append(
                f"{printable(part.path)}: of the same rank as {printable(found[place][0].path.name)}; left out"
            )
        else:
            at = [pl.lit(value, pl.Int64).alias(name) for name, value in zip(PLACE, place, strict=True)]
            found[place] = (part, part.frame.with_columns(at))
    if not found:
        raise ValueError(warnings[0])
    before = _begins([part.iterations for part, _ in found.values()])
    rows = pl.concat([frame for _, frame in found.values()]).join(before, on="iteration", how="left")
    sizes = {name: max(place[k] for place in found) + 1 for k, name in enumerate(PLACE)}
    number = pl.col("tp") + sizes["tp"] * (pl.col("dp") + sizes["dp"] * pl.col("pp"))
    rank = pl.coalesce(pl.col("g_rk").max().over(*PLACE), number)
    return rows.with_columns(
        rank=rank, start=pl.col("start") + pl.col("begin"), end=pl.col("end") + pl.col("begin")
    ), warnings


def _begins(iterations: Sequence[Sequence[tuple[float, float]]]) -> pl.DataFrame:
    """When each iteration begins, on one axis: after the longest of any rank before it."""
    time, begins = 0.0, list[float]()
    for number in range(max(map(len, iterations), default=0)):
        of_ranks = [each[number] for each in iterations if number < len(each)]
        time += max(0.0, *(before for before, _ in of_ranks))
        begins.append(time)
        time += max(0.0, *(length for _, length in of_ranks))
    numbers = pl.Series(range(len(begins)), dtype=pl.Int64)
    return pl.DataFrame({"iteration": numbers, "begin": pl.Series(begins, dtype=pl.Float64)})


def _sane(rows: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Rows that tell when and in which step they were, in whole nanoseconds and the names of an event table."""
    known = rows.filter(pl.all_horizontal(pl.col(name).is_not_null() for name in ("start", "end", "iteration")))
    placed = pl.all_horizontal(pl.col(name).abs() < MOST_TIME_NS for name in ("start", "end"))  # false for NaN
    known = known.filter((pl.col("iteration") >= 0) & placed)
    warnings: list[str] = []
    if lost := len(rows) - len(known):
        warnings.append(f"{lost} of {len(rows)} spans do not tell their time or iteration; left out")
    if negative := known.filter(pl.col("end") < pl.col("start")).height:
        warnings.append(f"{negative} events end before they begin; their duration is taken as 0")
    whole = [
        pl.col("start").round().cast(pl.Int64),
        pl.max_horizontal("start", "end").alias("end").round().cast(pl.Int64),
    ]
    known = known.with_columns(whole)
    return known.rename({"iteration": "step", "model_chunk": "chunk", "data": "bytes"}), warnings


def _events(rows: pl.DataFrame, layout: Layout) -> tuple[pl.DataFrame, pl.DataFrame, bool]:
    """Events, steps, and whether communication is only implied."""
    moments = rows.filter(pl.col("name").is_in(_MOMENTS))
    spans = _mapped(rows.filter(~pl.col("name").is_in([*_MOMENTS, ITERATION])), layout)
    communicates = spans["kind"].is_in([kind.value for kind in COMM_KINDS]).any()
    if communicates or moments.is_empty():
        return event_table(spans), _steps(rows, by_rank=True), False
    numbered = pl.col("microbatch").is_not_null() & pl.col("chunk").is_not_null()
    work = spans.filter(pl.col("kind").is_in([Kind.FORWARD.value, Kind.BACKWARD.value]) & numbered)
    found = [spans, implied.messages(work, layout), implied.reductions(work, moments, layout)]
    reduced = moments.filter(pl.col("name") == REDUCE)
    worked = pl.concat([part.select("rank", "step", "start", "end") for part in (work, reduced)])
    return pl.concat(map(event_table, found)), _steps(worked, by_rank=False), True


def _mapped(spans: pl.DataFrame, layout: Layout) -> pl.DataFrame:
    """Spans as events; an exchange is a send and a receive."""
    known: list[dict[str, Any]] = [
        {"name": name, "kind": op.kind.value, "op": op.op, "which": op.group, "towards": op.towards, "tag": op.tag}
        for name, ops in _OPS.items()
        for op in ops
    ]
    what = pl.DataFrame(known, schema_overrides={"tag": pl.Int64})
    events = spans.join(what, on="name", how="left", maintain_order="left")
    events = events.join(layout.member, on=["rank", "which"], how="left", maintain_order="left")
    peers = layout.ranks.select("dp", "tp", other="pp", peer="rank")
    stages = int(layout.ranks["pp"].max() or 0) + 1  # type: ignore[arg-type]
    other = pl.when(pl.col("which") == "pp").then((pl.col("pp") + pl.col("towards")) % stages)
    events = events.with_columns(other=other).join(peers, on=["dp", "tp", "other"], how="left", maintain_order="left")
    is_send, is_receive = (pl.col("kind") == kind.value for kind in (Kind.SEND, Kind.RECV))
    communicates = pl.col("kind").is_in([kind.value for kind in COMM_KINDS]).fill_null(False)
    same = ["rank", "group", "kind", "op", "peer", "tag"]
    events = events.sort("start").with_columns(
        kind=pl.col("kind").fill_null(Kind.USER.value),
        stream=pl.when(pl.col("kind").is_null()).then(pl.lit(STREAM_HOST)).otherwise(pl.lit(STREAM_COMPUTE)),
        ready="start",
        layer=pl.col("name").str.extract(_LAYER).cast(pl.Int32, strict=False),
        seq=pl.when(communicates).then(pl.int_range(pl.len()).over(same)),
        src=pl.when(is_send).then("rank").when(is_receive).then("peer"),
        dst=pl.when(is_send).then("peer").when(is_receive).then("rank"),
    )
    return events


def _steps(rows: pl.DataFrame, by_rank: bool) -> pl.DataFrame:
    """A step a rank and iteration, from the first to the last of ``rows``: of the rank, or of all ranks."""
    spans = rows.group_by("rank", "step").agg(pl.col("start").min(), pl.col("end").max())
    if not by_rank:
        spans = spans.with_columns(pl.col("start").min().over("step"), pl.col("end").max().over("step"))
    spans = spans.sort("rank", "step").with_columns(
        ready="start", kind=pl.lit(Kind.HOST.value), name=pl.lit(NAME_STEP), stream=pl.lit(STREAM_HOST)
    )
    return event_table(spans)
