"""Messages between processes that share the GPUs there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)


def test_a_copy_of_what_has_gaps_is_made_before_it_is_sent() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.gpu.transport_jobs"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert said == ["RESULT 0 0", "RESULT 1 0"]
