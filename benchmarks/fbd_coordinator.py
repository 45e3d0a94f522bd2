"""What a round of the coordinator takes: python benchmarks/fbd_coordinator.py [--processes 2] [--seconds 2]

Virtual ranks are spread over processes of this machine, in groups of eight and in groups across these. A round is: look
at what waits, combine the vectors (an all-reduce over gloo), find what is ready. Also: what an all-reduce of one byte
takes by itself, interleaved, as that is the least that any such agreement costs; and from a post to its launch.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import torch
import torch.distributed as dist

from trimtab.coordinator.exchange import GroupExchange
from trimtab.coordinator.launcher import Coordinator
from trimtab.coordinator.memberships import Memberships
from trimtab.coordinator.rounds import Rounds

SIZES = (8, 64, 512)
GROUP = 8


def memberships_of(virtual: int, processes: int) -> Memberships:
    """Groups of neighbours, and groups of every eighth: each virtual rank is in two."""
    host = {rank: rank * processes // virtual for rank in range(virtual)}
    near = [tuple(range(begin, begin + GROUP)) for begin in range(0, virtual, GROUP)]
    far = [tuple(range(begin, virtual, GROUP)) for begin in range(GROUP)]
    return Memberships((*near, *far), host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    arguments = [(rank, options.processes, port, options.seconds) for rank in range(options.processes)]
    others = [context.Process(target=measure, args=one) for one in arguments[1:]]
    for one in others:
        one.start()
    measure(*arguments[0])
    for one in others:
        one.join()


def measure(rank: int, processes: int, port: int, seconds: float) -> None:
    """One process; the first prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    rows = [row for virtual in SIZES for row in of_size(rank, processes, virtual, seconds)]
    if rank == 0:
        print(f"{processes} processes, torch {torch.__version__}; medians, us")
        print(
            f"{'virtual ranks':>13} {'bits':>6} {'one byte':>9} {'round':>8} {'of it own work':>15} "
            f"{'post to launch':>15}"
        )
        for row in rows:
            print(f"{row[0]:>13} {row[1]:>6} {row[2]:>9.0f} {row[3]:>8.0f} {row[4]:>15.0f} {row[5]:>15.0f}")
    dist.destroy_process_group()


def of_size(rank: int, processes: int, virtual: int, seconds: float) -> Iterator[tuple[Any, ...]]:
    """A row of the table."""
    memberships = memberships_of(virtual, processes)
    exchange = GroupExchange(None)
    rounds = Rounds(memberships, rank)
    own = [one for one, host in memberships.host.items() if host == rank]
    for one in own:  # all of them wait, for groups that are not complete: the most that a round has to look at
        rounds.post(one, one // GROUP, lambda: None)
    byte: list[float] = []
    whole: list[float] = []
    inner: list[float] = []
    began = time.perf_counter()
    while exchange.combine([int(time.perf_counter() - began < seconds)])[0]:
        byte.append(timed(lambda: exchange.combine([0])))
        whole.append(timed(lambda: rounds.agreed(quiet(exchange.combine(rounds.vector())))))
        inner.append(timed(lambda: rounds.agreed(quiet(rounds.vector()))))
    latency = latencies(memberships, rank, own, seconds)
    median = statistics.median
    yield virtual, memberships.bits, median(byte) * 1e6, median(whole) * 1e6, median(inner) * 1e6, median(latency) * 1e6


def quiet(bits: list[int]) -> list[int]:
    """With nothing ready, so that what waits goes on waiting."""
    return [0] * len(bits)


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def latencies(memberships: Memberships, rank: int, own: list[int], seconds: float) -> list[float]:
    """From the post of this process's last member to the launch, for groups across processes; one at a time."""
    across = [
        group for group, members in enumerate(memberships.groups) if len({memberships.host[m] for m in members}) > 1
    ]
    group = across[-1]
    mine = [one for one in own if one in memberships.groups[group]]
    found: list[float] = []
    count = max(20, int(50 * seconds))
    with Coordinator(memberships, rank, GroupExchange(None)) as coordinator:
        for _ in range(count):
            begin = time.perf_counter()
            launched: list[float] = []
            tickets = [
                coordinator.post(one, group, lambda launched=launched: launched.append(time.perf_counter()))
                for one in mine
            ]
            wait(tickets)
            found.append(max(launched) - begin)
    return found


if __name__ == "__main__":
    main()
