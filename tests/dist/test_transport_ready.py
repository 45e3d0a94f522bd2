"""What the device has yet to make is sent as soon as it is made, whatever the training thread does meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from trimtab.transport.interface import Label
from trimtab.transport.opening import group_exchange, open_transport

ROUNDS = 4
LOOKS = 20
SECONDS = 8.0
"""The owner looks after everything by itself only every 15 s."""


def _send_and_look_away(rank: int, kind: str) -> list[Any]:
    dist.init_process_group("gloo")
    transport = open_transport(kind, rank, 2, group_exchange())  # type: ignore[arg-type]
    tensor = torch.arange(1 << 18, dtype=torch.float32)
    came: list[Any] = []
    for number in range(ROUNDS):
        dist.barrier()
        if rank == 0:
            asked = 0

            def ready() -> bool:
                nonlocal asked
                asked += 1
                return asked > LOOKS

            sending = transport.send(1, Label(False, 0, number), [tensor], ready)
            sending.exception(SECONDS)  # the thread waits for something else, and calls nothing
            came.append(sending.done())
        else:
            came.append(transport.wait(SECONDS))
            for message in transport.poll():
                message.release()  # type: ignore[union-attr]
    dist.barrier()
    transport.close()
    return came


@pytest.mark.parametrize("kind", ["ucx", "torch"])
def test_what_is_not_ready_yet_is_sent_though_the_thread_is_elsewhere(kind: str) -> None:
    assert run_ranks(2, _send_and_look_away, kind, timeout=60) == [[True] * ROUNDS] * 2
