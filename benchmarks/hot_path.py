"""What each recorded thing costs the thread that does it: microseconds a call, attached against not attached.

    python benchmarks/hot_path.py             # everything, some minutes
    python benchmarks/hot_path.py --rounds 5  # quicker and rougher
    python benchmarks/hot_path.py --gpu       # one GPU: marks are CUDA's, communications NCCL's with a group of one

One process and one CPU thread. Each round measures every thing once under every condition (the least of thirty short
goes), so that a busy machine disturbs all alike; a figure is the median over rounds of the difference to the same
round's ``off``. Times are those of the calling thread's CPU clock, which does not run while others have the CPU; with
``--gpu`` they are the wall's, as backward passes run on a thread of their own, and the device is waited for between two
goes.

Most communications go to PyTorch's ``fake`` backend, which does nothing, because the noise of gloo's threads is larger
than what is measured. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

import trimtab
from trimtab.attach import Session
from trimtab.engines.guard import Guard
from trimtab.engines.layers import LayerHooks, Position
from trimtab.events import Kind
from trimtab.record.observe import Call

CONDITIONS = ("off", "python", "native", "unsampled")
Thing = Callable[[], object]


class Layer(torch.nn.Module):
    """As small as a layer can be, under Megatron-Core's names."""

    layer_number = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).sum()


def communications(group: Any, name: str) -> dict[str, Thing]:
    """Each kind of collective on a group."""
    tensor = torch.ones(64, device=_device())
    gathered = torch.empty(64 * dist.get_world_size(group), device=_device())

    def synchronous() -> None:
        dist.all_reduce(tensor, group=group)

    def gather() -> None:
        dist.all_gather_into_tensor(gathered, tensor, group=group)

    def scatter() -> None:
        dist.reduce_scatter_tensor(tensor, gathered, group=group)

    def asynchronous() -> None:
        dist.all_reduce(tensor, group=group, async_op=True).wait()  # pyright: ignore[reportOptionalMemberAccess]

    def functionally() -> None:
        functional.wait_tensor(functional.all_reduce(tensor, "sum", group))

    return {
        f"{name}: all_reduce, synchronous": synchronous,
        f"{name}: all_gather_into_tensor, synchronous": gather,
        f"{name}: reduce_scatter_tensor, synchronous": scatter,
        f"{name}: all_reduce, asynchronous, and its wait": asynchronous,
        f"{name}: functional all_reduce and wait_tensor": functionally,
    }


def messages() -> dict[str, Thing]:
    """Point to point, to a neighbour that is not there."""
    tensor = torch.ones(64)

    def send() -> None:
        dist.isend(tensor, 1).wait()  # pyright: ignore[reportOptionalMemberAccess]

    def receive() -> None:
        dist.recv(tensor, 1)

    return {"fake: isend and its wait": send, "fake: recv": receive}


def data_parallel(group: Any, name: str) -> dict[str, Thing]:
    """Forward and backward of a model with one bucket, which the reducer issues and waits for in C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, device=_device()), process_group=group)
    x = torch.ones(2, 8, device=_device())

    def step() -> None:
        model(x).sum().backward()

    return {f"{name}: DDP, forward and backward, one bucket": step}


def spans(session: Session | None) -> tuple[dict[str, Thing], Callable[[], None]]:
    """What is no communication, and how to take its hooks away."""
    model, position = Model(), Position()
    position.inside = True
    x = torch.ones(8, requires_grad=True, device=_device())
    remove: Callable[[], None] = lambda: None  # noqa: E731
    if session is not None:
        hooks = LayerHooks(session._observer, position, Guard())
        hooks.install(0, model)
        remove = hooks.remove
    call = Call(Kind.FORWARD, "layer", 0, 0, 0)
    parameter = torch.nn.Parameter(torch.ones(1, device=_device()))
    optimizer = torch.optim.SGD([parameter])

    def layer() -> None:
        model(x).backward()

    def observed() -> None:
        if session is not None:
            session._observer.begin(call)
            session._observer.end(call)

    def user() -> None:
        with trimtab.span("block"):
            pass

    things: dict[str, Thing] = {
        "one span: begin and end of a call": observed,
        "a layer's forward and backward, with its hooks (two spans)": layer,
        "an optimizer's step": optimizer.step,
        "a span of the user": user,
    }
    return things, remove


@contextmanager
def attached(condition: str, folder: str) -> Iterator[Session | None]:
    """A session for the condition; None where nothing is attached."""
    if condition == "off":
        yield None
        return
    record: dict[str, Any] = {"dir": folder, "counter_seconds": 0, "native": condition != "python"}
    record["every_steps"] = 1_000_000 if condition == "unsampled" else 1
    session = trimtab.attach(record=record, engine={"name": "torch"})
    # The first step is sampled, and no step begins by itself (as it would after an optimizer's).
    session.step()
    if condition == "unsampled":
        session.step()
    yield session
    session.detach()


def cost(thing: Thing, calls: int, clock: Callable[[], int]) -> float:
    """Microseconds a call by the clock: the least of thirty goes."""
    times: list[float] = []
    for _ in range(30):
        begin = clock()
        for _ in range(calls):
            thing()
        times.append((clock() - begin) / calls / 1e3)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    return min(times)


def measure(calls: int, gloo: Any) -> dict[str, dict[str, float]]:
    """One round: microseconds by condition and thing; ``gloo`` is a group of one rank, None on a GPU."""
    clock = time.thread_time_ns if gloo is not None else time.perf_counter_ns
    found: dict[str, dict[str, float]] = {}
    for condition in CONDITIONS:
        with tempfile.TemporaryDirectory() as folder, attached(condition, folder) as session:
            things, remove = spans(session)
            if gloo is None:
                things |= communications(dist.group.WORLD, "NCCL, one rank")
                things |= data_parallel(dist.group.WORLD, "NCCL, one rank")
            else:
                things |= communications(dist.group.WORLD, "fake") | messages()
                things |= communications(gloo, "gloo, one rank") | data_parallel(gloo, "gloo, one rank")
            found[condition] = {}
            for name, thing in things.items():
                for _ in range(50):
                    thing()
                gc.collect()
                found[condition][name] = cost(thing, calls // 2 if name.startswith("gloo") else calls, clock)
            remove()
    return found


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--calls", type=int, default=50, help="calls a go, of which each round takes the best of thirty"
    )
    parser.add_argument("--gpu", action="store_true", help="one GPU and NCCL")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    gloo = None
    if arguments.gpu:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
        gloo = dist.new_group([0], backend="gloo", use_local_synchronization=True)
    gc.disable()  # collections fall where they fall, and are recorded
    rounds = [measure(arguments.calls, gloo) for _ in range(arguments.rounds)]
    print("| | off | python | native | unsampled step |")
    print("|---|---|---|---|---|")
    for name in rounds[0]["off"]:
        off = statistics.median(found["off"][name] for found in rounds)
        more = [
            statistics.median(found[condition][name] - found["off"][name] for found in rounds)
            for condition in CONDITIONS[1:]
        ]
        print(f"| {name} | {off:.1f} us | " + " | ".join(f"{value:+.1f} us" for value in more) + " |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
