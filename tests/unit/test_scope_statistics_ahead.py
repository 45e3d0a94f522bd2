"""Kernels are compiled ahead by one of the processes that share a cache, and none of them fails for it."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest
import torch

from trimtab.scope.device import ahead, cuda
from trimtab.scope.device.attention.fused import Shape

pytestmark = pytest.mark.timeout(60)
GPU = torch.device("cuda", 0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What was to be compiled, on a machine that seems to have Triton and a card."""
    found: list[list[str]] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ahead, "_version", lambda: "v")
    monkeypatch.setattr(ahead, "_run", found.append)
    cuda.readiness.cache_clear()
    return found


def test_each_kernel_once_and_not_what_is_there(said: list[list[str]]) -> None:
    for histogram in (False, True, False):
        ahead.compile_ahead(GPU, torch.bfloat16, histogram)
    assert said == [["90", "statistics", "bfloat16", "0"], ["90", "statistics", "bfloat16", "1"]]
    cuda.readiness(GPU, torch.float16, False).compiled = True
    ahead.compile_ahead(GPU, torch.float16, False)
    ahead.compile_ahead(GPU, torch.float64, False)  # no kernel
    assert len(said) == 2


def test_maps_of_a_shape_too(said: list[list[str]]) -> None:
    for _ in range(2):
        ahead.compile_maps_ahead(Shape(GPU, torch.bfloat16, False, 64, 32, 128, True))
    assert said == [["90", "maps", "bfloat16", "0", "64", "32", "128", "1"]]


def test_of_ranks_that_share_a_cache_one_compiles(said: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def run(which: list[str]) -> None:
        said.append(which)
        begun.set()
        go_on.wait(30)

    monkeypatch.setattr(ahead, "_run", run)
    monkeypatch.setattr(ahead, "_LOOK_SECONDS", 0.01)
    ranks = [threading.Thread(target=ahead.compile_ahead, args=(GPU, torch.bfloat16, False)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    assert begun.wait(30)
    go_on.set()
    for rank in ranks:
        rank.join(30)
    assert said == [["90", "statistics", "bfloat16", "0"]]


def test_a_cache_that_cannot_be_written_is_nothing_to_fail_for(
    said: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    ahead.compile_ahead(GPU, torch.bfloat16, False)
    assert said == []
