"""A transport for whoever computes on a CUDA stream: nothing is sent before it is made, or read before it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trimtab.transport.interface import Announcement, Label, Message, Transport


class Streams:
    """The current stream of the device where tensors lie; on the CPU there is nothing to wait for."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, to: int, label: Label, tensors: Sequence[torch.Tensor]) -> None:
        """As the transport's; what the stream was given before is done before anything is read."""
        self._transport.send(to, label, tensors, _mark(tensors))

    def poll(self) -> list[Message | Announcement]:
        """As the transport's; what the stream is given from now on sees what came."""
        found = self._transport.poll()
        for one in found:
            if isinstance(one, Message):
                _admit(one)
        return found

    def wait(self, timeout: float | None) -> bool:
        """As the transport's."""
        return self._transport.wait(timeout)


def _mark(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    device = next((one.device for one in tensors if one.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def _admit(message: Message) -> None:
    for tensor in message.tensors:
        if tensor.is_cuda:
            stream = torch.cuda.current_stream(tensor.device)
            if message.event is not None:
                stream.wait_event(message.event)
            tensor.record_stream(stream)
