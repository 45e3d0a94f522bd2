"""One job becomes two: forward ranks and backward ranks, each a world of its own, as a launcher would have made it.

Backward ranks alone are an ordinary job of Megatron-Core, and so are forward ranks: each role initialises
torch.distributed and Megatron's parallel state for itself. What a process knows of its world it has from the
environment, which is rewritten before; nothing is patched. Between the roles there is trimtab's transport alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from trimtab.engines.megatron_fbd.settings import Settings
from trimtab.fbd.ranks import Layout, Placement, Role, VirtualRank
from trimtab.transport.interface import Transport
from trimtab.transport.opening import Exchange, open_transport

_KEPT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@dataclass(frozen=True, slots=True)
class World:
    """This process's place."""

    process: int
    """Number over both roles."""
    placement: Placement
    rank: VirtualRank
    store: Any
    """Of all processes; a :class:`torch.distributed.Store`."""
    held: Any
    """The store of the role, where this process serves it."""
    outside: dict[str, str | None]
    """The environment before."""

    @property
    def size(self) -> int:
        """Processes of both roles."""
        return self.placement.world

    def open(self, settings: Settings, exchange: Exchange, device: torch.device | str) -> Transport:
        """The transport between all processes, for tensors of ``device``. Collective; raises as :func:`open_transport`
        does."""
        apart = self.placement.forwards if settings.when_lost == "continue" else ()
        found = settings.transport
        return open_transport(
            found.kind, self.process, self.size, exchange, found, device, store=self.store, apart=apart
        )

    def restore(self) -> None:
        """The environment as it was."""
        for name, value in self.outside.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def divide(layout_of: Callable[[int], Layout], timeout: float, together: int = 1) -> World:
    """Meet all processes of the launcher, and make this one's environment that of its role. ``together``: forward ranks
    of a process, of which this is the first then.

    Raises:
        ValueError: the job was not started by a launcher such as torchrun, cannot be laid out so, or has begun.
    """
    missing = [name for name in _KEPT[:4] if not os.environ.get(name)]
    if missing:
        raise ValueError(f"{missing[0]} is not set: start the job with torchrun")
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already: forward and backward ranks have to part before")
    world = int(os.environ["WORLD_SIZE"])
    placement = Placement(layout_of(world), together)
    placement.fits(world)
    joint, process, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store: Any = PrefixStore("trimtab-fbd", joint)
    rank = next(iter(placement.hosted(process)))
    number = placement.layout.number(rank)
    outside = {name: os.environ.get(name) for name in _KEPT}
    held = _serve(store, rank.role) if number == 0 else None
    address, port = store.get(f"world/{rank.role}").decode().rsplit(" ", 1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": str(placement.layout.count(rank.role)),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the agent's has the keys of one world
    return World(process, placement, rank, store, held, outside)


def _serve(store: Any, role: Role) -> Any:
    """The store of a role, which torch.distributed finds where this process serves it: it shares servers of one port
    within a process."""
    ours = TCPStore("localhost", 0, None, True, wait_for_workers=False, multi_tenant=True)
    store.set(f"world/{role}", f"{_address(store, role)} {ours.port}")
    return ours


def _address(store: Any, role: Role) -> str:
    """Where others reach this process: as they reach process 0, if it is on that host, which backward rank 0 is."""
    if role is Role.BACKWARD:
        store.set("host", socket.gethostname())
        return os.environ["MASTER_ADDR"]
    alike = store.get("host").decode() == socket.gethostname()
    return os.environ["MASTER_ADDR"] if alike else socket.getfqdn()


def store_exchange(store: Any, process: int, world: int, name: str) -> Exchange:
    """An all-gather over a store, for those who have no process group together. Each call has keys of its own."""
    calls = 0

    def exchange(mine: bytes) -> list[bytes]:
        nonlocal calls
        calls += 1
        store.set(f"{name}/{calls}/{process}", mine)
        return [bytes(store.get(f"{name}/{calls}/{one}")) for one in range(world)]

    return exchange


def leave_word(store: Any, process: int, name: str, word: bytes) -> None:
    """For a process that will not come to the first call of an exchange: what the others have in its place."""
    with contextlib.suppress(RuntimeError):  # the store goes with its process, and then nobody waits
        store.set(f"{name}/1/{process}", word)
