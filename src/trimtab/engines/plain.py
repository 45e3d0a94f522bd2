"""Plain PyTorch: optimizer steps from the hooks that torch offers for all optimizers, and reads of data loaders."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trimtab.engines.patches import Patches
from trimtab.events import STREAM_HOST, Kind
from trimtab.record.injection import Injection
from trimtab.record.observe import Call, Observer
from trimtab.record.recorder import Recorder


class PlainEngine:
    """Reports ``Optimizer.step`` of every optimizer and ``next`` of every ``DataLoader`` of the process.

    ``stepped`` is called after each step of the first optimizer seen: where nobody says where a training step begins,
    it begins there.
    """

    def __init__(
        self,
        observer: Observer,
        recorder: Recorder | None = None,
        injection: Injection | None = None,
        stepped: Callable[[], None] | None = None,
    ) -> None:
        self._observer = observer
        self._stepped = stepped
        self._first: int | None = None
        self._recorder = recorder
        self._injection = injection
        self._open: dict[int, Call] = {}  # by optimizer
        self._handles: list[Any] = []
        self._patches = Patches()

    def install(self) -> None:
        """Register the hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        self._patches.set("plain.data", _BaseDataLoaderIter, "__next__", self._timed(_BaseDataLoaderIter.__next__))

    def remove(self) -> None:
        """Take everything back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._patches.undo()
        self._open.clear()

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        call = Call(Kind.OPTIMIZER, type(optimizer).__name__)
        self._open[id(optimizer)] = call
        self._observer.begin(call)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        call = self._open.pop(id(optimizer), None)
        if call is None:
            return
        self._observer.end(call)
        if self._first is None:
            self._first = id(optimizer)
        if self._stepped is not None and self._first == id(optimizer):
            self._stepped()

    def _timed(self, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        recorder, injection = self._recorder, self._injection

        @functools.wraps(read)
        def timed(iterator: Any) -> Any:
            started = time.perf_counter_ns()
            if injection is not None:
                injection.delay_data()
            batch = read(iterator)
            if recorder is not None and recorder.active:
                recorder.span(Kind.DATA, "data", started, time.perf_counter_ns(), stream=STREAM_HOST)
            return batch

        return timed
