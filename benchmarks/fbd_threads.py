"""What ranks as threads cost: python benchmarks/fbd_threads.py [--seconds 2]

A turn: from one thread's wait to the next one's, with what changes hands. A collective: an all-reduce of 4 KiB and of 1
MiB among ranks that are threads of one process, and among processes, both over gloo.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trimtab.engines.threads.megatron import MegatronGlobals
from trimtab.engines.threads.worlds import Worlds
from trimtab.fbd.threads.together import together
from trimtab.fbd.threads.turns import OwnRandom, Switched, Turns

RANKS = (2, 4)
SIZES = (1 << 10, 1 << 18)
"""Elements, float32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    print(f"torch {torch.__version__}, load {os.getloadavg()[0]:.0f}; medians, us")
    print("a turn, with what changes hands:")
    for name, kinds in (("nothing", ()), ("generators", ("random",)), ("all of Megatron-Core", ("random", "all"))):
        print(f"  {name:<22} {turn(kinds, seconds) * 1e6:8.0f}")
    print(f"an all-reduce:  {'ranks':>5} {'KiB':>6} {'threads':>9} {'processes':>10}")
    for ranks in RANKS:
        for size in SIZES:
            beside, apart = in_threads(ranks, size, seconds), in_processes(ranks, size, seconds)
            print(f"{'':<15} {ranks:>5} {size * 4 // 1024:>6} {beside * 1e6:>9.0f} {apart * 1e6:>10.0f}")


def turn(kinds: Sequence[str], seconds: float) -> float:
    """Two threads that hand it to and fro."""
    with Worlds(dist.HashStore()) as worlds:
        switched: list[Switched] = [OwnRandom()] if "random" in kinds else []
        switched += [worlds, MegatronGlobals()] if "all" in kinds else []
        turns = worlds.turns = Turns(2, switched)
        found: list[float] = []

        def run(_: int) -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                begin = time.perf_counter()
                turns.until(lambda: True)
                found.append((time.perf_counter() - begin) / 2)  # there and back

        together(range(2), run, turns)
    return statistics.median(found)


def reductions(size: int, seconds: float) -> float:
    """In a world that is there; the first rank says when it is over."""
    tensor, found = torch.ones(size), list[float]()
    more = torch.ones(1)
    end = time.perf_counter() + seconds
    while float(more):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        found.append(time.perf_counter() - begin)
        tensor.fill_(1.0)
        more.fill_(float(time.perf_counter() < end))
        dist.broadcast(more, 0)
    return statistics.median(found)


def in_threads(ranks: int, size: int, seconds: float) -> float:
    with Worlds(dist.HashStore()) as worlds:
        turns = worlds.turns = Turns(ranks, [OwnRandom(), worlds])

        def run(rank: int) -> float:
            worlds.initialize(rank, ranks)
            return reductions(size, seconds)

        return max(together(range(ranks), run, turns))


def in_processes(ranks: int, size: int, seconds: float) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    started = [
        context.Process(target=process, args=(rank, ranks, port, size, seconds, answers.put)) for rank in range(ranks)
    ]
    for one in started:
        one.start()
    found = [answers.get() for _ in started]
    for one in started:
        one.join()
    return max(found)


def process(rank: int, ranks: int, port: int, size: int, seconds: float, answer: Callable[[Any], None]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    answer(reductions(size, seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
