"""The transport between two processes with GPUs, over CUDA IPC: benchmarks/transport.md.

``python benchmarks/transport_gpu.py`` needs a CUDA GPU and UCX with CUDA (the wheel libucx-cu12 or libucx-cu13). Two
processes share the GPU by time slices unless the MPS daemon runs; ``--mps`` starts one for this run and ends it again.
Between two GPUs, against NCCL: ``python benchmarks/multi_gpu_pipeline.py --only links``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transport import NAMES, SIZES, two_ranks

from trimtab.config import TransportConfig
from trimtab.transport.interface import Label, Message
from trimtab.transport.opening import group_exchange, open_transport

MANY, EACH = 16, 1 << 20


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size")
    parser.add_argument("--mps", action="store_true")
    parser.add_argument("--ucx-library", default="")
    arguments = parser.parse_args()
    with _mps() if arguments.mps else _nothing():
        # CUDA does not survive a fork
        times, checked = two_ranks("spawn", _rank, arguments.seconds, arguments.ucx_library)
    sys.stdout.write(f"| one way{', MPS' if arguments.mps else ''} | {' | '.join(NAMES)} |\n|---{'|---' * 6}|\n")
    cells = [f"{seconds * 1e6:.0f} us, {size / seconds / 1e9:.1f} GB/s" for size, seconds in times.items()]
    sys.stdout.write(f"| UCX, cuda_ipc | {' | '.join(cells)} |\n\n{checked}\n")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _mps() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="trimtab-mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def _rank(rank: int, port: int, seconds: float, library: str, pipe: Any) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.cuda.set_device(0)
    transport = open_transport("ucx", rank, 2, group_exchange(), TransportConfig("ucx", library), "cuda:0")
    checked = check(rank, transport)
    times = {size: _measure(rank, transport, size, seconds) for size in SIZES}
    transport.close()
    if rank == 0:
        pipe.send((times, checked))
    dist.barrier()
    dist.destroy_process_group()


def _next(transport: Any) -> Message:
    transport.wait(None)
    (message,) = transport.poll()
    return message


def check(rank: int, transport: Any, device: str = "cuda") -> str:
    """Contents are right when the sender sends the last microbatch first, each as soon as its kernel has run."""
    generator = torch.Generator(device=device).manual_seed(1)
    wanted = torch.randint(0, 256, (MANY, EACH), dtype=torch.uint8, device=device, generator=generator)
    came: dict[int, Message] = {}
    for tag in reversed(range(MANY)):
        tensor = wanted[tag] ^ rank
        ready = None
        if device == "cuda":
            made = torch.cuda.Event()
            made.record()
            ready = made.query
        transport.send(1 - rank, Label(bool(tag % 2), tag // 2 % 2, tag), (tensor,), ready=ready)
        del tensor
    while len(came) < MANY:
        transport.wait(None)
        came |= {message.label.microbatch: message for message in transport.poll()}
    right = [bool((came[tag].take()[0] == wanted[tag] ^ (1 - rank)).all()) for tag in range(MANY)]
    for message in came.values():
        message.release()
    transport.drain(20.0)
    if not all(right):
        raise RuntimeError(f"wrong contents: {right}")
    return f"{MANY} x {EACH >> 20} MiB each way in reverse order: contents right"


def _measure(rank: int, transport: Any, size: int, seconds: float) -> float:
    """Median one way time."""
    tensor = torch.ones(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    taken: list[float] = []
    stop = False
    began = time.perf_counter()
    while not stop:
        # the microbatch says whether this is the last one, so that both stop together
        last = rank == 0 and time.perf_counter() - began > seconds and len(taken) >= 10
        start = time.perf_counter()
        if rank == 0:
            transport.send(1, Label(False, 0, int(last)), (tensor,))
            message = _next(transport)
            stop = last
        else:
            message = _next(transport)
            stop = bool(message.label.microbatch)
            transport.send(0, Label(True, 0, 0), (tensor,))
        message.release()
        taken.append((time.perf_counter() - start) / 2)
    transport.drain(20.0)
    return statistics.median(taken[3:])


if __name__ == "__main__":
    main()
