"""The protocol over a worker that only says how requests end: what fails together, and what fails in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.transport.errors import PeerLost
from trimtab.transport.inbox import Inbox
from trimtab.transport.interface import Label
from trimtab.transport.pool import BufferPool
from trimtab.transport.ucx.protocol import Protocol
from trimtab.transport.ucx.records import Send
from trimtab.transport.ucx.worker import UcxError
from trimtab.transport.wire import Header, Kind


class Failing:
    """All requests fail, once they are looked at, and some right away."""

    def __init__(self, good: int) -> None:
        self.failed: list[tuple[int, str]] = []
        self.canceled: list[int] = []
        self.looked_at: list[int] = []
        self.left_alone: list[int] = []
        self.good = good
        self.pending = False
        self._begun = 0

    def _begin(self, *_: Any) -> int:
        self._begun += 1
        if self._begun > self.good:
            raise UcxError(-25, "refused")
        return self._begun

    send = receive = _begin

    def finished(self, request: int) -> bool:
        if self.pending:
            return False
        assert request not in self.looked_at, "it is freed"
        self.looked_at.append(request)
        raise UcxError(-25, "reset")

    def cancel(self, request: int) -> None:
        self.canceled.append(request)

    def progress(self, _patience: int = 1) -> int:
        return 0

    def leave_alone(self, rank: int) -> None:
        self.left_alone.append(rank)

    def probe(self, _tag: int, _mask: int) -> None:
        return None


def _protocol(good: int) -> tuple[Protocol, Failing, Inbox]:
    worker, inbox = Failing(good), Inbox()
    return Protocol(0, worker, [10, 11], 4, BufferPool(), inbox, lambda: 0.0), worker, inbox  # pyright: ignore[reportArgumentType]


def _message(number: int) -> Send:
    return Send(1, Label(False, 0, number), (torch.ones(2),), None, 0.0)


def test_all_that_is_under_way_to_a_peer_may_fail_at_once() -> None:
    protocol, worker, inbox = _protocol(good=100)
    sends = [_message(number) for number in range(3)]
    for item in sends:
        protocol.submit(item)
    for _ in range(2):
        protocol.submit((1, Kind.SOON, Label(False, 0, 9), 0, 0.0))
    protocol.step()
    protocol.step()
    assert all(isinstance(item.sending.exception(0), PeerLost) for item in sends)
    assert not protocol.leaving
    assert len(worker.looked_at) == 5  # of each message one part, which is enough to know
    with pytest.raises(PeerLost, match="stage 1 is lost"):
        inbox.check()


def test_a_message_that_fails_in_the_middle_keeps_its_memory() -> None:
    protocol, _, _ = _protocol(good=1)
    item = _message(0)
    protocol.submit(item)
    protocol.step()
    assert isinstance(item.sending.exception(0), PeerLost)
    assert item.tensors
    assert protocol._graves == [item]  # its header may still be read
    protocol.forget()
    assert protocol._graves == []


def test_receives_may_fail_at_once() -> None:
    protocol, worker, _ = _protocol(good=6)
    worker.pending = True
    for seq in range(3):
        protocol.receiving.begin(1, _header(protocol, seq))
    assert len(protocol.receiving.under_way) == 3
    worker.pending = False
    protocol.step()
    assert not protocol.receiving.under_way
    assert len(protocol.receiving.graves) == 3
    _check_end(protocol, worker)


def test_a_receive_that_fails_in_the_middle_keeps_its_memory() -> None:
    protocol, worker, _ = _protocol(good=1)
    protocol.receiving.begin(1, _header(protocol, 0))
    (receive,) = protocol.receiving.graves
    assert len(receive.buffers) == 2
    _check_end(protocol, worker)


def _header(protocol: Protocol, seq: int) -> Header:
    tensors = (torch.ones(2), torch.ones(3))
    return protocol._wire.unpack(protocol._wire.pack(10, Kind.DATA, Label(False, 0, seq), seq, 0.0, tensors), 10)


def _check_end(protocol: Protocol, worker: Failing) -> None:
    """Each request that is not over is canceled at the end."""
    protocol.cancel(PeerLost(1, "closed"))
    assert sorted([*worker.canceled, *worker.looked_at]) == list(range(1, worker.good + 1))
