"""Groups of threads of several processes: every collective that Megatron-Core makes, and an order of launches that the
coordinator agrees on."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from trimtab.coordinator.exchange import exchange_among
from trimtab.coordinator.rounds import Pace
from trimtab.engines.threads.worlds import Worlds
from trimtab.fbd.threads.agreed import AgreedLaunches
from trimtab.fbd.threads.group import Launcher
from trimtab.fbd.threads.together import together
from trimtab.fbd.threads.turns import OwnRandom, Turns

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
PATIENCE, STEPS = 30.0, 25
WORLD, PROCESSES = 4, 2
GROUPS = [(0, 2), (1, 3)]
"""Of threads 0 and 1 of one process with 2 and 3 of the other."""


def collectives() -> list[Any]:
    """In a world of four that is there: one of each kind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(4.0) + 10 * rank
    summed, greatest, from_second = mine.clone(), mine.clone(), mine.clone()
    dist.all_reduce(summed)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    dist.broadcast(from_second, 1)
    gathered, listed = torch.empty(4 * size), [torch.empty(4) for _ in range(size)]
    dist.all_gather_into_tensor(gathered, mine)
    dist.all_gather(listed, mine)
    scattered = torch.empty(1)
    dist.reduce_scatter_tensor(scattered, mine)
    exchanged = torch.empty(4)
    dist.all_to_all_single(exchanged, mine)
    later = mine.clone()
    work = dist.all_reduce(later, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    dist.barrier()
    others = [dist.new_group(list(one)) for one in GROUPS]
    partner = mine.clone()
    dist.all_reduce(partner, group=others[rank % 2])
    assert dist.get_rank(others[rank % 2]) == rank // 2
    found = [summed, greatest, from_second, gathered, *listed, scattered, exchanged, later, partner]
    return [one.tolist() for one in found]


def _process(rank: int) -> list[Any]:
    del rank
    dist.init_process_group("gloo")
    return collectives()


def _threads(process: int) -> list[Any]:
    """Twice: one world after the other, and the process's own is there before and afterwards."""
    dist.init_process_group("gloo")
    hook, found = sys.excepthook, list[Any]()
    for number in range(2):
        store = dist.PrefixStore(f"threads-{number}", dist.distributed_c10d._get_default_store())
        with Worlds(store, PATIENCE) as worlds:
            turns = worlds.turns = Turns(2, [OwnRandom(), worlds])

            def run(rank: int, worlds: Worlds = worlds) -> list[Any]:
                worlds.initialize(rank, WORLD)
                return collectives()

            found.append(together(range(2 * process, 2 * process + 2), run, turns))
        assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (PROCESSES, process, "gloo")
        assert sys.excepthook is hook
    dist.barrier()
    assert found[0] == found[1]
    return found[0]


def test_collectives_are_those_of_processes() -> None:
    apart = run_ranks(WORLD, _process)
    beside = [one for process in run_ranks(PROCESSES, _threads) for one in process]
    assert beside == apart


class Noting:
    """Writes down in which order this process launches."""

    def __init__(self, agreed: AgreedLaunches) -> None:
        self._agreed = agreed
        self.order: list[int] = []

    def __call__(self, ranks: tuple[int, ...], rank: int) -> Launcher | None:
        launcher = self._agreed(ranks, rank)
        if launcher is None:
            return None

        def noting(launch: Any) -> Any:
            def launched() -> None:
                self.order.append(GROUPS.index(ranks))
                launch()

            return launcher(launched)

        return noting


def _agreed(process: int) -> list[Any]:
    """Threads that do not wait for each other reach their collectives in any order, which differs from process to
    process."""
    dist.init_process_group("gloo")
    everybody: Any = dist.group.WORLD
    exchange = exchange_among(everybody, PATIENCE)
    host = {rank: rank // 2 for rank in range(WORLD)}
    with AgreedLaunches(GROUPS, host, process, exchange, Pace(20e-6, 1e-3)) as agreed:
        noting = Noting(agreed)
        store = dist.PrefixStore("agreed", dist.distributed_c10d._get_default_store())
        with Worlds(store, PATIENCE, noting) as worlds:
            turns = worlds.turns = Turns(2, [OwnRandom(), worlds])
            first = threading.Event()

            def run(rank: int) -> list[float]:
                worlds.initialize(rank, WORLD)
                groups = [dist.new_group(list(one)) for one in GROUPS]
                own, sums = groups[rank % 2], list[float]()
                if rank % 2 == process:  # this one comes first here, and the other there
                    first.set()
                    turns.notify()
                assert turns.until(first.is_set, PATIENCE)
                for step in range(STEPS):
                    value = torch.tensor([float(rank + step)])
                    dist.all_reduce(value, group=own)
                    sums.append(float(value))
                return sums

            sums = together(range(2 * process, 2 * process + 2), run, turns)
    return [sums, noting.order]


def test_processes_launch_collectives_of_their_threads_in_one_order() -> None:
    (first, order), (second, other) = run_ranks(PROCESSES, _agreed)
    assert first == second == [[float(2 * step + 2 + 2 * kind) for step in range(STEPS)] for kind in range(2)]
    assert order == other
    assert sorted(order) == [0] * STEPS + [1] * STEPS
