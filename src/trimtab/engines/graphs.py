"""CUDA graphs: what one captures is left alone, and each replay is one span, as nobody can look into it.

A call that is captured runs no hook later and its events would become a part of the graph, so the recorder marks
nothing on a stream that is being captured (see :class:`trimtab.record.cuda.CudaDevice`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from trimtab.engines.guard import Guard
from trimtab.engines.patches import GRAPH_PATCHES, PatchError, Patches
from trimtab.events import STREAM_HOST, Kind
from trimtab.record.observe import Call, Observer
from trimtab.record.recorder import Recorder

NAME_REPLAY = "cuda_graph"
NAME_CAPTURE = "cuda_graph_capture"


class GraphSpans:
    """Reports replays of CUDA graphs to an observer, and captures to the recorder."""

    def __init__(
        self, observer: Observer, recorder: Recorder | None, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._observer = observer
        self._recorder = recorder
        self._clock = clock
        self._guard = Guard()
        self._patches = Patches()
        self._begun: dict[int, int] = {}  # captures under way, by graph

    def install(self) -> None:
        """Wrap the methods of ``torch.cuda.CUDAGraph``; where this torch has none of that kind, nothing happens."""
        wrap = {"replay": self._replayed, "capture_begin": self._capture_begun, "capture_end": self._capture_ended}
        for patch in GRAPH_PATCHES:
            try:
                self._patches.apply(patch, wrap[patch.target.rpartition(".")[2]])
            except PatchError:
                continue

    def remove(self) -> None:
        """Put the methods back."""
        self._patches.undo()
        self._begun.clear()

    def _replayed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replay(graph: Any, *args: Any, **keywords: Any) -> Any:
            if not self._guard.working:
                return original(graph, *args, **keywords)
            call = Call(Kind.KERNEL, NAME_REPLAY)
            try:
                self._observer.begin(call)
            except Exception as error:
                self._guard.failed("the hook before a graph's replay", error)
            result = original(graph, *args, **keywords)
            try:
                if self._guard.working:
                    self._observer.end(call)
            except Exception as error:
                self._guard.failed("the hook after a graph's replay", error)
            return result

        return replay

    def _capture_begun(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **keywords: Any) -> Any:
            self._begun[id(graph)] = self._clock()
            return original(graph, *args, **keywords)

        return capture_begin

    def _capture_ended(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **keywords: Any) -> Any:
            result = original(graph, *args, **keywords)
            began = self._begun.pop(id(graph), None)
            recorder = self._recorder
            if began is not None and recorder is not None and recorder.active:
                recorder.span(Kind.HOST, NAME_CAPTURE, began, self._clock(), stream=STREAM_HOST)
            return result

        return capture_end
