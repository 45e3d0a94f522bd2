"""Forwards and backwards apart on GPUs, which they share where there are no more: exact, on mixed devices, bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(180)


def run_processes(scenario: str, world: int) -> list[dict[str, Any]]:
    """What each process says; fails with the job's output if it does, or if a case of it did."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.fbd_jobs", scenario],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = [json.loads(line.split(" ", 2)[2]) for line in lines]
    assert len(found) == world
    failures = [f"{name}: {one['failed']}" for each in found for name, one in each.items() if one and "failed" in one]
    assert not failures, "\n".join(failures)
    return found


def test_layouts_and_modes_are_ordinary_training_bit_for_bit() -> None:
    for found in run_processes("equal", 4):
        for name, result in found.items():
            if result is not None:
                assert (result["weights"], result["losses"]) == (0.0, 0.0) or result["role"] == "forward", name
                assert result["losses"] == 0.0, name


def test_a_share_of_the_forwards_and_a_mode_that_is_measured() -> None:
    for found in run_processes("shares", 2):
        for name, result in found.items():
            assert result["losses"] == 0.0, name
            assert result["weights"] == 0.0 or result["role"] == "forward", name


def test_streams_that_are_behind_and_memory_that_is_given_back_change_no_bit() -> None:
    for found in run_processes("disturbed", 3):
        for name, result in found.items():
            if result is not None:
                assert result["losses"] == 0.0, name
                assert result["weights"] == 0.0 or result["role"] == "forward", name


def test_forwards_and_backwards_on_devices_of_different_types() -> None:
    both = run_processes("mixed", 2)
    for name in both[0]:
        assert {one[name]["on"] for one in both} == {"cpu", "cuda"}, name
        for result in (one[name] for one in both):
            assert result["losses"] < 1e-4, name
            assert result["weights"] < 1e-4 or result["role"] == "forward", name


def test_memory_does_not_grow_with_the_microbatches_of_a_step() -> None:
    for found in run_processes("held", 2):
        few, many = found["6"], found["48"]
        assert many["peak"] <= few["peak"] + 2 * few["shipment"], found
