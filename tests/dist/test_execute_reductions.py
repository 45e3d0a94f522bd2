"""Replicas that complete their chunks in different orders, on devices that reduce one after the other: launched as they
are complete, reductions wait for each other for ever; in an order that the replicas agree on they do not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks
from lanes import Lane

from trimtab.coordinator.exchange import exchange_among
from trimtab.coordinator.order import AgreedOrder
from trimtab.pipeline.actions import Work
from trimtab.pipeline.execute.replicas import ChunkReductions
from trimtab.pipeline.orders import make_plan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]
CHUNKS, MICROBATCHES, STEPS, PATIENCE = 3, 4, 4, 30.0


class AsComplete:
    """Lets everything begin as it is reached."""

    def __init__(self) -> None:
        self._reached: list[int] = []

    def reached(self, thing: int) -> None:
        self._reached.append(thing)

    def ready(self) -> list[int]:
        found, self._reached = self._reached, []
        return found

    rest = ready


def _replica(rank: int, agree: bool, patience: float, dies: bool = False) -> list[Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    everybody: Any = dist.group.WORLD
    groups = [dist.new_group(timeout=timedelta(seconds=patience)) for _ in range(CHUNKS + 1)]
    order: Any = AsComplete()
    if agree:
        order = AgreedOrder(CHUNKS + 1, rank, dist.get_world_size(), exchange_among(everybody, PATIENCE), PATIENCE)
    lane, begun, sums = Lane(), list[int](), list[float]()
    plan = make_plan("interleaved", (2, CHUNKS, MICROBATCHES))
    for step in range(STEPS):
        gradients = [torch.full((8,), float(rank + chunk + step)) for chunk in range(CHUNKS + 1)]
        under_way: list[Any] = []

        def start(chunk: int, gradients: Any = gradients, under_way: Any = under_way) -> None:
            begun.append(chunk)
            under_way.append(lane.launch(lambda: dist.all_reduce(gradients[chunk], group=groups[chunk])))

        reductions = ChunkReductions(start, order)
        reductions.expect(plan, 0)
        left = [action for action in plan.actions[0] if action.work in (Work.W, Work.BW)]
        left.sort(key=lambda one: one.chunk, reverse=bool((rank + step) % 2))
        for action in left:
            if dies and rank == 1 and step == 2:
                raise ValueError("this replica cannot go on")
            reductions.begin(action)
            reductions.end(action)
        reductions.complete(CHUNKS)
        for one in under_way:
            one.result(PATIENCE)
        sums += [float(one.sum()) for one in gradients]
    if agree:
        order.close()
    return [sums, begun]


def test_in_an_agreed_order_all_are_reduced() -> None:
    (sums, begun), (others, order) = run_ranks(2, _replica, True, PATIENCE)
    assert sums == others == [8.0 * (1 + 2 * (chunk + step)) for step in range(STEPS) for chunk in range(CHUNKS + 1)]
    assert begun == order
    assert len(begun) == STEPS * (CHUNKS + 1)


def test_begun_as_they_are_complete_they_hang() -> None:
    with pytest.raises(RankError, match="imed out"):
        run_ranks(2, _replica, False, 2.0)


def test_a_replica_that_fails_is_an_error_of_the_other() -> None:
    with pytest.raises(RankError) as refused:
        run_ranks(2, _replica, True, PATIENCE, True, timeout=20)
    text = str(refused.value)
    assert "this replica cannot go on" in text
    assert text.count("--- rank") == 2
    assert "RuntimeError" in text
