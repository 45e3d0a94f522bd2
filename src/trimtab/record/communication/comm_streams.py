"""NCCL's own streams: which one carries a group's communications, found by elimination.

The true end of an asynchronous NCCL communication is an event on the stream that NCCL ran it on, which PyTorch does not
show. Its future can be waited for on a side stream instead, but that tells the caching allocator that the side stream
uses the tensors: their memory is then reused only when the device has passed the communication, and a job whose host
runs ahead needs many times its memory (measured on an H200: 7.5 GB against 0.6). ``Work.synchronize`` on a side stream
gives up the references that keep the tensors alive, which is worse.

But NCCL's streams come from PyTorch's own pool, and there are 32 of them. A communication waits for the stream that
issued it. So as long as that stream has not got to the mark before the issue, NCCL's stream cannot be idle, and those
of the pool which are idle are not it. A few looks leave one. Where none remain (a stream from elsewhere), or the device
is never behind its host, the end stays unknown here, and is taken where the job waits for it.

So it does where all streams share one hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``, which Megatron-LM's scripts
set). An event that takes the time holds such a queue up until what is before it in its stream has run: behind a
communication it would keep the kernels of all other streams from beginning, so that nothing could hide it (measured on
an H200: kernels of 1.5 ms, issued behind one of 8 ms on another stream and its event, ended after 9.5 ms). An event
without timing does not, nor does either with eight queues.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trimtab.record.clocks import Device, Mark
from trimtab.record.cuda import CudaDevice

_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_CONFIRMATIONS: Final = 8
_LOOKS_AT_MOST: Final = 64
_CHECK_EVERY: Final = 16
_FRESH_STARTS: Final = 2
_POOL_AT_MOST: Final = 256


@dataclass(slots=True)
class _Search:
    """What is known about the stream behind one key."""

    candidates: list[Any] = field(default_factory=list[Any])
    stream: Any = None
    looks: int = 0
    confirmed: int = 0
    """How often the last candidate was looked at alone, and was busy."""
    uses: int = 0
    starts: int = 0


class CommStreams:
    """The streams of NCCL met so far, by key: whatever NCCL runs on one stream must have one key."""

    def __init__(self, device: Device, cuda: Any, environment: Mapping[str, str] | None = None) -> None:
        """``cuda`` is ``torch.cuda`` or what behaves like it; ``environment`` is that of this process by default."""
        self._device = device if isinstance(device, CudaDevice) else None
        self._environment = os.environ if environment is None else environment
        self._one_queue: bool | None = None
        self._cuda = cuda
        self._pool: Sequence[Any] | None = None
        self._searches: dict[str, _Search] = {}

    def behind(self, key: str, ready: Mark) -> Mark | None:
        """A mark behind the communication that has just been issued; None where its stream is not known (yet).

        ``ready`` is the mark of the current stream from before the issue.
        """
        device = self._device
        if device is None:
            return None
        if self._one_queue is None:  # CUDA is in use, so what the driver was told is settled
            self._one_queue = self._environment.get(_CONNECTIONS) == "1"
        if self._one_queue:
            return None
        search = self._searches.get(key)
        if search is None:
            search = self._searches[key] = _Search()
        if search.stream is None:
            self._look(device, search, ready)
        else:
            search.uses += 1
            if search.uses % _CHECK_EVERY == 0:
                self._check(device, search, ready)
        return None if search.stream is None else device.mark_on(search.stream)

    def _look(self, device: CudaDevice, search: _Search, ready: Mark) -> None:
        """Strike out the streams that are idle while the communication cannot have begun."""
        if search.looks >= _LOOKS_AT_MOST or search.starts > _FRESH_STARTS or not device.ahead_of(ready):
            return
        search.looks += 1
        if not search.candidates:
            search.candidates = list(self._all())
            search.starts += 1
        busy = [stream for stream in search.candidates if not _idle(stream)]
        if not device.ahead_of(ready):  # it got there meanwhile, so an idle stream proves nothing
            return
        search.confirmed = search.confirmed + 1 if len(busy) == len(search.candidates) == 1 else 0
        search.candidates = busy
        search.stream = busy[0] if search.confirmed >= _CONFIRMATIONS else None

    def _check(self, device: CudaDevice, search: _Search, ready: Mark) -> None:
        """Once in a while: is it still not idle where it cannot be?"""
        if device.ahead_of(ready) and _idle(search.stream) and device.ahead_of(ready):
            search.stream = None
            search.candidates = []

    def _all(self) -> Sequence[Any]:
        """Every stream of PyTorch's pools on the current device, those of high priority too."""
        if self._pool is None:
            self._pool = [stream for priority in (0, -1) for stream in self._whole_pool(priority)]
        return self._pool

    def _whole_pool(self, priority: int) -> list[Any]:
        """PyTorch hands the streams of a pool out in turn. Two full turns, so that the next to ask gets the same one
        as if nobody had asked."""
        found: dict[int, Any] = {}
        while len(found) < _POOL_AT_MOST:
            stream = self._cuda.Stream(priority=priority)
            if stream.cuda_stream in found:
                break
            found[stream.cuda_stream] = stream
        for _ in range(len(found) - 1):
            self._cuda.Stream(priority=priority)
        return list(found.values())


def _idle(stream: Any) -> bool:
    """Has it nothing to do? One that is being captured into a CUDA graph cannot be asked, and is busy."""
    try:
        return stream.query()
    except RuntimeError:
        return False
