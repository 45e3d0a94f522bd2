"""Peers that are killed while they write into shared memory: it is noticed at once, and the others go on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from ucx_here import needs_ucx

from trimtab.transport.interface import Announcement, Departure, Label, Message
from trimtab.transport.opening import open_transport
from trimtab.transport.ucx.library import load_ucx
from trimtab.transport.ucx.worker import Worker


pytestmark = [pytest.mark.dist, pytest.mark.timeout(120), needs_ucx]
ROUNDS, WORLD, VICTIM = 6, 3, 2
SECONDS = 10.0
"""Long before a silence would be noticed."""


def _exchange(store: Any, rank: int, name: str) -> Callable[[bytes], list[bytes]]:
    """Over a file, as a process that is killed leaves a process group broken."""
    asked = 0

    def exchange(mine: bytes) -> list[bytes]:
        nonlocal asked
        asked += 1
        store.set(f"{name} {asked} {rank}", mine)
        return [bytes(store.get(f"{name} {asked} {one}")) for one in range(WORLD)]

    return exchange


def _open(folder: str, rank: int, number: int, apart: list[int]) -> Any:
    store = dist.FileStore(str(Path(folder, f"meet-{number}")), WORLD)  # pyright: ignore[reportPrivateImportUsage]
    transport = open_transport("ucx", rank, WORLD, _exchange(store, rank, "open"), apart=apart)
    transport.let_go([VICTIM])
    return transport


def _flood(folder: str, number: int, apart: list[int], begun: int) -> None:
    """The victim: writes all the time, mostly to the first."""
    transport = _open(folder, VICTIM, number, apart)
    os.write(begun, b".")
    while True:
        for to in (0, 0, 0, 1):
            transport.announce(to, Label(False, 0, 0), 0.0)


def _kill(folder: str, number: int, apart: list[int], after: float) -> None:
    """A child of this process is the victim."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            _flood(folder, number, apart, write)
        os._exit(1)
    os.read(read, 1)
    end = monotonic() + after
    while monotonic() < end:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)


class Seen:
    """What has come over a transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._items: list[Any] = []

    def has(self, wanted: Callable[[Any], bool]) -> bool:
        """Whether it comes in time."""
        end = monotonic() + SECONDS
        while not any(map(wanted, self._items)) and (left := end - monotonic()) > 0:
            self._transport.wait(left)
            self._items += [one for one in self._transport.poll() if not isinstance(one, Announcement)]
        return any(map(wanted, self._items))


def _departed(item: Any) -> bool:
    return isinstance(item, Departure)


def _rounds(rank: int, folder: str, apart: list[int]) -> list[list[bool]]:
    """For each round: whether the death was noticed, and whether what the other one sent came after it."""
    found: list[list[bool]] = []
    chance = random.Random(5)
    for number in range(ROUNDS):
        after = chance.uniform(0.002, 0.03)
        if rank == VICTIM:
            _kill(folder, number, apart, after)
            continue
        transport = _open(folder, rank, number, apart)
        seen = Seen(transport)
        noticed = seen.has(_departed)
        transport.send(1 - rank, Label(False, 0, number), (torch.full((5000,), number),))
        came = seen.has(lambda item: isinstance(item, Message))
        found.append([noticed, came])
        transport.close()
    return found


def test_a_peer_that_is_killed_while_it_writes_holds_up_nobody(tmp_path: Path) -> None:
    """UCX has one queue for all who write to a worker; a place that was taken and never marked as written ends it."""
    first, second, _ = run_ranks(WORLD, _rounds, str(tmp_path), [VICTIM], allow_warnings=True)
    assert first == second == [[True, True]] * ROUNDS


def _unarmed(rank: int, folder: str) -> list[bool]:
    if rank == VICTIM:
        _kill(folder, 0, [], 0.05)
        return []
    transport = _open(folder, rank, 0, [])
    transport._worker.arm = lambda: False  # as it is where such a place is next
    if rank == 0:  # waits
        noticed = Seen(transport).has(_departed)
    else:  # is elsewhere, so that the transport's thread sees it
        end = monotonic() + SECONDS
        while VICTIM not in transport._ended and monotonic() < end:
            pass
        noticed = VICTIM in transport._ended
    transport.close()
    return [noticed]


def test_a_death_is_noticed_although_the_worker_never_rests(tmp_path: Path) -> None:
    assert run_ranks(WORLD, _unarmed, str(tmp_path), allow_warnings=True) == [[True], [True], []]


def _leave_alone(_rank: int) -> list[list[int]]:
    ucx = load_ucx()
    options = {"TLS": "self,sm"}
    middle, others = Worker(ucx, options, apart=[1, 2]), [Worker(ucx, options) for _ in range(3)]
    for number, other in enumerate(others):
        middle.connect(number, other.address(), shared_memory=True)
        other.connect(0, middle.address(number), shared_memory=True)

    def heard() -> list[int]:
        """Tags of what came."""
        for number, other in enumerate(others):
            other.send(0, b"x", 1, number)
        found: set[int] = set()
        for _ in range(1000):
            for worker in (middle, *others):
                worker.progress()
            while (probed := middle.probe(0, 0)) is not None:
                found.add(probed[1])
                middle.receive_probed(probed[1], probed[0], bytes(1), 1)
        return sorted(found)

    came = [heard()]
    for gone in (2, 0):
        middle.leave_alone(gone)  # 0 is not apart: others share its worker
        came.append(heard())
    assert any(middle.progress() == 0 and middle.arm() for _ in range(1000)), "it never rests"
    for worker in (middle, *others):
        worker.close(lambda: True)
    return came


def test_ranks_that_are_apart_are_left_alone_one_by_one() -> None:
    assert run_ranks(1, _leave_alone) == [[[0, 1, 2], [0, 1], [0, 1]]]
