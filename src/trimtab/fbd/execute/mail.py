"""What has come over the transport, sorted, for whoever waits for something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from trimtab.fbd.execute.program import SHIPMENT
from trimtab.fbd.execute.streams import Streams
from trimtab.fbd.split.shipping import Arrived, Receiver
from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Label, Message

_T = TypeVar("_T")


class Mail:
    """Of one process. Everything that waits does so here, so that messages of all kinds are taken meanwhile."""

    def __init__(self, transport: Streams, patience: float, on_credit: Callable[[int], None] | None = None) -> None:
        """``on_credit`` is told from whom one came."""
        self._transport = transport
        self._patience = patience
        self._on_credit = on_credit
        self._receiver = Receiver()
        self._messages: dict[tuple[int, Label], Message] = {}
        self._arrived: dict[tuple[int, int, int], Arrived] = {}

    def message(self, source: int, label: Label) -> Message:
        """The message of that label from that process."""
        return self.until(lambda: self._messages.pop((source, label), None), f"{label} from process {source}")

    def shipment(self, source: int, step: int, microbatch: int) -> Arrived:
        """The shipment of a microbatch."""
        key = (source, step, microbatch)
        what = f"what the forward of microbatch {microbatch}, step {step}, saved on process {source}"
        return self.until(lambda: self._arrived.pop(key, None), what)

    def until(self, found: Callable[[], _T | None], what: str) -> _T:
        """Take what comes until ``found`` finds something. TransportError after too long; PeerLost where one died."""
        end = time.monotonic() + self._patience
        while True:
            self._take()
            value = found()
            if value is not None:
                return value
            left = end - time.monotonic()
            if left <= 0:
                raise TransportError(f"{what} has not come within {self._patience:g} s")
            self._transport.wait(left)

    def _take(self) -> None:
        for message in self._transport.poll():
            if not isinstance(message, Message):
                continue
            if message.label.chunk == SHIPMENT and not message.label.backward:
                for one in self._receiver.take(message):
                    self._arrived[one.source, one.iteration, one.microbatch] = one
            elif self._on_credit is not None and message.label.backward and not message.tensors:
                message.release()
                self._on_credit(message.source)
            else:
                message.take()
                self._messages[message.source, message.label] = message
