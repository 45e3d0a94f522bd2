"""NVIDIA's Multi-Process Service, for processes that share a GPU at the same time.

A process with a share of the multiprocessors has to look at :mod:`mps_shares` before it measures:
with some shares cuBLAS leaves parts of a product out, and no error (`docs/fbd-running.md`, before the first step).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[dict[str, str]]:
    """The daemon of MPS with directories of its own; what processes need in their environment to use it."""
    if not wanted:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        added = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for directory in added.values():
            Path(directory).mkdir()
        environment = {**os.environ, **added}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True, timeout=20)
        try:
            yield added
        finally:
            control = ["nvidia-cuda-mps-control"]
            with suppress(subprocess.TimeoutExpired):  # a client that hangs keeps it, and is not ours to end
                subprocess.run(control, input="quit -t 5\n", text=True, env=environment, check=False, timeout=30)
