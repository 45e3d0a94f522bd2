"""Closing over UCX: at any stage of what is under way nothing stays with UCX, and what may go goes before."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_ranks
from transport_scenarios import Player
from ucx_here import needs_ucx

from trimtab.transport.errors import PeerLost, TransportError
from trimtab.transport.interface import Label, Message
from trimtab.transport.opening import group_exchange, open_transport
from trimtab.transport.ucx.library import load_ucx
from trimtab.transport.ucx.worker import Worker


pytestmark = needs_ucx

_PEERS = 3
"""So many callbacks at the end that UCX's queue of them must grow for more."""
_STAGES = 40
_SIZE = 1 << 20
"""UCX asks the receiver before it sends so much."""


def _close_in_the_middle(_rank: int) -> None:
    ucx = load_ucx()
    options = {"TLS": "tcp", "NET_DEVICES": "lo"}
    for rounds in range(_STAGES):
        middle, *others = workers = [Worker(ucx, options) for _ in range(1 + _PEERS)]
        for number, other in enumerate(others):
            middle.connect(number, other.address())
            other.connect(0, middle.address())
        memory: list[ctypes.Array[ctypes.c_char]] = []
        receives: list[tuple[Worker, int]] = []
        for number, other in enumerate(others):
            for sender, to, receiver, source in ((middle, number, other, 0), (other, 0, middle, number)):
                data, room = ctypes.create_string_buffer(_SIZE), ctypes.create_string_buffer(_SIZE)
                memory += [data, room]
                receives.append((receiver, receiver.receive(source, ctypes.addressof(room), _SIZE, number)))
                sender.send(to, data, _SIZE, number)
        for _ in range(rounds):
            for worker in workers:
                worker.progress()
        for worker in workers:
            for receiver, request in receives:
                if receiver is worker and not _over(worker, request):
                    worker.cancel(request)
            worker.close(lambda: False)
            assert not worker._open


def _over(worker: Worker, request: int) -> bool:
    with contextlib.suppress(TransportError):
        return worker.finished(request)
    return True


def test_a_worker_is_closed_at_every_stage_of_what_is_under_way() -> None:
    run_ranks(1, _close_in_the_middle, timeout=60)


def _send_and_leave(rank: int) -> None:
    dist.init_process_group("gloo")
    transport: Any = open_transport("ucx", rank, 2, group_exchange())
    player = Player(transport)
    player.meet()
    if rank == 1:
        with transport._turn:  # as when the owner has it for something else ...
            transport.send(0, Label(False, 0, 7), ())
            transport._stopping = True  # ... and is to end before it comes to this
    else:
        message = player.next()
        assert isinstance(message, Message)
        assert message.label == Label(False, 0, 7)
        with pytest.raises(PeerLost, match="has closed its transport"):
            player.next()
    transport.close()


def test_what_has_a_credit_is_sent_before_the_goodbye() -> None:
    run_ranks(2, _send_and_leave, timeout=60)
