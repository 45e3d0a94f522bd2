"""How measurements come from the device into the host's memory, without a wait on a training thread.

On a training thread an event is recorded behind the measurement, no more. The sender asks that event (a query, which
never waits), copies on a stream of its own into pinned memory that was allocated once, asks again, and reads. Until
then it holds the tensors: their memory cannot be given to anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.scope.job.outbox import Sample

ALIGNMENT: Final = 16
Arrays = dict[str, NDArray[Any]]
_AS_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_UNSIGNED: Final = {"int16": np.uint16}


class Accelerator(Protocol):
    """What is needed of a device with a queue of its own; a fake one in tests."""

    def begin(self) -> Any:
        """An event at this place of the current stream; None while a graph is captured."""

    def done(self, event: Any) -> bool:
        """Has the device got there? Never waits."""
        ...

    def elapsed_ns(self, began: Any, ended: Any) -> int:
        """Between two events that are done."""
        ...

    def recycle(self, *events: Any) -> None:
        """They may be used again."""

    def staging(self, size: int) -> torch.Tensor:
        """Pinned memory, bytes."""
        ...

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Copy each first into the second on the side stream; the event behind them."""
        ...


class Cuda:
    """The GPU that this process works on."""

    def __init__(self, index: int, cuda: Any = torch.cuda, raw_stream: Callable[[int], int] | None = None) -> None:
        """``raw_stream`` gives the handle of a device's current stream, which is quicker than the stream itself."""
        self._cuda = cuda
        self._index = index
        self._raw_stream: Callable[[int], int] = raw_stream or torch._C._cuda_getCurrentRawStream
        self._streams: dict[int, Any] = {}  # by their handles
        self._side: Any = None
        self._events: list[Any] = []

    def begin(self) -> Any:
        """See :class:`Accelerator`."""
        if self._cuda.is_current_stream_capturing():
            return None
        handle = self._raw_stream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._cuda.current_stream(self._index)
        event = self._event()
        event.record(stream)
        return event

    def done(self, event: Any) -> bool:
        """See :class:`Accelerator`."""
        return bool(event.query())

    def elapsed_ns(self, began: Any, ended: Any) -> int:
        """See :class:`Accelerator`."""
        return max(round(began.elapsed_time(ended) * 1e6), 0)

    def recycle(self, *events: Any) -> None:
        """See :class:`Accelerator`."""
        self._events.extend(event for event in events if event is not None)

    def staging(self, size: int) -> torch.Tensor:
        """See :class:`Accelerator`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """See :class:`Accelerator`."""
        with self._cuda.device(self._index):  # the sender's own current device would be GPU 0
            if self._side is None:
                self._side = self._cuda.Stream()
            event = self._event()
            with self._cuda.stream(self._side):
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
                event.record(self._side)
        return event

    def _event(self) -> Any:
        try:
            return self._events.pop()
        except IndexError:
            return self._cuda.Event(enable_timing=True)


class Mover:
    """Brings samples into the host's memory. Only the sender's thread uses it."""

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        """``size`` bytes of pinned memory; they are allocated with the first sample."""
        self._accelerator = accelerator
        self.size = size
        self._staging: torch.Tensor | None = None
        self._flying: list[tuple[Sample, dict[str, torch.Tensor]]] = []
        self._landed: Any = None

    @property
    def busy(self) -> bool:
        """Copies are on their way."""
        return bool(self._flying)

    def launch(self, samples: Sequence[Sample]) -> None:
        """Begin to copy ``samples``, which :func:`needed` says fit. Not while busy."""
        assert not self._flying, "one copy at a time: they share the memory"
        if self._staging is None:
            self._staging = self._accelerator.staging(self.size)
        at, pairs = 0, list[tuple[torch.Tensor, torch.Tensor]]()
        for sample in samples:
            views: dict[str, torch.Tensor] = {}
            for name, tensor in sample.tensors.items():
                length = tensor.numel() * tensor.element_size()
                views[name] = self._staging[at : at + length].view(tensor.dtype).view(tensor.shape)
                pairs.append((tensor, views[name]))
                at += _aligned(length)
            self._flying.append((sample, views))
        self._landed = self._accelerator.copy(pairs)

    def landed(self) -> list[tuple[Sample, Arrays]] | None:
        """The samples that were launched, in the host's memory; None where they are not there yet."""
        if self._landed is not None and not self._accelerator.done(self._landed):
            return None
        flying, self._flying = self._flying, []
        arrived = [(sample, to_host(views)) for sample, views in flying]
        self._accelerator.recycle(self._landed)
        self._landed = None
        return arrived

    def reset(self) -> None:
        """Forget what is on its way."""
        self._flying, self._landed = [], None


def to_host(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Copies of tensors in the host's memory, as arrays; what numpy has no type for as unsigned integers."""
    return {name: _array(tensor) for name, tensor in tensors.items()}


def odd_type(tensor: torch.Tensor) -> str | None:
    """Name of a type that travels as integers (``bfloat16``); None for others."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if kind == "bfloat16" or kind.startswith("float8") else None


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    if odd_type(tensor) is not None:
        found = tensor.contiguous().view(_AS_INTEGERS[tensor.element_size()]).numpy()
        return np.array(found.view(_UNSIGNED.get(found.dtype.name, found.dtype)), copy=True)
    return np.array(tensor.numpy(), copy=True, order="C")


def needed(sample: Sample) -> int:
    """Bytes of pinned memory that it takes."""
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in sample.tensors.values())


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
