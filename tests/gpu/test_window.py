"""A profiler window on a real GPU: every kernel finds the span that launched it, also from autograd's threads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

import trimtab  # noqa: E402
from trimtab.traces.read import read  # noqa: E402
from trimtab.traces.window_kernels import find_windows, read_window  # noqa: E402

LAYERS, STEPS = 4, 3
CLOCK_ERROR_NS = 100_000


def train(folder: Path) -> None:
    """A few layers, in whose forward and backward almost every kernel is a layer's."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(LAYERS)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    window = {"steps": STEPS, "start": 3, "every": 8}
    with trimtab.attach(engine={"name": "torch"}, record={"dir": str(folder), "window": window}) as session:
        session.watch(model)
        for step in range(16):
            session.step()
            loss = model(torch.full((512, 2048), float(step), device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()


def test_kernels_lie_in_the_spans_that_launched_them(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    train(tmp_path)
    trace = read(tmp_path)
    windows = [read_window(path, trace) for path in find_windows(tmp_path)]
    assert [(window.first, window.last) for window in windows] == [(3, 5), (11, 13)]
    record_property("lag_us", [window.lag_us for window in windows])
    told = trace.events.filter(pl.col("name").cast(pl.String) == "window")
    record_property(
        "window",
        [
            (json.loads(args)["part"], end - start)
            for args, start, end in told.select("args", "start", "end").iter_rows()
        ],
    )
    spans = trace.events.select("event_id", "kind", "layer", began="start", ended="end", span_step="step")
    for window in windows:
        kernels = window.events.with_columns(pl.col("name", "stream").cast(pl.String))
        assert kernels["stream"].str.starts_with("gpu stream").all()
        joined = kernels.drop("kind", "layer").join(spans, left_on="correlation_id", right_on="event_id", how="left")
        owned = joined.filter(pl.col("kind").is_not_null())
        assert (owned["step"] == owned["span_step"]).all()
        for kind in ("forward", "backward"):
            layers = owned.filter(pl.col("kind") == kind)
            assert set(layers["layer"]) == set(range(LAYERS))
            assert layers["name"].str.contains("(?i)gemm|cutlass|xmma|cublas").sum() >= LAYERS * STEPS
        inside = (owned["start"] > owned["began"] - CLOCK_ERROR_NS) & (owned["end"] < owned["ended"] + CLOCK_ERROR_NS)
        record_property("inside", f"{inside.sum()} of {len(inside)}")
        assert inside.sum() > 0.9 * len(inside), "device times of the recorder's events and of CUPTI agree"
