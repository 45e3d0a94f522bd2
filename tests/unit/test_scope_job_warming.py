"""Kernels are compiled for the GPU on which the model is, whatever thread asks for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trimtab.scope.job.measures import Measures
from trimtab.scope.job.warming import Warming
from trimtab.scope.names import Tap
from trimtab.scope.subscription import Subscription

pytestmark = pytest.mark.timeout(30)
TAPS = [Tap("layers.0.output", "activation", dtype="torch.bfloat16"), Tap("loss", "activation", dtype="float32")]


class Warmed(Measures):
    """What was to be compiled, and which GPU was current then."""

    def __init__(self, current: list[Any]) -> None:
        self.calls: queue.SimpleQueue[tuple[Any, Any, list[torch.dtype]]] = queue.SimpleQueue()
        self._current = current

    def warm(self, subscription: Subscription, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
        self.calls.put((self._current[-1], device, list(dtypes)))


class OnGpu:
    """A model with parameters there."""

    def __init__(self, *indices: int) -> None:
        self._devices = [torch.device("cuda", index) for index in indices]

    def parameters(self) -> Iterator[Any]:
        return (SimpleNamespace(device=device, is_cuda=True) for device in self._devices)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The current GPU, the innermost last."""
    found: list[Any] = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        found.append(which)
        try:
            yield
        finally:
            found.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return found


def test_kernels_are_compiled_where_the_model_is(current: list[Any]) -> None:
    measures, complaints = Warmed(current), []
    warming = Warming(measures, lambda what, error: complaints.append((what, error)))
    warming.meet(cast(torch.nn.Module, OnGpu(1, 1)))
    warming.begin(Subscription("**"), TAPS)
    gpu = torch.device("cuda", 1)
    assert measures.calls.get(timeout=20) == (gpu, gpu, [torch.bfloat16, torch.float32])
    assert complaints == []


def test_a_model_on_two_gpus_has_them_compiled_for_both(current: list[Any]) -> None:
    measures = Warmed(current)
    warming = Warming(measures, lambda what, error: None)
    warming.meet(cast(torch.nn.Module, OnGpu(0, 3)))
    warming.begin(Subscription("**"), TAPS)
    assert [measures.calls.get(timeout=20)[1].index for _ in range(2)] == [0, 3]


def test_nothing_is_compiled_for_a_model_on_the_cpu(current: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(threading, "Thread", lambda **about: started.append(about) or SimpleNamespace(start=list))
    warming = Warming(Warmed(current), lambda what, error: None)
    warming.meet(torch.nn.Linear(2, 2))
    warming.begin(Subscription("**"), TAPS)
    assert not started
    warming.meet(cast(torch.nn.Module, OnGpu(0)))
    warming.begin(Subscription("**"), TAPS)
    assert len(started) == 1
