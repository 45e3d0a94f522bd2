"""What each recorded thing costs the thread that does it: microseconds a call, attached against not attached.

    python benchmarks/hot_path.py             # everything, some minutes
    python benchmarks/hot_path.py --rounds 5  # quicker and rougher

One process and one CPU thread. Each round measures every thing once under every condition (the least of thirty short
goes), so that a busy machine disturbs all alike; a figure is the median over rounds of the difference to the same
round's ``off``. Times are those of the calling thread's CPU clock, which does not run while others have the CPU.

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
    tensor = torch.ones(64)
    gathered = torch.empty(64 * dist.get_world_size(group))

    def synchronous() -> None:
        dist.all_reduce(tensor, group=group)

    def gather() -> None:
        dist.all_gather_into_tensor(gathered, tensor, group=group)

    def asynchronous() -> None:
        dist.all_reduce(tensor, group=group, async_op=True).wait()  # pyright: ignore[reportOptionalMemberAccess]

    def functionally() -> None:
        functional.wait_tensor(functional.all_reduce(tensor, "sum", group))

    return {
        f"{name}: all_reduce, synchronous": synchronous,
        f"{name}: all_gather_into_tensor, synchronous": gather,
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


def data_parallel(group: Any) -> dict[str, Thing]:
    """Forward and backward of a model with one bucket, which the reducer issues and waits for in C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    x = torch.ones(2, 8)

    def step() -> None:
        model(x).sum().backward()

    return {"gloo, one rank: DDP, forward and backward, one bucket": step}


def spans(session: Session | None) -> tuple[dict[str, Thing], Callable[[], None]]:
    """What is no communication, and how to take its hooks away."""
    model, position = Model(), Position()
    position.inside = True
    x = torch.ones(8, requires_grad=True)
    remove: Callable[[], None] = lambda: None  # noqa: E731
    if session is not None:
        hooks = LayerHooks(session._observer, position, Guard())
        hooks.install(0, model)
        remove = hooks.remove
    call = Call(Kind.FORWARD, "layer", 0, 0, 0)
    parameter = torch.nn.Parameter(torch.ones(1))
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


def cost(thing: Thing, calls: int) -> float:
    """Microseconds of this thread's CPU time a call: the least of thirty goes."""
    times: list[float] = []
    for _ in range(30):
        begin = time.thread_time_ns()
        for _ in range(calls):
            thing()
        times.append((time.thread_time_ns() - begin) / calls / 1e3)
    return min(times)


def measure(calls: int, gloo: Any) -> dict[str, dict[str, float]]:
    """One round: microseconds by condition and thing."""
    found: dict[str, dict[str, float]] = {}
    for condition in CONDITIONS:
        with tempfile.TemporaryDirectory() as folder, attached(condition, folder) as session:
            things, remove = spans(session)
            things |= communications(dist.group.WORLD, "fake") | messages()
            things |= communications(gloo, "gloo, one rank") | data_parallel(gloo)
            found[condition] = {}
            for name, thing in things.items():
                for _ in range(50):
                    thing()
                gc.collect()
                found[condition][name] = cost(thing, calls // 2 if name.startswith("gloo") else calls)
            remove()
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--calls", type=int, default=50, help="calls a go, of which each round takes the best of thirty"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
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
