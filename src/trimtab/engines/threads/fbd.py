"""Forward ranks of Megatron-Core as threads: several of them in each forward process, backward ranks one a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from trimtab.engines.megatron_fbd.job import FbdJob, Seat
from trimtab.engines.megatron_fbd.settings import Settings
from trimtab.engines.megatron_fbd.worlds import World, divide, store_exchange
from trimtab.engines.threads.megatron import MegatronGlobals
from trimtab.engines.threads.worlds import Worlds
from trimtab.fbd.ranks import Layout, Placement, Role, VirtualRank
from trimtab.fbd.split.random_states import RandomStates
from trimtab.fbd.threads.routes import Routes
from trimtab.fbd.threads.together import together as threads_together
from trimtab.fbd.threads.turns import OwnRandom, Turns

_Result = TypeVar("_Result")
Main = Callable[[FbdJob, Callable[[], None]], _Result]
"""What a rank does, with its job and with what makes torch.distributed's world of its role."""


def run(settings: Settings, together: int, main: Main[_Result], device: torch.device | str = "cpu") -> list[_Result]:
    """Be the ranks of this process, ``together`` of them where they are forward ranks, each in a thread.

    ``main`` is called once for each, with its :class:`FbdJob`, which is closed for it afterwards, and with a function
    to call in the place of ``torch.distributed.init_process_group``. After that it goes on as in a process of its own:
    ``initialize_model_parallel`` (on forward ranks with ``create_gloo_process_groups=False``), the model,
    :meth:`FbdJob.schedule`.

    Args:
        device: of this process; where what is received lies.

    Returns:
        What ``main`` returned, in order of the ranks.

    Raises:
        ValueError: the job cannot be laid out so, was not started by a launcher, or has begun.
        BaseException: whatever ``main`` raises; the other threads of the process end, too.
    """
    world = divide(lambda processes: _layout(settings, processes, together), settings.opening, together)
    placement = world.placement
    try:
        exchange = store_exchange(world.store, world.process, placement.world, "routes")
        transport = world.open(settings, exchange, device)
        hosted = placement.hosted(world.process)
        if world.rank.role is Role.BACKWARD or len(hosted) == 1:
            with Routes(transport, placement) as routes:
                return [_alone(settings, world, routes, main, torch.device(device))]
        return _in_threads(settings, world, transport, main, torch.device(device))
    finally:
        world.restore()


def _layout(settings: Settings, processes: int, together: int) -> Layout:
    """Of a job of so many processes. ValueError where there is none."""
    one = settings.layout_of_one
    each = one.count(Role.FORWARD) + one.count(Role.BACKWARD)
    for replicas in range(1, processes + 1):
        layout = settings.layout(each * replicas)
        count = layout.count(Role.FORWARD)
        if count % together == 0 and Placement(layout, together).world == processes:
            return layout
    raise ValueError(
        f"{processes} processes cannot be divided: {one.count(Role.BACKWARD)} backward ranks and "
        f"{one.count(Role.FORWARD)} forward ranks ({together} a process) for each replica"
    )


def _alone(settings: Settings, world: World, routes: Routes, main: Main[_Result], device: torch.device) -> _Result:
    def initialize() -> None:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    seat = Seat(_place(world, world.rank, world.store), routes.of(world.rank))
    with FbdJob(settings, seat) as job:
        return main(job, initialize)


def _in_threads(
    settings: Settings, world: World, transport: Any, main: Main[_Result], device: torch.device
) -> list[_Result]:
    layout, hosted = world.placement.layout, world.placement.hosted(world.process)
    generators = OwnRandom(RandomStates([device.index or 0] if device.type == "cuda" else []))
    with Worlds(PrefixStore("forwards", world.store), settings.patience) as worlds:
        turns = worlds.turns = Turns(len(hosted), [generators, worlds, MegatronGlobals()])
        with Routes(transport, world.placement, turns) as routes:

            def one(rank: VirtualRank) -> _Result:
                def initialize() -> None:
                    worlds.initialize(layout.number(rank), layout.count(Role.FORWARD))

                store = _TurnsStore(world.store.clone(), turns)
                with FbdJob(settings, Seat(_place(world, rank, store), routes.of(rank))) as job:
                    return main(job, initialize)

            return threads_together(hosted, one, turns)


def _place(world: World, rank: VirtualRank, store: Any) -> World:
    """As if each rank had a process."""
    single = Placement(world.placement.layout)
    return replace(world, process=single.process(rank), placement=single, rank=rank, store=store, outside={})


class _TurnsStore:
    """A thread's client of a store: others compute while it waits for a key."""

    def __init__(self, store: Any, turns: Turns) -> None:
        self._store = store
        self._turns = turns

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with self._turns.given_up():
            return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)
