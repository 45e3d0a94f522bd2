"""The transport between two processes of this machine, against isend and irecv of gloo: benchmarks/transport.md.

Messages go to and fro, and half of that time is the one way time. All ways are measured in turns, size by size and
round by round, in the same two processes; the table has medians over all rounds. ``python benchmarks/transport.py``
takes two minutes on two idle cores; ``--rounds 1`` is for a look.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist

from trimtab.config import TransportConfig
from trimtab.transport.interface import Label, Message
from trimtab.transport.opening import group_exchange, open_transport

SIZES: Final = (1 << 10, 128 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
NAMES: Final = ("1 KiB", "128 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB")
WAYS: Final = {
    "UCX, shared memory": {"UCX_TLS": "self,posix"},
    "UCX, CMA": {"UCX_TLS": "self,sm"},
    "UCX, TCP": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
}
GLOO: Final = "gloo isend/irecv"
TORCH: Final = "torch (gloo)"
ROUNDS: Final = 7
SECONDS: Final = 0.25
"""For each way and size in a round, but at least four times to and fro."""
MANY, EACH = 16, 256 << 10


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ucx-library", default="")
    arguments = parser.parse_args()
    times, reverse = two_ranks("fork", _rank, arguments.rounds, arguments.ucx_library)
    sys.stdout.write(table(times) + "\n\n" + reverse_table(reverse) + "\n")


def two_ranks(start: str, rank_main: Callable[..., None], *arguments: Any) -> Any:
    """What rank 0 sends: ``rank_main(rank, port, *arguments, pipe)`` in two processes, started by fork or spawn."""
    context = multiprocessing.get_context(start)
    here, there = context.Pipe()
    port = free_port()
    ranks = [context.Process(target=rank_main, args=(rank, port, *arguments, there)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        while not here.poll(1.0):
            if any(process.exitcode for process in ranks):
                sys.exit("a rank has failed")
        return here.recv()
    finally:
        for process in ranks:
            process.join(20)
            process.kill()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def table(times: dict[tuple[str, int], list[float]]) -> str:
    """Medians as a table: one way times of the smallest size, GB/s of the others, and how often gloo's."""
    ways = list(dict.fromkeys(way for way, _ in times))
    lines = [f"| one way | {' | '.join(NAMES)} |", f"|---{'|---' * len(NAMES)}|"]
    for way in ways:
        cells: list[str] = []
        for size in SIZES:
            seconds = statistics.median(times[way, size])
            ratio = statistics.median(times[GLOO, size]) / seconds if (GLOO, size) in times else 0.0
            value = f"{seconds * 1e6:.1f} us" if size == SIZES[0] else f"{size / seconds / 1e9:.1f}"
            cells.append(value if way == GLOO or not ratio else f"{value} ({ratio:.1f}x)")
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def reverse_table(reverse: dict[str, list[float]]) -> str:
    """Medians of the exchange in reverse order."""
    lines = [f"| {MANY} x {EACH >> 10} KiB each way at once, taken in reverse order | ms |", "|---|---|"]
    lines += [f"| {way} | {statistics.median(seconds) * 1e3:.2f} |" for way, seconds in reverse.items()]
    return "\n".join(lines)


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """UCX reads its environment when a transport is opened."""
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        os.environ.pop(name, None)
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)


def _rank(rank: int, port: int, rounds: int, library: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    transports = open_all(rank, library)
    times: dict[tuple[str, int], list[float]] = {}
    reverse: dict[str, list[float]] = {}
    for _ in range(rounds):
        for size in SIZES:
            tensor = torch.ones(size, dtype=torch.uint8)
            turn = {GLOO: gloo_turn(rank, tensor)}
            turn |= {way: transport_turn(rank, transport, tensor) for way, transport in transports.items()}
            for way, go in turn.items():
                times.setdefault((way, size), []).extend(_timed(go))
        exchanges = {GLOO: gloo_reverse(rank)}
        exchanges |= {way: transport_reverse(rank, transport) for way, transport in transports.items()}
        for way, exchange in exchanges.items():
            for _ in range(5):
                dist.barrier()
                began = time.perf_counter()
                exchange()
                reverse.setdefault(way, []).append(time.perf_counter() - began)
    for transport in transports.values():
        transport.close()
    if rank == 0:
        pipe.send((times, reverse))
    dist.barrier()
    dist.destroy_process_group()


def open_all(rank: int, library: str = "", device: str = "cpu") -> dict[str, Any]:
    """A transport for each way that there is."""
    transports: dict[str, Any] = {}
    for way, changes in WAYS.items():
        with environment(changes):
            settings = TransportConfig("ucx", library)
            transports[way] = open_transport("ucx", rank, 2, group_exchange(), settings, device)
    transports[TORCH] = open_transport("torch", rank, 2, group_exchange(), TransportConfig("torch"), device)
    return transports


def _timed(go: Callable[[], None]) -> list[float]:
    """One way times, as many as fit; rank 0 says how many."""
    for _ in range(2):
        go()
    began = time.perf_counter()
    go()
    count = torch.tensor([max(4, min(int(SECONDS / (time.perf_counter() - began)), 400))])
    dist.broadcast(count, 0)
    taken: list[float] = []
    for _ in range(int(count)):
        began = time.perf_counter()
        go()
        taken.append((time.perf_counter() - began) / 2)
    dist.barrier()
    return taken


def gloo_turn(rank: int, tensor: torch.Tensor) -> Callable[[], None]:
    """To and fro over gloo."""
    other = torch.empty_like(tensor)

    def go() -> None:
        if rank == 0:
            dist.isend(tensor, 1).wait()
            dist.irecv(other, 1).wait()
        else:
            dist.irecv(other, 0).wait()
            dist.isend(tensor, 0).wait()

    return go


def transport_turn(rank: int, transport: Any, tensor: torch.Tensor) -> Callable[[], None]:
    """To and fro over a transport."""

    def take() -> None:
        transport.wait(None)
        (message,) = transport.poll()
        message.release()

    def go() -> None:
        if rank == 0:
            transport.send(1, Label(False, 0, 0), (tensor,))
            take()
        else:
            take()
            transport.send(0, Label(True, 0, 0), (tensor,))

    return go


def gloo_reverse(rank: int) -> Callable[[], None]:
    """Many each way, with tags, received in the reverse order."""
    out = [torch.ones(EACH, dtype=torch.uint8) for _ in range(MANY)]
    back = [torch.empty(EACH, dtype=torch.uint8) for _ in range(MANY)]

    def exchange() -> None:
        works = [dist.isend(tensor, 1 - rank, tag=tag) for tag, tensor in enumerate(out)]
        works += [dist.irecv(back[tag], 1 - rank, tag=tag) for tag in reversed(range(MANY))]
        for work in works:
            assert work is not None
            work.wait()

    return exchange


def transport_reverse(rank: int, transport: Any) -> Callable[[], None]:
    """Many each way, on four channels, taken in the reverse order."""
    out = [torch.ones(EACH, dtype=torch.uint8) for _ in range(MANY)]

    def exchange() -> None:
        for tag, tensor in enumerate(out):
            transport.send(1 - rank, Label(tag % 2 == 1, tag // 2 % 2, tag), (tensor,))
        came: dict[int, Message] = {}
        while len(came) < MANY:
            transport.wait(None)
            came |= {message.label.microbatch: message for message in transport.poll()}
        for tag in reversed(range(MANY)):
            came[tag].release()
        transport.drain(10.0)

    return exchange


if __name__ == "__main__":
    main()
