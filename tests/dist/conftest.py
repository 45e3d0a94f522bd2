"""Distributed tests: each forks its ranks from this process, which has imported torch and Megatron-Core once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import harness  # noqa: F401  (imports what the ranks need, before any fork)

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked ``dist``."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.dist)
