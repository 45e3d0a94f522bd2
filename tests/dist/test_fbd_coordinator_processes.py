"""The coordinator over gloo: real collectives of several virtual ranks, one lane of communication for each process."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from lanes import Lane

from trimtab.coordinator.exchange import GroupExchange
from trimtab.coordinator.launcher import Coordinator
from trimtab.coordinator.memberships import Memberships

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
WORLD, STEPS = 2, 30
PATIENCE = 60.0
KINDS = 3
"""Virtual ranks of a process; each kind communicates with its like, and all of them together."""


def _virtual_rank(
    rank: int, kind: int, groups: list[Any], lane: Lane, coordinator: Coordinator | None, found: list[float]
) -> None:
    """``STEPS`` sums with its like and with all, in an order of its own within what its program allows."""
    virtual = rank * KINDS + kind
    order = random.Random(kind)  # the same for its like on the other process, another one for other kinds
    total = 0.0
    for step in range(STEPS):
        value = torch.tensor([float(virtual + step)])
        number = kind if order.random() < 0.7 else KINDS + kind

        begun: list[Future[None]] = []

        def begin(value: torch.Tensor = value, number: int = number, begun: list[Future[None]] = begun) -> None:
            begun.append(lane.launch(lambda: dist.all_reduce(value, group=groups[number])))

        if coordinator is None:
            begin()
        else:
            coordinator.post(virtual, number, begin).result(PATIENCE)
        begun[0].result(PATIENCE)
        total += float(value)
    found.append(total)


def _run(rank: int, coordinated: bool, patience: float) -> str | list[float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    members = [tuple(process * KINDS + kind for process in range(WORLD)) for kind in range(KINDS)]
    host = {process * KINDS + kind: process for process in range(WORLD) for kind in range(KINDS)}
    memberships = Memberships((*members, *members), host)
    # new_group is collective and in order; the coordinator's own comes last
    groups = [dist.new_group(timeout=timedelta(seconds=patience)) for _ in range(2 * KINDS + 1)]
    lane, found = Lane(), [[] for _ in range(KINDS)]
    failed: list[BaseException] = []

    def thread(kind: int, coordinator: Coordinator | None) -> None:
        try:
            if coordinator is None and kind == rank % KINDS:
                held.wait(PATIENCE)  # this one comes last on this process, and another on the other
            _virtual_rank(rank, kind, groups, lane, coordinator, found[kind])
        except BaseException as error:
            failed.append(error)

    held = threading.Event()

    def all_of(coordinator: Coordinator | None) -> None:
        threads = [threading.Thread(target=thread, args=(kind, coordinator), daemon=True) for kind in range(KINDS)]
        for one in threads:
            one.start()
        if coordinator is None:
            threads[(rank + 1) % KINDS].join(0.2)
            held.set()
        for one in threads:
            one.join(PATIENCE)

    if coordinated:
        with Coordinator(memberships, rank, GroupExchange(groups[-1])) as coordinator:
            all_of(coordinator)
    else:
        all_of(None)
    if failed:
        return f"{type(failed[0]).__name__}: {failed[0]}"
    return [one for (one,) in found]


def test_virtual_ranks_in_any_order_get_their_sums() -> None:
    first, second = run_ranks(WORLD, _run, True, PATIENCE)
    expected = [sum(2 * kind + KINDS + 2 * step for step in range(STEPS)) for kind in range(KINDS)]
    assert first == second == expected


def test_without_the_coordinator_the_same_program_hangs() -> None:
    """Each lane waits for a collective that the other has behind the one that it waits with: gloo gives up."""
    results = run_ranks(WORLD, _run, False, 3.0)
    assert all(isinstance(one, str) and "imed out" in one for one in results), results
