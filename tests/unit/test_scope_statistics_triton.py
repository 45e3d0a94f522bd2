"""The Triton kernels for CUDA without a GPU: their arithmetic by Triton's interpreter, and that they compile.

Triton is no dependency of the tests (0.6 GB and more for these alone): what has a CUDA build of PyTorch has it,
elsewhere ``pip install triton`` brings it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(case: str, folder: Path, **environment: str) -> str:
    """What ``case`` printed, in a process of its own: how Triton works is chosen when the kernels are imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: the CUDA kernels of scope are not tested here (pip install triton)")
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.scope_triton_cases", case],
        cwd=ROOT,
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_kernels_agree_with_float64_in_the_interpreter(tmp_path: Path) -> None:
    assert run("interpret", tmp_path, TRITON_INTERPRET="1").count("agrees") == 5


def test_pairs_of_bfloat16_agree_with_float64(tmp_path: Path) -> None:
    assert "pairs agree" in run("packed", tmp_path, TRITON_INTERPRET="1")


def test_attention_maps_agree_with_the_whole_matrix(tmp_path: Path) -> None:
    assert "maps agree" in run("attention", tmp_path, TRITON_INTERPRET="1")


def test_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    assert run("compile", tmp_path).split("\n")[:2] == ["compiled for 80", "compiled for 90"]
