"""The judged part of a trace as flat numpy arrays: which steps count, and one row per event in them.

Everything after this file works on these arrays; ranks are dense indices 0..R-1 here (``ids`` maps back) and
times are int64 nanoseconds after ``origin``, so that sums and differences are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from trimtab.events import COMM_KINDS, COMPUTE_KINDS, NAME_STEP, NAME_WAIT, STREAM_COMPUTE, Kind
from trimtab.scan.arrays import Bools, Floats, Ints, composite, lookup
from trimtab.topology import Coordinates
from trimtab.traces.table import KIND, Trace

KINDS: tuple[Kind, ...] = tuple(Kind)
CODE: dict[Kind, int] = {kind: code for code, kind in enumerate(KINDS)}
COMM_CODES = tuple(CODE[kind] for kind in COMM_KINDS)


@dataclass(frozen=True, slots=True)
class Steps:
    """The judged steps and when each rank began and ended them (R x S, nanoseconds after the origin)."""

    numbers: Ints
    begin: Ints
    end: Ints

    @property
    def count(self) -> int:
        """Number of judged steps."""
        return len(self.numbers)

    def mean_seconds(self) -> float:
        """Mean step time over ranks and steps."""
        return float((self.end - self.begin).mean() / 1e9)


@dataclass(frozen=True, slots=True)
class Table:
    """Events of the judged steps, one array a column; -1 stands for unknown in integer columns."""

    ids: Ints
    """Global rank of each dense rank index."""
    origin: int
    steps: Steps
    rank: Ints
    step: Ints
    """Index into ``steps.numbers``."""
    kind: Ints
    name: Ints
    in_place: Bools
    """On the compute stream."""
    is_wait: Bools
    ready: Ints
    start: Ints
    end: Ints
    cpu: Ints
    microbatch: Ints
    chunk: Ints
    layer: Ints
    group: Ints
    seq: Ints
    op: Ints
    bytes: Ints
    src: Ints
    dst: Ints
    tag: Ints
    event: Ints
    correlation: Ints
    names: tuple[str, ...]
    groups: tuple[str, ...]
    ops: tuple[str, ...]
    coordinates: tuple[Coordinates | None, ...]
    synchronous_device: Bools
    """Per rank: the host is the device (a CPU), so that a pause of the host is a pause of the device."""
    transfers_on_host: bool
    """Communication takes the ranks' own processor time (gloo), and stretches where they share cores unevenly."""

    @property
    def ranks(self) -> int:
        """Number of ranks present."""
        return len(self.ids)

    @property
    def is_comm(self) -> Bools:
        """Rows that are communications."""
        return np.isin(self.kind, COMM_CODES)

    def shifted(self, offset: Floats, drift: Floats) -> Table:
        """The table on aligned clocks: time t of rank r becomes t - offset[r] - drift[r] * t (ns)."""

        def apply(times: Ints, rank: Ints) -> Ints:
            return times - np.rint(offset[rank] + drift[rank] * times).astype(np.int64)

        by_rank = np.arange(self.ranks)[:, None].repeat(max(1, self.steps.count), axis=1)
        steps = replace(
            self.steps,
            begin=apply(self.steps.begin, by_rank[:, : self.steps.count]),
            end=apply(self.steps.end, by_rank[:, : self.steps.count]),
        )
        return replace(
            self,
            steps=steps,
            ready=apply(self.ready, self.rank),
            start=apply(self.start, self.rank),
            end=apply(self.end, self.rank),
        )


def build(trace: Trace, warmup: int) -> tuple[Table, list[str]]:
    """Select the judged steps of ``trace`` and flatten them; the second value holds warnings.

    Judged are steps that every present rank recorded whole, less ``warmup`` first ones as long as three stay.
    Raises ValueError when no step is left.
    """
    ids = np.array(sorted(trace.ranks), dtype=np.int64)
    events, warnings = _sane(trace.events)
    texts = {column: _encode(events[column]) for column in ("name", "group", "op")}
    origin = int(events.select(pl.col("start").min()).item() or 0) if events.height else 0
    steps, more = _judged_steps(events, ids, origin, warmup)
    warnings += more
    columns = _columns(events, texts, ids, origin)
    columns["step"] = _step_of(columns, steps, len(ids))
    keep = (columns["step"] >= 0) & ~columns.pop("is_step")
    columns = {key: value[keep] for key, value in columns.items()}
    infos = [trace.ranks[int(rank)] for rank in ids]
    table = Table(
        ids=ids,
        origin=origin,
        steps=steps,
        names=texts["name"].values,
        groups=texts["group"].values,
        ops=texts["op"].values,
        coordinates=tuple(info.coordinates for info in infos),
        synchronous_device=np.array([info.device == "cpu" for info in infos]),
        transfers_on_host=any(info.device != "cuda" for info in infos),
        **columns,
    )
    return table, warnings


def _sane(events: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Without events that end before they start (a clock that jumped) or have no times."""
    good = events.filter(
        (pl.col("end") >= pl.col("start")) & (pl.col("ready").is_null() | (pl.col("ready") <= pl.col("end")))
    )
    lost = events.height - good.height
    if not lost:
        return good, []
    ranks = sorted(events.join(good, on=["rank", "event_id"], how="anti")["rank"].unique().to_list())
    return good, [f"{lost} events on ranks {_some(ranks)} end before they start (a clock that jumped?); left out"]


def _some(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return f"{shown}, ... ({len(ranks)})" if len(ranks) > most else shown


def _judged_steps(events: pl.DataFrame, ids: Ints, origin: int, warmup: int) -> tuple[Steps, list[str]]:
    marks = events.filter((pl.col("kind") == Kind.HOST.value) & (pl.col("name").cast(pl.String) == NAME_STEP))
    spans = marks.select("rank", "step", "start", "end") if marks.height else _steps_from_events(events)
    if not spans.height:
        raise ValueError("the trace holds no training step: nothing can be judged; record at least three steps")
    spans = _last_one_closed(spans.unique(["rank", "step"], keep="first"), events).sort("rank", "step")
    whole = spans.group_by("step").agg(pl.len().alias("n")).filter(pl.col("n") == len(ids))["step"].sort()
    warnings = []
    lost = spans["step"].n_unique() - len(whole)
    if lost:
        warnings.append(f"{lost} steps were not recorded by every rank; they are left out")
    if not len(whole):
        raise ValueError("no step was recorded by every rank: nothing can be compared; record the same steps on all")
    skip = min(warmup, max(0, len(whole) - 3))
    numbers = whole.to_numpy()[skip:].astype(np.int64)
    chosen = spans.filter(pl.col("step").is_in(numbers.tolist()))
    shape = (len(ids), len(numbers))
    begin = chosen["start"].to_numpy().astype(np.int64).reshape(shape) - origin
    end = chosen["end"].to_numpy().astype(np.int64).reshape(shape) - origin
    jumped = (np.diff(begin, axis=1) < 0).any(axis=1)
    if jumped.any():
        warnings.append(f"step times of ranks {_some(ids[jumped].tolist())} run backwards: the clock jumped")
    return Steps(numbers, begin, end), warnings


def _last_one_closed(spans: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """The last step lasts until the recorder stops; what the script did after its last work is no part of it."""
    last = spans["step"].max()
    work = events.filter((pl.col("step") == last) & pl.col("kind").cast(pl.String).is_in([*COMPUTE_KINDS, *COMM_KINDS]))
    ends = work.group_by("rank").agg(pl.col("end").max().alias("worked"))
    closed = pl.when(pl.col("step") == last).then(pl.min_horizontal("end", "worked")).otherwise(pl.col("end"))
    return spans.join(ends, on="rank", how="left").with_columns(closed.alias("end")).drop("worked")


def _steps_from_events(events: pl.DataFrame) -> pl.DataFrame:
    """Step spans of traces that carry step numbers but no step events."""
    return (
        events.filter(pl.col("step").is_not_null() & (pl.col("step") >= 0))
        .group_by("rank", "step")
        .agg(pl.min_horizontal(pl.col("start").min(), pl.col("ready").min()).alias("start"), pl.col("end").max())
    )


@dataclass(frozen=True, slots=True)
class _Texts:
    codes: Ints
    values: tuple[str, ...]

    def code(self, text: str) -> int:
        return self.values.index(text) if text in self.values else -2


def _encode(column: pl.Series) -> _Texts:
    values = column.unique().cast(pl.String).drop_nulls().sort().to_list()
    codes = column.cast(pl.String).cast(pl.Enum(values)).to_physical().cast(pl.Int64).fill_null(-1)
    return _Texts(codes.to_numpy(), tuple(values))


def _columns(events: pl.DataFrame, texts: dict[str, _Texts], ids: Ints, origin: int) -> dict[str, Any]:
    def integers(name: str) -> Ints:
        return events[name].cast(pl.Int64).fill_null(-1).to_numpy()

    ready = events["ready"].fill_null(events["start"]).to_numpy().astype(np.int64) - origin
    kind = events["kind"].cast(KIND).to_physical().cast(pl.Int64).to_numpy()
    host = kind == CODE[Kind.HOST]
    name = texts["name"]
    return {
        "rank": lookup(ids, integers("rank")),
        "kind": kind,
        "name": name.codes,
        "in_place": (events["stream"].cast(pl.String) == STREAM_COMPUTE).fill_null(False).to_numpy(),
        "is_wait": host & (name.codes == name.code(NAME_WAIT)),
        "is_step": host & (name.codes == name.code(NAME_STEP)),
        "ready": ready,
        "start": integers("start") - origin,
        "end": integers("end") - origin,
        "cpu": integers("cpu_ns"),
        "microbatch": integers("microbatch"),
        "chunk": integers("chunk"),
        "layer": integers("layer"),
        "group": texts["group"].codes,
        "seq": integers("seq"),
        "op": texts["op"].codes,
        "bytes": integers("bytes"),
        "src": integers("src"),
        "dst": integers("dst"),
        "tag": integers("tag"),
        "event": integers("event_id"),
        "correlation": integers("correlation_id"),
    }


def _step_of(columns: dict[str, Any], steps: Steps, ranks: int) -> Ints:
    """Index of the judged step in which each event begins, -1 outside."""
    moment = np.where(np.isin(columns["kind"], COMM_CODES), columns["ready"], columns["start"])
    marks = composite(np.repeat(np.arange(ranks), steps.count), steps.begin.ravel())
    at = np.searchsorted(marks, composite(columns["rank"], moment), side="right") - 1
    inside = (at >= 0) & (at // max(1, steps.count) == columns["rank"])
    at = np.where(inside, at, 0)
    inside &= moment < steps.end.ravel()[at]
    return np.where(inside, at % max(1, steps.count), -1)
