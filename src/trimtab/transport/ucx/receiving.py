"""The receiving half: buffers are taken when a header has come, and messages shown when all their tensors have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from trimtab.transport.errors import TransportError, WrongMessage
from trimtab.transport.inbox import Inbox
from trimtab.transport.interface import Channel, Label, Message
from trimtab.transport.pool import Buffer, BufferPool
from trimtab.transport.ucx.library import TRUNCATED
from trimtab.transport.ucx.records import Receive, first_tag
from trimtab.transport.ucx.worker import UcxError, Worker
from trimtab.transport.wire import Header, Spec


class Receiving:
    """Messages whose header has come. For whoever holds the worker."""

    def __init__(self, worker: Worker, pool: BufferPool, inbox: Inbox, lost: Callable[[int, str], None]) -> None:
        self._worker = worker
        self._pool = pool
        self._cuda = pool.device.type == "cuda"
        self._inbox = inbox
        self._lost = lost
        self._order: dict[tuple[int, bool, int], deque[Receive]] = {}
        self.under_way: list[Receive] = []
        self.graves: list[Receive] = []
        """Given up; UCX may still have their buffers, until the end."""

    def begin(self, source: int, header: Header) -> None:
        """A header of a message has come."""
        tag = first_tag(source, header.seq)
        buffers: list[Buffer] = []
        tensors: list[torch.Tensor] = []
        requests: list[int] = []
        try:
            for place, spec in enumerate(header.specs):
                buffer = self._pool.take(spec.size)
                buffers.append(buffer)
                tensors.append(buffer.tensor(spec.dtype, spec.shape))
                if spec.size:
                    request = self._worker.receive(source, buffer.address, spec.size, tag | place, self._cuda)
                    if request:
                        requests.append(request)
        except TransportError as error:
            self.graves.append(Receive(source, header, buffers, tuple(tensors), requests))
            self._failed(source, header.label, header.specs, error)
            return
        receive = Receive(source, header, buffers, tuple(tensors), requests)
        order = self._order.setdefault((source, header.label.backward, header.label.chunk), deque())
        order.append(receive)
        if requests:
            self.under_way.append(receive)
            self._worker.progress()  # most often it is here already
            self.finish()
        else:
            self._received(order)

    def _received(self, order: deque[Receive]) -> None:
        """Something of a channel is complete: a channel's messages are shown in the order in which they were sent."""
        while order and not order[0].requests:
            receive = order.popleft()
            header = receive.header
            channel = Channel(header.label.backward, header.label.chunk)
            self._inbox.put(
                Message(
                    receive.source,
                    header.label,
                    receive.tensors,
                    credit=partial(self.on_credit, receive.source, channel) if receive.tensors else None,
                    give_back=partial(self._pool.give, *receive.buffers),
                    due=header.value,
                )
            )

    on_credit: Callable[[int, Channel], None]
    """Set by the transport: a consumer gives a credit back."""

    def _failed(self, source: int, label: Label, specs: Sequence[Spec], error: TransportError) -> None:
        if isinstance(error, UcxError) and error.status == TRUNCATED:
            sizes = ", ".join(str(spec.size) for spec in specs)
            self._inbox.fail(
                WrongMessage(f"{label} from stage {source} is longer than the {sizes} bytes of its header")
            )
        else:
            self._lost(source, f"while {label} was on its way: {error}")

    def finish(self) -> int:
        """See what is complete; how many messages."""
        did = 0
        failed: list[tuple[Receive, TransportError]] = []
        for receive in list(self.under_way):
            requests = receive.requests
            try:
                while requests and self._worker.finished(requests[-1]):
                    requests.pop()
            except TransportError as error:
                requests.pop()
                self.under_way.remove(receive)
                self.graves.append(receive)
                failed.append((receive, error))
                continue
            if not requests:
                label = receive.header.label
                self.under_way.remove(receive)
                self._received(self._order[receive.source, label.backward, label.chunk])
                did += 1
        for receive, error in failed:  # only now, for then others are given up, too
            self._failed(receive.source, receive.header.label, receive.header.specs, error)
        return did

    def give_up(self, source: int) -> None:
        """Nothing more will come from this rank."""
        for receive in [receive for receive in self.under_way if receive.source == source]:
            self.under_way.remove(receive)
            self.graves.append(receive)

    def cancel(self) -> None:
        """At the end."""
        for receive in (*self.under_way, *self.graves):
            for request in receive.requests:
                self._worker.cancel(request)

    def forget(self) -> None:
        """Once UCX is down."""
        self.under_way.clear()
        self.graves.clear()
