"""A rank of part ``links`` of ``benchmarks/multi_gpu_pipeline.py``: the transport between two GPUs, against NCCL."""

from __future__ import annotations

import faulthandler
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from transport import transport_turn
from transport_gpu import check

from trimtab.config import load
from trimtab.transport.interface import Label
from trimtab.transport.opening import group_exchange, open_transport

BETWEEN: Final = tuple(64 << (10 + 2 * step) for step in range(7))
"""64 KiB to 256 MiB."""
STUCK_SECONDS: Final = 40.0
"""After so long in one way a rank says where it is and ends."""
IN_A_ROW: Final = 16
"""Messages one way, or turns, that are timed together."""
Go = Callable[[], None]
Waits = Literal["host", "stream"]


def run_links(device: str, sizes: Sequence[int], seconds: float) -> dict[str, Any]:
    """A rank of two, each with a GPU: seconds one way by way and size, to and fro and many in a row; what was found.

    On a CPU NCCL's place is gloo's. A way that fails is told with its traceback, and the others go on.
    """
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    name = "NCCL" if device == "cuda" else "gloo"
    dist.init_process_group(name.lower())
    gloo = dist.new_group(backend="gloo")
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    found: dict[str, Any] = {"times": {"to and fro": {}, "many one way": {}}, "notes": [], "failures": {}}
    transports: dict[str, Any] = {}
    began = time.perf_counter()
    settings = load(None, os.environ).config.transport
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    for way, kind in (("trimtab, UCX", "ucx"), (f"trimtab, torch ({name})", "torch")):
        try:
            transports[way] = open_transport(kind, rank, 2, group_exchange(gloo), settings, where)  # type: ignore[arg-type]
            found["notes"].append(f"{way}: {check(rank, transports[way], device)}")
        except Exception:
            found["failures"][way] = traceback.format_exc()
    for number, size in enumerate(sizes):
        tensor = torch.ones(size, dtype=torch.uint8, device=where)
        ways: dict[tuple[str, str], tuple[Go, int]] = {
            ("to and fro", f"{name}, the host waits"): (_turn(rank, tensor, "host"), 2),
            ("to and fro", f"{name}, only the stream waits"): (_turn(rank, tensor, "stream"), 2 * IN_A_ROW),
            ("many one way", name): (_row(rank, tensor), IN_A_ROW),
        }
        for way, transport in transports.items():
            ways["to and fro", way] = transport_turn(rank, transport, tensor), 2
            ways["many one way", way] = _transport_row(rank, transport, tensor), IN_A_ROW
        left = began + seconds - time.perf_counter()
        each = max(left, 0.0) / (len(sizes) - number) / len(ways)
        for (what, way), (go, messages) in ways.items():
            if way in found["failures"]:
                continue
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            try:
                found["times"][what].setdefault(way, {})[size] = _median(go, each, gloo) / messages
            except Exception:
                found["failures"][way] = traceback.format_exc()
    for transport in transports.values():
        transport.close()
    dist.barrier(gloo)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return found


def spelled(size: int) -> str:
    """As one reads it."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _median(go: Go, seconds: float, gloo: Any) -> float:
    """Of as many times as fit; rank 0 says how many."""
    for _ in range(2):
        go()
    began = time.perf_counter()
    go()
    count = torch.tensor([max(3, min(int(seconds / (time.perf_counter() - began)), 200))])
    dist.broadcast(count, 0, group=gloo)
    taken: list[float] = []
    for _ in range(int(count)):
        began = time.perf_counter()
        go()
        taken.append(time.perf_counter() - began)
    dist.barrier(gloo)
    return statistics.median(taken)


def _rest(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _turn(rank: int, tensor: torch.Tensor, waits: Waits) -> Go:
    """To and fro; where only the stream waits, several times before the host looks."""
    other = torch.empty_like(tensor)

    def go() -> None:
        for _ in range(1 if waits == "host" else IN_A_ROW):
            for sender in range(2):
                work = dist.isend(tensor, 1) if rank == sender == 0 else None
                work = dist.isend(tensor, 0) if rank == sender == 1 else work
                work = work or dist.irecv(other, 1 - rank)
                assert work is not None
                work.wait()
                if waits == "host":
                    _rest(tensor)
        _rest(tensor)

    return go


def _row(rank: int, tensor: torch.Tensor) -> Go:
    """Many one way at once, and a small one back."""
    others = [torch.empty_like(tensor) for _ in range(IN_A_ROW)] if rank else []
    small = torch.zeros(1, device=tensor.device)

    def go() -> None:
        works = [dist.isend(tensor, 1) for _ in range(IN_A_ROW)] if rank == 0 else []
        works += [dist.irecv(other, 0) for other in others]
        for work in works:
            assert work is not None
            work.wait()
        _rest(tensor)
        back = dist.irecv(small, 1) if rank == 0 else dist.isend(small, 0)
        assert back is not None
        back.wait()
        _rest(tensor)

    return go


def _transport_row(rank: int, transport: Any, tensor: torch.Tensor) -> Go:
    """The same over a transport."""
    small = torch.zeros(1, device=tensor.device)

    def take(many: int) -> None:
        came = 0
        while came < many:
            transport.wait(None)
            for message in transport.poll():
                message.release()
                came += 1

    def go() -> None:
        if rank == 0:
            for number in range(IN_A_ROW):
                transport.send(1, Label(False, 0, number), (tensor,))
            take(1)
        else:
            take(IN_A_ROW)
            transport.send(0, Label(True, 0, 0), (small,))

    return go
