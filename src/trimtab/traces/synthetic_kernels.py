"""A synthetic job as a profiler of kernels would have shown it: no layers, no waits, no numbers of communications.

Each span of compute becomes kernels one after the other, whose names and shares of it are the same on all ranks. What
the profiler does not see is taken away, so that scan has to infer it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from trimtab.events import COMM_KINDS, COMPUTE_KINDS, NAME_STEP, NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, Kind
from trimtab.traces.table import COLUMNS, KIND, Trace

PIECES = {
    "forward": ("norm", "qkv_gemm", "attention", "out_gemm", "mlp_up_gemm", "gelu", "mlp_down_gemm"),
    "backward": ("mlp_down_dgrad", "gelu_backward", "mlp_up_wgrad", "attention_backward", "qkv_dgrad", "qkv_wgrad"),
    "optimizer": ("multi_tensor_adam",),
}
"""Kernels of a span; of kinds that are not named here it is one."""
EXTRA = "extra_gemm"
"""Name of the kernels that only some ranks run."""
GAP_NS = 1_000
"""Between two kernels that the device had waiting."""
LAUNCH_NS = 2_000
"""Between two launches."""
DEVICE_LAG_NS = 3_000
"""Between a communication and what waited for it."""


def as_kernels(
    trace: Trace,
    extra: Mapping[int, float] | None = None,
    steps: bool = True,
    shaped: bool = False,
    seed: int = 0,
) -> Trace:
    """``trace`` (of :func:`trimtab.traces.synthetic.generate`) as kernels.

    On the ranks ``extra``, spans are taken to hold that many times the work of others: what is beyond that of others
    becomes :data:`EXTRA` kernels. Without ``steps`` the host's marks of steps are left out, and the optimizer is
    annotated as PyTorch does it. With ``shaped`` a span of twice the usual length has kernels of another shape.
    """
    events = trace.events.with_columns(pl.col("kind").cast(pl.String), pl.col("name", "stream", "op").cast(pl.String))
    spans = _between_collectives(events)
    host = events.filter(~pl.col("kind").is_in([*COMPUTE_KINDS, *COMM_KINDS]))
    host = host.filter(pl.col("name") != NAME_WAIT).with_columns(start=pl.coalesce("ready", "start"))
    host = host.with_columns(end=pl.max_horizontal("start", "end"))
    host = _with_host_steps(host)
    if not steps:
        host = pl.concat([host.filter(pl.col("name") != NAME_STEP), _optimizer_marks(spans)], how="diagonal")
    parts = [
        _kernels(spans, dict(extra or {}), shaped, np.random.default_rng(seed)),
        _communications(events, spans),
        host,
    ]
    table = pl.concat(parts, how="diagonal").drop("event_id").with_row_index("event_id")
    table = table.select(pl.col(name).cast(KIND if name == "kind" else kind) for name, kind in COLUMNS.items())
    infos = {rank: replace(info, coordinates=None) for rank, info in trace.ranks.items()}
    return replace(trace, events=table, ranks=infos, topology=None, matching="order")


def _with_host_steps(host: pl.DataFrame) -> pl.DataFrame:
    """Steps as the host made them: until the next one, whatever its device was at."""
    is_step = pl.col("name") == NAME_STEP
    marks = host.filter(is_step).sort("rank", "start")
    marks = marks.with_columns(end=pl.coalesce(pl.col("start").shift(-1).over("rank"), "end"))
    return pl.concat([host.filter(~is_step), marks])


def _between_collectives(events: pl.DataFrame) -> pl.DataFrame:
    """The spans of compute, cut where a collective within them (of tensor parallelism) stands still for others."""
    spans = events.filter(pl.col("kind").is_in([kind.value for kind in COMPUTE_KINDS])).sort("rank", "start")
    inner = events.filter(
        pl.col("kind").is_in([kind.value for kind in COMM_KINDS]) & (pl.col("stream") == STREAM_COMPUTE)
    )
    inner = inner.select("rank", pl.coalesce("ready", "start").alias("reached"), pl.col("end").alias("over"))
    inner = inner.sort("reached").join_asof(
        spans.select("rank", "start", pl.col("end").alias("until")).sort("start"),
        left_on="reached", right_on="start", by="rank", strategy="backward", check_sortedness=False,
    )  # fmt: skip
    inner = inner.filter(pl.col("over") <= pl.col("until"))
    cut = pl.concat(
        [
            spans.select("rank", "kind", "ready", "start"),
            inner.select("rank", pl.col("over").alias("start")).join_asof(
                spans.select("rank", "kind", "ready", "start"), on="start", by="rank", check_sortedness=False
            ),
        ],
        how="diagonal",
    ).sort("rank", "start")
    ends = pl.concat([spans.select("rank", "end"), inner.select("rank", pl.col("reached").alias("end"))])
    return cut.with_columns(ends.sort("rank", "end")["end"]).filter(pl.col("end") > pl.col("start"))


def _optimizer_marks(spans: pl.DataFrame) -> pl.DataFrame:
    of = spans.filter(pl.col("kind") == Kind.OPTIMIZER.value)
    return of.select(
        "rank",
        pl.lit(Kind.USER.value).alias("kind"),
        pl.lit("Optimizer.step#AdamW.step").alias("name"),
        pl.lit("host").alias("stream"),
        pl.col("ready").alias("start"),
        (pl.col("ready") + 10 * LAUNCH_NS).alias("end"),
    )


def _kernels(spans: pl.DataFrame, extra: dict[int, float], shaped: bool, rng: np.random.Generator) -> pl.DataFrame:
    names = [PIECES.get(kind, (kind,)) for kind in spans["kind"].to_list()]
    factor = np.array([extra.get(rank, 1.0) for rank in spans["rank"].to_list()])
    begin, end = (spans[name].to_numpy().astype(np.float64) for name in ("start", "end"))
    ready = spans["ready"].fill_null(spans["start"]).to_numpy()
    more = factor > 1
    counts = np.array([len(one) for one in names]) + more
    row = np.repeat(np.arange(len(spans)), counts)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    text = np.array(
        [name for one, also in zip(names, more.tolist(), strict=True) for name in (*one, *((EXTRA,) * also))]
    )
    share = (1 + (place % 3)) * np.exp(rng.normal(0, 0.01, len(row)))
    is_extra = text == EXTRA
    share = np.where(is_extra, 0.0, share)
    share /= np.bincount(row, share)[row]
    share = np.where(is_extra, 1 - 1 / factor[row], share / factor[row])
    edges = _cumulative(share, row)
    lag = DEVICE_LAG_NS * (place == 0)
    start = (begin[row] + (end - begin)[row] * (edges - share)).astype(np.int64) + lag
    stop = np.maximum(start + 1, (begin[row] + (end - begin)[row] * edges).astype(np.int64) - GAP_NS)
    usual = spans.select((pl.col("end") - pl.col("start")).median().over("kind")).to_series().to_numpy()
    size = np.rint((end - begin) / usual).astype(np.int64) if shaped else np.zeros(len(spans), np.int64)
    return pl.DataFrame(
        {
            "shape": pl.Series([[one] for one in size[row].tolist()], dtype=pl.List(pl.Int64)),
            "rank": spans["rank"].gather(row),
            "kind": Kind.KERNEL.value,
            "name": text,
            "stream": STREAM_COMPUTE,
            "ready": np.minimum(ready[row] + place * LAUNCH_NS, start),
            "start": start,
            "end": stop,
        }
    )


def _cumulative(share: NDArray[np.float64], row: NDArray[np.int64]) -> NDArray[np.float64]:
    total = np.cumsum(share)
    first = np.r_[True, row[1:] != row[:-1]]
    before = np.maximum.accumulate(np.where(first, np.r_[0.0, total[:-1]], 0.0))
    return total - before


def _communications(events: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """As kernels on a stream of their own, which begin when they are reached, launched after what came before them."""
    comms = events.filter(pl.col("kind").is_in([kind.value for kind in COMM_KINDS]))
    began = pl.max_horizontal(pl.coalesce("ready", "start"), pl.col("start"))
    comms = comms.with_columns(start=pl.min_horizontal(began, "end")).sort("start")
    launched = spans.select("rank", "start", launch=pl.coalesce("ready", "start") + 10 * LAUNCH_NS).sort("start")
    joined = comms.join_asof(launched, on="start", by="rank", strategy="backward", check_sortedness=False)
    return joined.with_columns(
        ready=pl.min_horizontal(pl.coalesce("launch", "start"), "start"),
        stream=pl.lit(STREAM_COMM),
        seq=pl.lit(None, pl.Int64),
        microbatch=pl.lit(None, pl.Int32),
    ).drop("launch")
