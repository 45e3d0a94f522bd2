"""NVIDIA's Multi-Process Service, for processes that share a GPU at the same time.

A process with a share of the multiprocessors has to look at :func:`wrong_products` of its model before it measures:
with some shares cuBLAS leaves parts of a product out, and no error (`docs/fbd-running.md`, before the first step).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def wrong_products(device: Any, shapes: Iterable[tuple[int, int, int]]) -> list[str]:
    """Products in bf16 of linear layers that are not right on this process's part of ``device``, forwards or backwards:
    a line for each. ``shapes``: rows, outputs and inputs."""
    from trimtab.fbd.execute import products  # torch is not for whoever only starts processes

    return products.wrong_products(device, shapes)


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
