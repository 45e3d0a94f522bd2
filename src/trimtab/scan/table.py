"""The judged part of a trace as flat numpy arrays: which steps count, and one row per event in them.

Everything after this file works on these arrays; ranks are dense indices 0..R-1 here (``ids`` maps back) and
times are int64 nanoseconds after ``origin``, so that sums and differences are exact. Clocks that are hours apart
have origins as far apart; what is left of the difference is for the alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from trimtab.events import COMM_KINDS, COMPUTE_KINDS, NAME_STEP, NAME_WAIT, STREAM_COMPUTE, Kind
from trimtab.scan.arrays import Bools, Floats, Ints, composite, factorize, lookup, reach
from trimtab.scan.kernels.layout import lay_out
from trimtab.scan.profiled import without_profiled
from trimtab.topology import Coordinates
from trimtab.traces.table import KIND, RankInfo, Trace

KINDS: tuple[Kind, ...] = tuple(Kind)
HOURS_OFF_NS = 3_600_000_000_000
"""Clocks of one job that are further apart than this are brought together before anything is compared."""
EARLIEST_NS, LATEST_NS = -(1 << 62), 1 << 62
"""Times beyond are damage; within, differences do not overflow."""
CODE: dict[Kind, int] = {kind: code for code, kind in enumerate(KINDS)}
COMM_CODES = tuple(CODE[kind] for kind in COMM_KINDS)


def is_of(kind: Ints, codes: Sequence[int]) -> Bools:
    """Which of the codes ``kind`` are among ``codes``; -1 is not."""
    chosen = np.zeros(len(KINDS) + 1, dtype=bool)
    chosen[list(codes)] = True
    return chosen[kind]


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
    origin: Ints
    """By dense rank: the Unix time that its times are counted from, equal for ranks of one clock."""
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
    variant: Ints
    """Kernels of one name and shape have the same number; -1 for what is no kernel."""
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
        return is_of(self.kind, COMM_CODES)

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
    events, warnings = _sane(_without_counters(trace.events))
    events, inferred = lay_out(events, trace.ranks, trace.groups)
    warnings += inferred
    spans, profiled = without_profiled(events, _step_spans(events))
    warnings += profiled
    ids = spans["rank"].unique().sort().to_numpy().astype(np.int64)
    idle = sorted(set(trace.ranks) - set(ids.tolist()))
    if idle:
        warnings.append(f"ranks {_some(idle)} recorded no step; they are left out, as if their files were missing")
        events = events.filter(~pl.col("rank").is_in(idle))
    texts = {column: _encode(events[column]) for column in ("name", "group", "op")}
    infos = [trace.ranks[int(rank)] for rank in ids]
    origin, steps, more = _judged_steps(spans, ids, clocks_of(infos), warmup)
    warnings += more
    columns = _columns(events, texts, ids, origin)
    near, more = _within_reach(columns, ids)
    warnings += more
    moment = np.where(is_of(columns["kind"], COMM_CODES), columns["ready"], columns["start"])
    columns["step"] = np.where(near, step_at(steps, columns["rank"], moment), -1)
    keep = (columns["step"] >= 0) & ~columns.pop("is_step")
    if not keep.any():
        raise ValueError("the judged steps hold no event but themselves: nothing can be judged; record layers, too")
    columns = {key: value[keep] for key, value in columns.items()}
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


def _without_counters(events: pl.DataFrame) -> pl.DataFrame:
    """Samples are no work; see :mod:`trimtab.scan.counters`."""
    counted = events["kind"] == Kind.COUNTER.value
    return events.filter(~counted) if counted.any() else events


def _sane(events: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Without events that end before they start (a clock that jumped) or have no times."""
    good = events.filter(
        (pl.col("end") >= pl.col("start"))
        & (pl.col("ready").is_null() | (pl.col("ready") <= pl.col("end")))
        & (pl.min_horizontal("ready", "start") > EARLIEST_NS)
        & (pl.col("end") < LATEST_NS)
    )
    lost = events.height - good.height
    if not lost:
        return good, []
    ranks = sorted(events.join(good, on=["rank", "event_id"], how="anti")["rank"].unique().to_list())
    return good, [f"{lost} events on ranks {_some(ranks)} end before they start (a clock that jumped?); left out"]


def _some(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return f"{shown}, ... ({len(ranks)})" if len(ranks) > most else shown


def clocks_of(infos: Sequence[RankInfo]) -> list[str]:
    """The clock domain of each rank; a rank that names none has one of its own."""
    return [info.clock or f"rank {info.rank}" for info in infos]


def _step_spans(events: pl.DataFrame) -> pl.DataFrame:
    """``rank, step, start, end`` of every step that a rank recorded, by rank and step."""
    marks = events.filter((pl.col("kind") == Kind.HOST.value) & (pl.col("name").cast(pl.String) == NAME_STEP))
    marks = marks.filter(pl.col("step").is_not_null())
    spans = marks.select("rank", "step", "start", "end") if marks.height else _steps_from_events(events)
    if not spans.height:
        raise ValueError(
            "the trace holds no training step: nothing can be judged; record at least three steps "
            "(in plain PyTorch, Session.step() says where one begins; for torch.profiler, its own step())"
        )
    return _last_one_closed(spans.unique(["rank", "step"], keep="first"), events).sort("rank", "step")


def _judged_steps(spans: pl.DataFrame, ids: Ints, clocks: Sequence[str], warmup: int) -> tuple[Ints, Steps, list[str]]:
    """The origin of each rank's times, the steps, warnings."""
    whole = spans.group_by("step").agg(pl.len().alias("n")).filter(pl.col("n") == len(ids))["step"].sort()
    warnings = []
    lost = spans["step"].n_unique() - len(whole)
    if lost:
        warnings.append(f"{lost} steps were not recorded by every rank; they are left out")
    if not len(whole):
        raise ValueError("no step was recorded by every rank: nothing can be compared; record the same steps on all")
    numbers = whole.to_numpy().astype(np.int64)
    chosen = spans.filter(pl.col("step").is_in(numbers.tolist()))
    shape = (len(ids), len(numbers))
    begin, end = (chosen[name].to_numpy().astype(np.int64).reshape(shape) for name in ("start", "end"))
    origin, more = _origins(begin, clocks)
    warnings += more
    begin, end = begin - origin[:, None], end - origin[:, None]
    near = ((np.abs(begin) < _limit(ids)) & (np.abs(end) < _limit(ids))).all(axis=0)
    if not near.all():
        warnings.append(f"{(~near).sum()} steps lie too far from the others in time to be judged with them; left out")
    if not near.any():
        raise ValueError("the ranks' times have nothing in common: nothing can be compared; are these of one run?")
    skip = min(warmup, max(0, int(near.sum()) - 3))
    numbers, begin, end = numbers[near][skip:], begin[:, near][:, skip:], end[:, near][:, skip:]
    jumped = (np.diff(begin, axis=1) < 0).any(axis=1)
    if jumped.any():
        warnings.append(f"step times of ranks {_some(ids[jumped].tolist())} run backwards: the clock jumped")
    return origin, Steps(numbers, begin, end), warnings


def _origins(begin: Ints, clocks: Sequence[str]) -> tuple[Ints, list[str]]:
    """The middle of the run for each rank, by its own clock if that is hours off, and who that is.

    Medians are lower ones: an integer that was there is exact, a mean of two is not, and two halves of a run with a
    jump between them have no middle.
    """
    names = sorted(set(clocks))
    of_rank = np.array([names.index(name) for name in clocks])
    by_clock = np.stack([_low_median(begin[of_rank == clock]) for clock in range(len(names))])
    common = _low_median(by_clock)
    ahead = np.array([_low_median(own - common) for own in by_clock])
    ahead[np.abs(ahead) < HOURS_OFF_NS] = 0
    warnings = [
        f"the clock of {names[clock]!r} is {ahead[clock] / 3.6e12:+,.0f} hours off; its times were moved"
        for clock in np.flatnonzero(ahead)
    ]
    return np.asarray(_low_median(common) + ahead[of_rank], dtype=np.int64), warnings


def _low_median(values: Ints) -> Any:
    """Median over the first axis; of an even number the lower one of the two in the middle."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def _limit(ids: Ints) -> int:
    """Times as far as this from the origin are judged; clocks that are aligned later move them a little."""
    return reach(len(ids)) // 4 * 3


def _within_reach(columns: dict[str, Any], ids: Ints) -> tuple[Bools, list[str]]:
    """Which events can be placed, and a warning of those that would lie in the run if their times made sense."""
    inside = [np.abs(columns[name]) < _limit(ids) for name in ("ready", "start", "end")]
    near = np.logical_and.reduce(inside)
    strange = np.logical_or.reduce(inside) & ~near
    if not strange.any():
        return near, []
    ranks = _some(ids[np.unique(columns["rank"][strange])].tolist())
    return near, [f"{strange.sum()} events on ranks {ranks} last longer than any run; left out"]


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


def _columns(events: pl.DataFrame, texts: dict[str, _Texts], ids: Ints, origins: Ints) -> dict[str, Any]:
    def integers(name: str) -> Ints:
        return events[name].cast(pl.Int64).fill_null(-1).to_numpy()

    rank = lookup(ids, integers("rank"))
    origin = origins[rank]
    ready = events["ready"].fill_null(events["start"]).to_numpy().astype(np.int64) - origin
    kind = events["kind"].cast(KIND).to_physical().cast(pl.Int64).to_numpy()
    host = kind == CODE[Kind.HOST]
    name = texts["name"]
    return {
        "rank": rank,
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
        "variant": _variants(events, kind, name.codes),
    }


def _variants(events: pl.DataFrame, kind: Ints, name: Ints) -> Ints:
    """Numbers of the kernels' (name, shape)."""
    out = np.full(len(events), -1)
    kernels = np.flatnonzero(kind == CODE[Kind.KERNEL])
    if len(kernels):
        size = np.zeros(len(kernels), dtype=np.int64)
        if "shape" in events.columns and events["shape"].null_count() < len(events):
            size = events["shape"].gather(kernels).rank("dense").fill_null(0).to_numpy().astype(np.int64)
        out[kernels], _ = factorize(name[kernels], size)
    return out


def step_at(steps: Steps, rank: Ints, moment: Ints) -> Ints:
    """Index of the judged step in which each moment of a (dense) rank lies, by that rank's clock; -1 outside."""
    ranks, count = steps.begin.shape
    marks = composite(np.repeat(np.arange(ranks), count), steps.begin.ravel(), ranks)
    at = np.searchsorted(marks, composite(rank, moment, ranks), side="right") - 1
    inside = (at >= 0) & (at // max(1, count) == rank)
    at = np.where(inside, at, 0)
    inside &= moment < steps.end.ravel()[at]
    return np.where(inside, at % max(1, count), -1)
