"""A profiler window over a real job on two ranks: its operators and the recorder's spans are the same story."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from harness import free_port, load_script, run_ranks

import trimtab
from trimtab.engines import cpu
from trimtab.traces.read import read
from trimtab.traces.table import Trace
from trimtab.traces.window_kernels import find_windows, read_window, with_kernels

FIRST, LAST = 2, 3
COMMUNICATION = ("collective", "send", "recv")
MEGATRON = [
    *("--steps", "5", "--num-layers", "2", "--hidden-size", "16", "--heads", "2", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--data", __file__),
]
CLOCK_ERROR_NS = 200_000
"""By how much the profiler's and the recorder's times may contradict each other."""


def _train(session: Any, steps: int) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.watch(model)
    losses = []
    for step in range(steps):
        session.step()
        loss = model(torch.full((2, 16), float(dist.get_rank() + step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        losses.append(total.item())
    return losses


def _job(rank: int, folder: str) -> list[list[float]]:
    dist.init_process_group("gloo")
    window = {"steps": LAST - FIRST + 1, "start": FIRST, "ranks": "all"}
    losses = []
    for record in ({"enabled": False}, {"dir": folder, "run_id": "job", "window": window}):
        with trimtab.attach(engine={"name": "torch"}, record=record) as session:
            losses.append(_train(session, 6))
            dist.barrier()
    return losses


def _megatron(rank: int, folder: str, arguments: list[str], ports: list[int]) -> list[list[float]]:
    script = load_script("examples/pretrain_gpt.py")
    cpu.install()
    window = {"steps": LAST - FIRST + 1, "start": FIRST, "ranks": "all"}
    losses = []
    records = ({"enabled": False}, {"dir": folder, "run_id": "job", "window": window})
    for port, record in zip(ports, records, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with trimtab.attach(engine={"name": "megatron"}, record=record):
            losses.append(script.main([*MEGATRON, *arguments]))
    return losses


@pytest.mark.parametrize("arguments", [["--tp", "2"], ["--pp", "2"], ["--overlap-grad-reduce"]], ids=" ".join)
def test_operators_of_megatron_belong_to_the_spans_in_which_they_ran(tmp_path: Path, arguments: list[str]) -> None:
    for without, with_window in run_ranks(2, _megatron, str(tmp_path), arguments, [free_port(), free_port()]):
        assert without == with_window
    _check(tmp_path)


def test_operators_belong_to_the_spans_in_which_they_ran(tmp_path: Path) -> None:
    for without, with_window in run_ranks(2, _job, str(tmp_path)):
        assert without == with_window
    _check(tmp_path)


def _check(tmp_path: Path) -> None:
    trace = read(tmp_path)
    assert trace.warnings == ()
    windows = [read_window(path, trace) for path in find_windows(tmp_path)]
    assert [window.rank for window in windows] == [0, 1]
    for path, window in zip(find_windows(tmp_path), windows, strict=True):
        assert (window.first, window.last) == (FIRST, LAST)
        assert set(window.events["step"]) == {FIRST, LAST}
        _check_annotations(path, trace, window.rank)
        _check_operators(window.events, trace, window.rank)
    together = with_kernels(trace, windows).events
    assert len(together) == len(trace.events) + sum(len(window.events) for window in windows)


def _check_annotations(path: Path, trace: Trace, rank: int) -> None:
    """Every communication and span of the window's steps stands in the file exactly once, at the same time."""
    with gzip.open(path) as source:
        content = json.load(source)
    assert content["distributedInfo"]["rank"] == rank
    assert content["distributedInfo"]["world_size"] == 2
    _check_nesting(content["traceEvents"])
    slices = [event for event in content["traceEvents"] if event.get("cat") == "user_annotation"]
    found = [(match, event) for event in slices if (match := re.match(r"trimtab(|-begin|-end):(\d+) ", event["name"]))]
    around = {int(match[2]): event for match, event in found if not match[1]}
    assert len(around) == sum(not match[1] for match, _ in found)
    own = trace.events.filter((pl.col("rank") == rank) & pl.col("step").is_between(FIRST, LAST))
    assert own.filter(pl.col("kind").cast(pl.String).is_in(COMMUNICATION)).height >= 4
    nested = own.filter(pl.col("kind").cast(pl.String).is_in([*COMMUNICATION, "forward", "recompute", "optimizer"]))
    assert sorted(around) == nested["event_id"].sort().to_list()
    offset = content["baseTimeNanoseconds"]
    for event in nested.iter_rows(named=True):
        slice_ = around[event["event_id"]]
        start = offset + slice_["ts"] * 1000
        assert start > event["start"] - CLOCK_ERROR_NS
        if event["kind"] not in COMMUNICATION:  # of which the issue is annotated, not the wait
            assert start + slice_["dur"] * 1000 < event["end"] + CLOCK_ERROR_NS
    backward = own.filter(pl.col("kind") == "backward")["event_id"].sort().to_list()
    for part in ("-begin", "-end"):
        assert sorted(int(match[2]) for match, _ in found if match[1] == part) == backward


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a thread lie within each other or apart, without which viewers drop some."""
    slices = [event for event in events if event.get("ph") == "X" and event["cat"] != "Trace"]
    slices = [event for event in slices if not event["name"].startswith("gloo:")]  # torch's own do not
    slices.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    open_: list[tuple[int, float]] = []
    for event in slices:
        while open_ and (open_[-1][0] != event["tid"] or open_[-1][1] <= event["ts"]):
            open_.pop()
        end = event["ts"] + event["dur"]
        assert not open_ or end <= open_[-1][1] + 0.002, event  # microseconds
        open_.append((event["tid"], end))


def _check_operators(operators: pl.DataFrame, trace: Trace, rank: int) -> None:
    """Each operator lies within the step and the span that it is said to belong to; none that lies in one is missed."""
    own = trace.events.filter(pl.col("rank") == rank)
    steps = own.filter(pl.col("name").cast(pl.String) == "step")
    in_step = operators.join(steps.select("step", began="start", ended="end"), on="step", how="left")
    assert ((in_step["start"] > in_step["began"] - CLOCK_ERROR_NS) & (in_step["end"] < in_step["ended"])).all()
    spans = own.filter(
        pl.col("kind").cast(pl.String).is_in([*COMMUNICATION, "forward", "backward", "recompute", "optimizer"])
    )
    owned = operators.filter(pl.col("correlation_id").is_not_null()).join(
        spans.select("event_id", "kind", span_step="step", began="start", ended="end"),
        left_on="correlation_id",
        right_on="event_id",
        how="left",
    )
    assert owned["kind_right"].null_count() == 0
    assert (owned["step"] == owned["span_step"]).all()
    assert (owned["start"] > owned["began"] - CLOCK_ERROR_NS).all()
    assert (owned["start"] < owned["ended"] + CLOCK_ERROR_NS).all()
    assert set(owned["kind_right"]) >= {"forward", "backward", "optimizer"}
    free = operators.filter(pl.col("correlation_id").is_null())
    layers = spans.filter(pl.col("kind").cast(pl.String).is_in(["forward", "optimizer"]))
    missed = free.join_where(
        layers.select(began="start", ended="end"),
        pl.col("start") > pl.col("began") + CLOCK_ERROR_NS,
        pl.col("end") < pl.col("ended") - CLOCK_ERROR_NS,
    )
    assert missed.is_empty()
