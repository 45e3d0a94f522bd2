"""Read ByteDance's what-if traces: one Parquet file of a job, as StragglerAnalysis takes them.

The format: github.com/ByteDance-Seed/StragglerAnalysis, and Lin et al., "Understanding Stragglers in Large Model
Training Using What-if Analysis" (OSDI 2025). One row an operation of one worker; a worker is the first rank of a tensor
parallel group. Times count from the begin of their step, on one clock; what lies between two steps is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.events import NAME_STEP, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.topology import Topology
from trimtab.traces.formats.bytedance.messages import MESSAGES, number_messages
from trimtab.traces.formats.bytedance.overlap import place
from trimtab.traces.formats.heads import Head
from trimtab.traces.formats.tables import NS_PER_S, event_table, whole_times
from trimtab.traces.own_header import MAX_WORLD, printable, rank_list
from trimtab.traces.table import RankInfo, Trace

_MAGIC: Final = b"PAR1"
_INTEGERS: Final = ("dp_rank", "stage", "rank", "step", "seq_id", "mc", "mb_id", "gmc")
_TIMES: Final = ("start_ts", "duration")
_NEEDED: Final = (*_INTEGERS, *_TIMES, "optype")
_MOST_ROWS: Final = 400_000_000
_MOST_NUMBER: Final = 1 << 30
"""Of steps and sequence numbers; more is damage."""
_DAMAGED: Final = (pa.ArrowException, OSError, EOFError, MemoryError)


@dataclass(frozen=True, slots=True)
class _Op:
    """What an ``optype`` is in an event table."""

    kind: Kind
    op: str | None = None
    group: str | None = None
    """Which ranks take part: of the worker's ``tp``, ``dp`` or ``pp`` group, those with an embedding, or all."""


_OPS: Final = {
    "forward-compute": _Op(Kind.FORWARD),
    "backward-compute": _Op(Kind.BACKWARD),
    "optimizer": _Op(Kind.OPTIMIZER),
    "gc": _Op(Kind.GC),
    "params-all-gather": _Op(Kind.COLLECTIVE, "all_gather", "dp"),
    "grads-reduce-scatter": _Op(Kind.COLLECTIVE, "reduce_scatter", "dp"),
    "separate-grads-all-reduce": _Op(Kind.COLLECTIVE, "all_reduce", "dp"),
    "layernorm-grads-all-reduce": _Op(Kind.COLLECTIVE, "all_reduce", "tp"),
    "embedding-grads-all-reduce": _Op(Kind.COLLECTIVE, "all_reduce", "embd"),
    # Clips by the norm of all gradients, for which every worker of the job waits.
    "optimizer-clip-main-grad": _Op(Kind.COLLECTIVE, "all_reduce", "world"),
    **{name: _Op(message.kind, None, "pp") for name, message in MESSAGES.items()},
}


def recognizes(head: Head) -> bool:
    """Whether it is Parquet with the format's columns, or Parquet that is too damaged to tell."""
    if not head.data.startswith(_MAGIC):
        return False
    try:
        return set(_NEEDED) <= set(pq.read_schema(head.path).names)
    except _DAMAGED:
        return True


def read(files: Sequence[Path]) -> Trace:
    """The job in ``files``: one file, or several with other ranks or steps of it each."""
    rows, sources, warnings = _rows(files)
    rows, more = _sane(rows)
    warnings += more
    workers = rows.select("rank", "dp_rank", "stage").unique().sort("rank")
    topology = _topology(workers, vpp=int(rows["mc"].max() or 0) + 1)  # type: ignore[arg-type]
    if topology is None:
        warnings.append("the ranks' numbers do not fit their places in the layout, which is taken as unknown")
    groups, member = _groups(workers, topology)
    rows, steps = _on_one_axis(rows)
    known = rows.filter(pl.col("optype").is_in(list(_OPS)))
    if strange := sorted(set(rows["optype"].unique()) - set(_OPS)):
        warnings.append(f"operations of unknown types are left out: {printable(', '.join(strange))}")
    events, more = _events(known, member, workers)
    warnings += more
    ranks = workers["rank"].to_list()
    world_size = topology.world_size if topology else max(ranks) + 1
    if topology and topology.tp > 1:
        warnings.append(f"only the first rank of each tensor parallel group of {topology.tp} is in the file")
    warnings.append("sizes of communications and the time between steps are not in this format")
    return Trace(
        events=pl.concat([events, event_table(steps)]),
        ranks={
            rank: RankInfo(
                rank, device="cuda", clock="job", coordinates=topology.coordinates(rank) if topology else None
            )
            for rank in ranks
        },
        world_size=world_size,
        run_id=sources[0].stem,
        topology=topology,
        groups=groups,
        sources=tuple(map(str, sources)),
        warnings=tuple(warnings),
        aligned=True,
    )


def _rows(files: Sequence[Path]) -> tuple[pl.DataFrame, list[Path], list[str]]:
    """Rows of all files, those that were read, warnings."""
    problems: list[str] = []
    parts: dict[Path, pl.DataFrame] = {}
    for file in files:
        try:
            part = _read_file(file)
        except ValueError as error:
            problems.append(f"{printable(file)}: {error}")
            continue
        if any(part.equals(other) for other in parts.values()):
            problems.append(f"{printable(file)}: a copy of another file here; left out")
        else:
            parts[file] = part
    if not parts:
        raise ValueError(problems[0])
    rows = pl.concat([part.with_columns(file=pl.lit(number)) for number, part in enumerate(parts.values())])
    shared = rows.group_by("rank", "step").agg(pl.col("file").n_unique()).filter(pl.col("file") > 1)
    if len(shared):
        names = ", ".join(printable(file.name) for file in parts)
        raise ValueError(f"{printable(files[0].parent)}: several jobs in one place, name one of their files: {names}")
    return rows.drop("file"), list(parts), problems


def _read_file(file: Path) -> pl.DataFrame:
    try:
        with pq.ParquetFile(file) as source:
            count = source.metadata.num_rows
            if not 0 < count <= _MOST_ROWS:
                raise ValueError(f"{count} rows")
            table = source.read(columns=list(_NEEDED))
        types: dict[str, Any] = {name: pa.int64() for name in _INTEGERS} | {name: pa.float64() for name in _TIMES}
        types["optype"] = pa.string()
        columns = [table[name].cast(types[name]) for name in _NEEDED]
        columns[_NEEDED.index("optype")].validate(full=True)  # that it is UTF-8
    except _DAMAGED as error:
        raise ValueError(f"damaged, or of other types than this format's ({printable(error)})") from None
    return pl.DataFrame(pa.table(dict(zip(_NEEDED, columns, strict=True))))


def _sane(rows: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Rows with places and numbers that can be, and each only once."""
    placed = pl.all_horizontal(
        pl.col("rank").is_between(0, MAX_WORLD),
        pl.col("dp_rank").is_between(0, MAX_WORLD),
        pl.col("stage").is_between(0, MAX_WORLD),
        *(pl.col(name).is_between(-1, _MOST_NUMBER) for name in ("step", "seq_id", "mc", "mb_id", "gmc")),
        pl.col("optype").is_not_null(),
    )
    kept = rows.filter(placed.fill_null(False))
    warnings: list[str] = []
    if lost := len(rows) - len(kept):
        warnings.append(f"{lost} of {len(rows)} rows name ranks or steps that cannot be; left out")
    places = kept.group_by("rank").agg(pl.struct("dp_rank", "stage").n_unique().alias("places"))
    wandering = places.filter(pl.col("places") > 1)["rank"].to_list()
    if wandering:
        raise ValueError(f"{rank_list(wandering)}: in several places of the layout; is this more than one job?")
    kept, more = whole_times(kept, pl.col("start_ts"), pl.col("duration"), NS_PER_S)
    once = kept.unique(["rank", "step", "optype", "seq_id"], keep="first", maintain_order=True)
    if copies := len(kept) - len(once):
        warnings.append(f"{copies} operations are here twice; the first of each is read")
    if once.is_empty():
        raise ValueError("a ByteDance what-if trace without a single usable row")
    return once, [*warnings, *more]


def _topology(workers: pl.DataFrame, vpp: int) -> Topology | None:
    """The layout whose ``dp_rank`` and ``stage`` these are; None where the ranks' numbers fit none."""
    dp, pp = (int(workers[name].max()) + 1 for name in ("dp_rank", "stage"))  # type: ignore[arg-type]
    if dp * pp > MAX_WORLD:
        return None
    index = workers["dp_rank"] + dp * workers["stage"]
    tp = int(workers["rank"].max()) // max(1, int(index.max()))  # type: ignore[arg-type]
    if tp < 1 or (workers["rank"] != index * tp).any():
        return None
    return Topology(tp=tp, dp=dp, pp=pp, vpp=max(1, vpp))


def _groups(workers: pl.DataFrame, topology: Topology | None) -> tuple[dict[str, tuple[int, ...]], pl.DataFrame]:
    """Members by group, among the ranks that are recorded; and (rank, which, group)."""
    last = int(workers["stage"].max())  # type: ignore[arg-type]
    members_of = {
        "dp": workers.select("rank", number="stage"),
        "pp": workers.select("rank", number="dp_rank"),
        "embd": workers.filter(pl.col("stage").is_in([0, last])).select("rank", number="dp_rank"),
        "world": workers.select("rank", number=0),
        "tp": workers.select("rank", number=pl.int_range(len(workers), dtype=pl.Int64)),
    }
    parts = [
        members.select("rank", which=pl.lit(which), group=pl.format("{}{}", pl.lit(which), pl.col("number")))
        for which, members in members_of.items()
    ]
    member = pl.concat(parts)
    by_group = member.sort("rank").group_by("group", maintain_order=True).agg("rank")
    groups = {str(name): tuple(ranks) for name, ranks in by_group.iter_rows()}
    if topology and topology.tp > 1:
        of_tp = member.filter(pl.col("which") == "tp")
        groups |= {group: tuple(range(rank, rank + topology.tp)) for rank, _, group in of_tp.iter_rows()}
    return groups, member


def _on_one_axis(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows with their steps one after the other, and the steps as events, the same on every rank."""
    steps = rows.group_by("step").agg(first=pl.col("start").min(), last=pl.col("end").max()).sort("step")
    steps = steps.with_row_index("place").with_columns(length=pl.col("last") - pl.col("first"))
    steps = steps.with_columns(begin=pl.col("length").cum_sum() - pl.col("length"))
    shift = pl.col("begin") - pl.col("first")
    moved = rows.join(steps.select("step", "place", "first", "begin"), on="step", maintain_order="left")
    moved = moved.with_columns(start=pl.col("start") + shift, end=pl.col("end") + shift).drop("first", "begin")
    spans = rows.select("rank", "step").unique().join(steps, on="step").sort("rank", "step")
    return moved, spans.select(
        "rank",
        "step",
        start="begin",
        end=pl.col("begin") + pl.col("length"),
        ready="begin",
        kind=pl.lit(Kind.HOST.value),
        name=pl.lit(NAME_STEP),
        stream=pl.lit(STREAM_HOST),
    )


def _events(rows: pl.DataFrame, member: pl.DataFrame, workers: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """The event table of the operations, and warnings."""
    what = pl.DataFrame(
        [(name, op.kind.value, op.op, op.group) for name, op in _OPS.items()],
        schema={"optype": pl.String, "kind": pl.String, "op": pl.String, "which": pl.String},
        orient="row",
    )
    rows = (
        rows.join(what, on="optype", maintain_order="left")
        .with_row_index("event_id")
        .with_columns(pl.col("event_id").cast(pl.Int64))
    )
    rows = rows.join(member, on=["rank", "which"], how="left", maintain_order="left")
    numbers = rows.select(pl.col("seq_id").max() + 1).item()
    collective = pl.col("kind") == Kind.COLLECTIVE.value
    rows = rows.with_columns(
        seq=pl.when(collective).then(pl.col("place").cast(pl.Int64) * numbers + pl.col("seq_id")),
        name=pl.col("optype"),
        ready=pl.col("start"),
        stream=pl.when(pl.col("kind") == Kind.GC.value).then(pl.lit(STREAM_HOST)).otherwise(pl.lit(STREAM_COMPUTE)),
        microbatch=pl.when(pl.col("mb_id") >= 0).then("mb_id"),
        chunk=pl.when(pl.col("mc") >= 0).then("mc"),
    )
    messages, warnings = number_messages(rows, workers)
    others = rows.filter(~pl.col("optype").is_in(list(MESSAGES)))
    return event_table(place(pl.concat([others, messages], how="diagonal"))), warnings
