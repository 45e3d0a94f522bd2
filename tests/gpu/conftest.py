"""Tests that need a GPU: skipped, and said so, where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip without CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
