"""What cuBLAS leaves unwritten with a share of a GPU's multiprocessors is seen before it is trained with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from mps import multi_process_service

SCRIPT = """
import json, torch
from trimtab.fbd.execute.products import unwritten
layer = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
out = torch.full((4096, 4096), torch.nan, device="cuda", dtype=torch.bfloat16)
torch.mm(torch.ones_like(out), layer.weight.t(), out=out)
print(json.dumps([int(out.isnan().sum()), unwritten(layer, [torch.zeros(1, 4096, dtype=torch.long)])]))
"""


@pytest.mark.timeout(150)
def test_products_that_are_not_whole_are_refused() -> None:
    """With 65 % on an H200 and cuBLAS 13.1 each product is not; other shares, devices and versions may differ."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("needs the daemon of NVIDIA's Multi-Process Service")
    with multi_process_service(True) as added:
        for percent in ("100", "65", "50"):
            environment = {**os.environ, **added, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent}
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr[-3000:]
            left, said = json.loads(done.stdout.splitlines()[-1])
            assert left == 0 or "not written" in said, percent
            assert percent != "100" or (left, said) == (0, "")
