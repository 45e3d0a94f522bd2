"""Tests that need a GPU: skipped, and said so, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No other test may keep the GPU or its host busy."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Skip without CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
