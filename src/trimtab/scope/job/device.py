"""How measurements come from the device into the host's memory, without a wait on a training thread.

On a training thread an event is recorded behind the measurement, no more. The sender asks that event (a query, which
never waits), copies on a stream of its own into pinned memory that was allocated once, asks again, and reads. Until
then it holds the tensors: their memory cannot be given to anything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.scope.job.outbox import Sample

ALIGNMENT: Final = 16
FIRST_BYTES: Final = 1 << 18
"""Of pinned memory that are allocated first: statistics of a thousand taps and more."""
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


class _Run:
    """Bytes of one storage that are copied together."""

    __slots__ = ("at", "end", "first", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor, storage: Any, first: int, end: int) -> None:
        self.tensor: torch.Tensor | None = tensor
        """If it is this one only."""
        self.storage = storage
        self.first = first
        self.end = end
        self.at = 0
        """Where in the pinned memory."""

    def pair(self, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is copied, and where to."""
        target = staging[self.at : self.at + self.end - self.first]
        if self.tensor is not None:
            return self.tensor, target.view(self.tensor.dtype).view(self.tensor.shape)
        source = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return source.set_(self.storage, self.first, (self.end - self.first,), (1,)), target


class _Place(NamedTuple):
    """Of one array in the pinned memory."""

    run: _Run
    offset: int
    length: int
    kind: np.dtype[Any]
    shape: tuple[int, ...]


class Mover:
    """Brings samples into the host's memory. Only the sender's thread uses it."""

    def __init__(self, accelerator: Accelerator, size: int) -> None:
        """At most ``size`` bytes of pinned memory: what is needed of them, allocated when it is."""
        self._accelerator = accelerator
        self.size = size
        self._staging: torch.Tensor | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        """The same memory."""
        self._flying: list[tuple[Sample, dict[str, _Place]]] = []
        self._landed: Any = None

    @property
    def busy(self) -> bool:
        """Copies are on their way."""
        return bool(self._flying)

    def launch(self, samples: Sequence[Sample]) -> None:
        """Begin to copy ``samples``, which :func:`needed` says fit. Not while busy."""
        assert not self._flying, "one copy at a time: they share the memory"
        runs: list[_Run] = []
        latest: dict[int, _Run] = {}
        for sample in samples:
            places = {name: _placed(tensor, runs, latest) for name, tensor in sample.tensors.items()}
            self._flying.append((sample, places))
        at = 0
        for run in runs:
            run.at = at
            at += _aligned(run.end - run.first)
        staging = self._room(at)
        self._landed = self._accelerator.copy([run.pair(staging) for run in runs])

    def landed(self) -> list[tuple[Sample, Arrays]] | None:
        """The samples that were launched, in the host's memory; None where they are not there yet."""
        if self._landed is not None and not self._accelerator.done(self._landed):
            return None
        flying, self._flying = self._flying, []
        arrived = [(sample, {name: self._array(place) for name, place in places.items()}) for sample, places in flying]
        self._accelerator.recycle(self._landed)
        self._landed = None
        return arrived

    def reset(self) -> None:
        """Forget what is on its way."""
        self._flying, self._landed = [], None

    def _room(self, wanted: int) -> torch.Tensor:
        """Pinned memory for so many bytes. It is little at first: while it is pinned, the job's own calls of the driver
        stand."""
        staging = self._staging
        if staging is None or staging.numel() < wanted:
            doubled = 1 << max(wanted - 1, FIRST_BYTES - 1).bit_length()
            staging = self._staging = self._accelerator.staging(min(doubled, self.size))
            self._bytes = staging.numpy()
        return staging

    def _array(self, place: _Place) -> NDArray[Any]:
        at = place.run.at + place.offset
        return self._bytes[at : at + place.length].view(place.kind).reshape(place.shape).copy()


def _placed(tensor: torch.Tensor, runs: list[_Run], latest: dict[int, _Run]) -> _Place:
    """Where it will be. What lies behind the last one of the same storage, such as the statistics of many taps, comes
    with that in one copy."""
    length = tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    first, key = int(tensor.storage_offset()) * tensor.element_size(), storage.data_ptr()
    run = latest.get(key)
    dense = tensor.is_contiguous()
    if run is not None and dense and first - run.first == _aligned(run.end - run.first):
        run.end, run.tensor = first + length, None
    else:
        run = _Run(tensor, storage, first, first + length)
        runs.append(run)
        if dense:
            latest[key] = run
    return _Place(run, first - run.first, length, _numpy_type(tensor.dtype), tuple(tensor.shape))


@functools.cache
def _numpy_type(dtype: torch.dtype) -> np.dtype[Any]:
    """As which it is read on the host: what numpy has no type for as unsigned integers."""
    example = torch.empty(0, dtype=dtype)
    return np.dtype(f"u{dtype.itemsize}") if odd_type(example) is not None else example.numpy().dtype


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
