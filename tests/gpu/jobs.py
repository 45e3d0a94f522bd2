"""Jobs of one process a GPU, started by torchrun: ``python -m tests.gpu.jobs SCENARIO`` is a rank of one.

Each scenario attaches trimtab, trains or communicates, and prints what it measured by itself as one line of JSON, to be
compared with what was recorded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu import training
from torch.distributed import distributed_c10d

import trimtab

MIB = 1 << 20
ROUNDS = 60


def _busy(milliseconds: float) -> None:
    """Queue work without memory traffic, so that the host is ahead of the device."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))


def _started(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def ends(folder: str) -> dict[str, Any]:
    """Asynchronous collectives behind queued work; NCCL's own durations of them."""
    os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
    session = trimtab.attach(record={"dir": folder})
    dist.init_process_group("nccl")
    tensors = [torch.ones(size * MIB // 4, device="cuda") for size in (1, 16, 128)]
    works: list[Any] = []
    for number in range(ROUNDS):
        session.step()
        _busy(3)
        work = _started(tensors[number % 3])
        _busy(1)
        work.wait()
        works.append(work)
    torch.cuda.synchronize()
    durations = [work._get_duration() for work in works]
    session.detach()
    return {"durations_ms": durations}


def messages(folder: str) -> dict[str, Any]:
    """Single and batched sends and receives round the ring, and coalesced collectives."""
    session = trimtab.attach(record={"dir": folder})
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    out, into = torch.full((4 * MIB,), float(rank), device="cuda"), torch.empty(4 * MIB, device="cuda")
    many = [torch.ones(MIB, device="cuda") for _ in range(3)]
    for _ in range(20):
        session.step()
        _busy(3)
        batch = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)]
        works: list[Any] = list(dist.batch_isend_irecv(batch))
        for work in works:
            work.wait()
        _busy(2)
        if rank % 2 == 0:
            works = [dist.isend(out, right), dist.irecv(into, left)]
        else:
            works = [dist.irecv(into, left), dist.isend(out, right)]
        for work in works:
            work.wait()
        _busy(2)
        with distributed_c10d._coalescing_manager(async_ops=True, device=torch.device("cuda")) as manager:
            for tensor in many:
                dist.all_reduce(tensor)
        manager.wait()
    torch.cuda.synchronize()
    session.detach()
    return {"received": float(into[0]), "left": float(left)}


def memory(folder: str) -> dict[str, Any]:
    """Peak memory of a job whose host runs far ahead, with trimtab and without."""
    dist.init_process_group("nccl")
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(60):
            buffer = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").zero_()
            for _ in range(5):
                torch.mm(weight, weight)
            work = _started(buffer)
            work.wait()
            del buffer, work
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()

    peak()
    without = peak()
    free_before, _ = torch.cuda.mem_get_info()
    session = trimtab.attach(record={"dir": folder})
    attached = peak()
    torch.cuda.empty_cache()
    free_after, _ = torch.cuda.mem_get_info()
    session.detach()
    return {"without": without, "attached": attached, "device_bytes": free_before - free_after}


def graphs(folder: str) -> dict[str, Any]:
    """A CUDA graph is captured in the default, global mode while the recorder's writer is at work."""
    session = trimtab.attach(record={"dir": folder, "flush_seconds": 0.01})
    x = torch.zeros(1 << 16, device="cuda")
    for _ in range(5):
        session.step()
        x = x + 1
    torch.cuda.synchronize()
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    given = torch.randn(8, 256, device="cuda")
    expected = model(given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(given)
    torch.cuda.current_stream().wait_stream(side)
    captures = 0
    deadline = time.perf_counter() + 2.0
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(given)
        captures += 1
        if time.perf_counter() > deadline:
            break
    for _ in range(7):
        session.step()
        graph.replay()
    torch.cuda.synchronize()
    same = bool(torch.equal(result, expected))
    session.detach()
    return {"same": same, "captures": captures}


def marks(folder: str) -> dict[str, Any]:
    """Spans of layers on a side stream and from autograd's thread against events of the job's own."""
    session = trimtab.attach(record={"dir": folder})
    layers = torch.nn.ModuleList([torch.nn.Linear(4096, 4096, bias=False) for _ in range(3)]).cuda().bfloat16()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = Model()
    session.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    times: list[float] = []
    for _ in range(400):
        session.step()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(_SIDE.setdefault("stream", torch.cuda.Stream())):
            _busy(1)
            begin.record()
            out = model(data)
            end.record()
            out.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        times.append(0.0)
        torch.cuda.synchronize()
        times[-1] = begin.elapsed_time(end)
    session.detach()
    return {"forward_ms": times}


def ways(folder: str) -> dict[str, Any]:
    """Every way of training that plain PyTorch offers; what the Flight Recorder counts."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "20000"
    session = trimtab.attach(record={"dir": folder})
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    counts = {way: dict(training.train(session, way)) for way in training.WAYS}
    session.detach()
    return counts


def live(folder: str) -> dict[str, Any]:
    """Steps for a hub to hear of, and at the end a collective that the device comes to only after seconds."""
    told = {"look_seconds": 0.1, "heartbeat_seconds": 0.5}
    session = trimtab.attach(
        record={"dir": folder, "flush_seconds": 0.1}, live=told, control={"transport": "tcp"}, engine={"name": "torch"}
    )
    dist.init_process_group("nccl")
    tensor = torch.ones(MIB, device="cuda")
    for _ in range(ROUNDS):
        session.step()
        _busy(50)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    session.step()
    _busy(4000)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    session.detach()
    return {"last": ROUNDS}


_SIDE: dict[str, torch.cuda.Stream] = {}
SCENARIOS: dict[str, Callable[[str], dict[str, Any]]] = {
    job.__name__: job for job in (ends, messages, memory, graphs, marks, ways, live)
}


def main() -> None:
    """One rank."""
    scenario, folder = sys.argv[1:]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    result = SCENARIOS[scenario](folder)
    sys.stdout.write(f"RESULT {os.environ['RANK']} {json.dumps(result)}\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
