"""Forwards and backwards apart under stock Megatron-Core, on a GPU that they share: what is learnt is what ordinary
training on Megatron-Core's own schedule learns there."""

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


def train(folder: Path, world: int, *cases: str) -> dict[str, list[dict[str, Any]]]:
    """Of each case what each process has; fails with the job's output if that does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", "29641"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.megatron_fbd", str(folder), *cases],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    found = {
        case: [json.loads(Path(folder, f"{case}-{process}.json").read_text()) for process in range(world)]
        for case in cases
    }
    for case, processes in found.items():
        losses = processes[0]["losses"]
        assert losses[-1] < losses[0], f"{case} learns nothing"
    return found


def test_equal_degrees_are_ordinary_training_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    for case, found in train(tmp_path, 2, "ship", "ship-bf16", "recompute-bf16", "selective").items():
        assert found[0]["difference"] == 0.0, case


def test_forwards_at_a_smaller_degree_differ_in_the_last_bits(tmp_path: Path) -> None:
    """Adam moves a weight by 1e-3 a step, whatever its gradient: where that is near 0, its sign may be another."""
    pytest.importorskip("megatron.core")
    found = train(tmp_path, 3, "narrow", "narrow-swiglu-gqa", "narrow-selective-bf16", "narrow-large-bf16")
    for case in ("narrow", "narrow-swiglu-gqa"):
        assert found[case][0]["difference"] < 1e-4, case
    for case in ("narrow-selective-bf16", "narrow-large-bf16"):
        assert found[case][0]["difference"] < 0.02, case
