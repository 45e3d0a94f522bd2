"""Our schedules in Megatron-Core on a GPU that the stages share: gradients are those of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def _run(folder: Path, ranks: int, chunks: int, *policies: str) -> dict[str, list[dict[str, Any]]]:
    job = ["-m", "tests.gpu.megatron_pipeline", str(folder), str(ranks), str(chunks), *policies]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "29611"]
    done = subprocess.run([*command, *job], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return {p: [torch.load(folder / f"{p}-{rank}.pt", map_location="cpu") for rank in range(ranks)] for p in policies}


@pytest.mark.parametrize(("chunks", "policies"), [(1, ("hint", "auto")), (2, ("static", "auto", "auto+zb-v"))])
def test_stages_that_share_a_gpu(tmp_path: Path, chunks: int, policies: tuple[str, ...]) -> None:
    pytest.importorskip("megatron.core")
    (alone,) = _run(tmp_path, 1, 1, "stock")["stock"]
    for policy, ranks in _run(tmp_path, 2, chunks, *policies).items():
        assert ranks[0]["losses"] or ranks[1]["losses"]
        assert (ranks[0]["losses"] or ranks[1]["losses"]) == pytest.approx(alone["losses"], rel=1e-6), policy
        for step, expected in enumerate(alone["gradients"]):
            found = ranks[0]["gradients"][step] | ranks[1]["gradients"][step]
            assert set(found) == set(expected)
            for name, (gradient, _) in expected.items():
                torch.testing.assert_close(found[name][0], gradient, rtol=1e-4, atol=1e-6, msg=f"{policy} {name}")
