"""CUDA graphs, as far as a machine without a GPU can show: the wrapping of ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trimtab.engines.graphs import GraphSpans
from trimtab.events import Kind
from trimtab.record.observe import Call

METHODS = ("replay", "capture_begin", "capture_end")


class Heard:
    """An observer that keeps what it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[tuple[str, Call]] = []
        self.fails = fails

    def step_begin(self, step: int) -> None:
        del step

    def begin(self, call: Call) -> None:
        self.calls.append(("begin", call))
        if self.fails:
            raise ValueError("no")

    def end(self, call: Call) -> None:
        self.calls.append(("end", call))


class Spans:
    """A recorder that keeps spans."""

    active = True

    def __init__(self) -> None:
        self.kept: list[tuple[Kind, str, int, int]] = []

    def span(self, kind: Kind, name: str, start: int, end: int, *, stream: str) -> None:
        assert stream == "host"
        self.kept.append((kind, name, start, end))


@pytest.fixture
def graph_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """A class in the place of ``torch.cuda.graphs.CUDAGraph``, whose own methods need a GPU."""

    class Graph:
        def replay(self) -> str:
            return "replayed"

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            del pool, capture_error_mode

        def capture_end(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda.graphs, "CUDAGraph", Graph)
    return Graph


def test_each_replay_is_one_span_and_each_capture_another(graph_class: type[Any]) -> None:
    heard, log = Heard(), Spans()
    spans = GraphSpans(heard, log, itertools.count().__next__)  # type: ignore[arg-type]
    spans.install()
    graph = graph_class()
    graph.capture_begin(capture_error_mode="thread_local")
    graph.capture_end()
    assert graph.replay() == "replayed"
    assert [(what, call.kind, call.name) for what, call in heard.calls] == [
        ("begin", Kind.KERNEL, "cuda_graph"),
        ("end", Kind.KERNEL, "cuda_graph"),
    ]
    assert log.kept == [(Kind.HOST, "cuda_graph_capture", 0, 1)]
    spans.remove()
    graph.replay()
    assert len(heard.calls) == 2


def test_a_failure_is_told_once_and_the_graph_goes_on(graph_class: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    spans = GraphSpans(Heard(fails=True), None)
    spans.install()
    graph = graph_class()
    assert [graph.replay(), graph.replay()] == ["replayed", "replayed"]
    assert len(caplog.records) == 1
    spans.remove()


def test_what_torch_offers_is_wrapped_and_restored() -> None:
    before = {name: torch.cuda.graphs.CUDAGraph.__dict__.get(name) for name in METHODS}
    assert None not in before.values(), "this torch has no such methods"
    spans = GraphSpans(Heard(), None)
    spans.install()
    assert all(torch.cuda.graphs.CUDAGraph.__dict__[name] is not method for name, method in before.items())
    spans.remove()
    assert {name: torch.cuda.graphs.CUDAGraph.__dict__.get(name) for name in METHODS} == before
