"""A transport for whoever computes on a CUDA stream: nothing is sent before it is made, or read before it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from trimtab.transport.interface import Announcement, Departure, Label, Message, Transport
from trimtab.transport.sending import Sending

Ready = Callable[[], bool]


class Streams:
    """The current stream of a rank's device; on the CPU there is nothing to wait for."""

    def __init__(self, transport: Transport, device: torch.device, *, through_host: bool = False) -> None:
        """``device``: where the rank computes. ``through_host``: the transport is the CPU's, whatever the device."""
        self._transport = transport
        self._device = device
        self._through_host = through_host and device.type == "cuda"
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._shared: list[Ready] | None = None

    def send(self, to: int, label: Label, tensors: Sequence[torch.Tensor], *, after: bool = False) -> Sending:
        """As the transport's; what the stream was given before is done before anything is read. ``after``: also where
        nothing that is sent lies on the device, so that it says that all before is done."""
        on_device = after or any(one.is_cuda for one in tensors)
        given = list(tensors)
        # Here and not by the transport: the copies are kernels, too, that the event has to be behind.
        tensors = [_copied_out(one) if self._through_host else one.contiguous() for one in given]
        is_copied = any(one is not mine for one, mine in zip(tensors, given, strict=True))
        ready = self._ready(anew=is_copied) if on_device else None
        return self._transport.send(to, label, tensors, ready)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is sent within was made before the first of it, so one event stands for all."""
        self._shared = []
        try:
            yield
        finally:
            self._shared = None

    def let_go(self, peers: Iterable[int]) -> None:
        """As the transport's."""
        self._transport.let_go(peers)

    def poll(self, hosted: Callable[[Label], bool]) -> list[Message | Announcement | Departure]:
        """As the transport's; what the stream is given from now on sees what came. What is ``hosted`` is read by the
        host, so it is there, without waiting for what the stream was given before."""
        found = self._transport.poll()
        if self._side is not None:
            for one in found:
                if isinstance(one, Message):
                    self._admit(one, self._side, hosted(one.label))
        return found

    def wait(self, timeout: float | None) -> bool:
        """As the transport's."""
        return self._transport.wait(timeout)

    def on_host(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What has come and is read by the host, copied beside whatever the stream was given: that is not waited
        for."""
        if self._side is None:
            return tuple(tensors)
        with torch.cuda.stream(self._side):
            return tuple(one.cpu() for one in tensors)

    def drain(self, timeout: float) -> None:
        """As the transport's."""
        self._transport.drain(timeout)

    def rate(self, to: int) -> float:
        """Bytes a second to a peer, as measured so far; 0: nothing large enough has been sent."""
        link = self._transport.links().get(to)
        return 0.0 if link is None else link.bytes_per_s

    def _ready(self, *, anew: bool = False) -> Ready | None:
        if self._device.type != "cuda":
            return None
        if self._shared and not anew:
            return self._shared[0]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        if self._shared is not None and not anew:
            self._shared.append(event.query)
        return event.query

    def _admit(self, message: Message, side: torch.cuda.Stream, hosted: bool) -> None:
        tensors = message.tensors
        if not tensors:
            return
        if hosted == all(not one.is_cuda for one in tensors):  # it is where it is to be
            stream = torch.cuda.current_stream(self._device)
            if message.event is not None:
                stream.wait_event(message.event)
            for one in tensors:
                if one.is_cuda:
                    one.record_stream(stream)
            return
        with torch.cuda.stream(side):
            if message.event is not None:
                side.wait_event(message.event)
            to = torch.device("cpu") if hosted else self._device
            message.tensors = tuple(one.to(to) for one in tensors)
        side.synchronize()  # the buffers may be given back from now on
        for one in message.tensors:
            if one.is_cuda:
                one.record_stream(torch.cuda.current_stream(self._device))


def _copied_out(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
