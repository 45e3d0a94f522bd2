"""Pipelines on GPUs, whose stages share one where there are no more: exact, and recorded with the device's times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from tests.gpu.pipeline_jobs import CHUNKS, MICROBATCHES, STEPS

from trimtab.scan.analysis import analyze
from trimtab.traces.read import read

ROOT = Path(__file__).parents[2]
STAGES = 2
pytestmark = pytest.mark.timeout(180)


def run_stages(scenario: str, folder: Path) -> list[dict[str, Any]]:
    """What each stage says; fails with the job's output if it does, or if trimtab complained."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={STAGES}"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.pipeline_jobs", scenario, str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "trimtab:" not in done.stderr, done.stderr[-3000:]
    lines = (line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return [json.loads(text) for _, _, text in sorted(lines, key=lambda words: int(words[1]))]


def test_every_policy_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    for found in run_stages("equal", tmp_path):
        for policy, same in found.items():
            assert same == {"gradients": True, "losses": True}, policy


def test_the_same_bits_when_messages_go_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < STAGES:
        pytest.skip(f"needs {STAGES} GPUs: NCCL refuses two ranks on one")
    for found in run_stages("equal_nccl", tmp_path):
        for policy, same in found.items():
            assert same == {"gradients": True, "losses": True}, policy


def test_actions_messages_and_waits_are_recorded_with_the_devices_times(tmp_path: Path) -> None:
    results = run_stages("recorded", tmp_path)
    trace = read(tmp_path)
    report = analyze(trace).report
    assert report.matching.unmatched == 0
    hops = 2 * (STAGES * CHUNKS - 1 - (CHUNKS - 1)) * MICROBATCHES
    assert report.matching.matched >= hops * report.job.steps
    events = trace.events.with_columns(pl.col("name", "kind", "stream").cast(pl.String))
    assert events["end"].null_count() == 0
    actions = events.filter(pl.col("name").is_in(["F", "B", "W", "BW"]))
    for rank, result in enumerate(results):
        mine = actions.filter(pl.col("rank") == rank)
        forward = mine.filter(pl.col("name") == "F")
        assert len(forward) == CHUNKS * MICROBATCHES * STEPS
        busy = mine.group_by("step").agg((pl.col("end") - pl.col("start")).sum()).sort("step")["end"] / 1e9
        assert all(0 < own <= whole for own, whole in zip(busy[1:], result["seconds"][1:], strict=True))
        ordered = mine.sort("start")
        assert (ordered["start"][1:] >= ordered["end"][:-1] - 1_000).all(), "a stream does one thing at a time"
    _nothing_begins_before_its_message(events)


def _nothing_begins_before_its_message(events: pl.DataFrame) -> None:
    """By the same clock: what an action takes was sent, and has come, before the action begins on the device."""
    received = events.filter((pl.col("kind") == "recv") & (pl.col("step") > 0))
    key = ["rank", "step", "chunk", "microbatch"]
    taking = events.filter(pl.col("name").is_in(["F", "B", "BW"])).with_columns(backward=pl.col("name") != "F")
    joined = received.with_columns(backward=pl.col("tag") % 2 == 1).join(
        taking, on=[*key, "backward"], suffix="_action"
    )
    assert len(joined) == len(received)
    assert (joined["start_action"] >= joined["end"] - 100_000).all()
