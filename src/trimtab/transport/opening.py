"""Opening a transport: agree on its kind, exchange addresses, connect."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from trimtab.config import TransportConfig
from trimtab.transport.errors import TransportError
from trimtab.transport.interface import Transport
from trimtab.transport.torch_distributed import TorchTransport
from trimtab.transport.torch_movers import Gloo, Nccl
from trimtab.transport.watch import started

Exchange = Callable[[bytes], list[bytes]]
"""An all-gather of small byte strings among the world, in rank order."""


def open_transport(
    kind: Literal["auto", "ucx", "torch"],
    rank: int,
    world: int,
    exchange: Exchange,
    settings: TransportConfig | None = None,
    device: torch.device | str = "cpu",
    store: Any = None,
    apart: Iterable[int] = (),
) -> Transport:
    """The transport of stage ``rank`` of ``world``; all of them call this at the same time.

    ``device``: where received tensors lie. ``auto`` is UCX if every stage can load it and it can reach every stage, and
    otherwise torch.distributed, which must be initialised, or given a ``store`` of all stages. ValueError: what is
    asked for cannot be had, and why. ``apart``: stages that may be killed while the others go on
    (:meth:`Transport.let_go`); over shared memory each of them costs the others some MB, so that what it was about to
    write when it was killed stands in nobody's way.
    """
    settings = settings or TransportConfig()
    device = torch.device(device)
    library, why = (None, "") if kind == "torch" else _load(settings, device)
    mine = {
        "token": secrets.randbits(64),
        "host": _host(),
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "ucx": why,
        "device": device.type,
        "join": secrets.token_hex(8),
    }
    said = [json.loads(text) for text in exchange(json.dumps(mine).encode())]
    chosen = _choose(kind, said)
    if chosen == "ucx":
        from trimtab.transport.ucx.opening import open_ucx

        assert library is not None
        return open_ucx(library, rank, exchange, said, settings, device, apart)
    tokens = [one["token"] for one in said]
    return _open_torch(rank, world, said[0]["join"], tokens, settings, device, store)


def _load(settings: TransportConfig, device: torch.device) -> tuple[Any, str]:
    """UCX, or why not."""
    from trimtab.transport.ucx.library import load_ucx
    from trimtab.transport.ucx.modules import no_gpu

    try:
        # Where there is a GPU all processes take the same one, also those that receive on the CPU.
        library = load_ucx(settings.ucx_library, device.type == "cuda" or torch.cuda.is_available())
    except (OSError, ValueError) as error:
        return None, str(error) or type(error).__name__
    why = no_gpu(library) if device.type == "cuda" else ""
    return (None, why) if why else (library, "")


def _choose(kind: str, said: list[dict[str, Any]]) -> str:
    from trimtab.transport.ucx.library import leaves_host

    if kind == "torch":
        return _torch(said)
    without = [(rank, one["ucx"]) for rank, one in enumerate(said) if one["ucx"]]
    hosts = {one["host"] for one in said}
    if without:
        problem = f"stage {without[0][0]} cannot use UCX: {without[0][1]}"
    elif len(hosts) > 1 and not leaves_host():
        problem = "the stages are on several hosts, and UCX stays on its own unless UCX_NET_DEVICES names a network"
    else:
        return "ucx"
    if kind == "auto":
        return _torch(said)
    raise ValueError(f"transport.kind = ucx: {problem}")


def _torch(said: list[dict[str, Any]]) -> str:
    if len({one["device"] for one in said}) > 1:
        where = ", ".join(f"{rank} on {one['device']}" for rank, one in enumerate(said))
        raise ValueError(
            f"transport.kind = torch: tensors are received on devices of different types (stages {where}), between "
            "which it cannot move them; use UCX, or receive on the CPU everywhere"
        )
    return "torch"


def _open_torch(
    rank: int, world: int, join: str, tokens: list[int], settings: TransportConfig, device: torch.device, store: Any
) -> Transport:
    if store is None and not dist.is_initialized():
        raise ValueError("transport.kind = torch needs torch.distributed: call init_process_group first")
    store = PrefixStore(f"trimtab-transport-{join}", _get_default_store() if store is None else store)
    try:
        gloo = Gloo(store, rank, world)
        mover = Nccl(PrefixStore("nccl", store), rank, world, device) if device.type == "cuda" else gloo
    except RuntimeError as error:
        raise TransportError(f"torch.distributed cannot connect the stages: {error}") from error
    return TorchTransport(rank, world, gloo, mover, tokens, credits=settings.credits, device=device)


def _host() -> str:
    """The same for processes that share memory: this boot of this machine, and this namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return secrets.token_hex(8)


def group_exchange(group: Any = None) -> Exchange:
    """The exchange of a process group of torch.distributed (all ranks of it are the transport's world)."""

    def exchange(mine: bytes) -> list[bytes]:
        world = dist.get_world_size(group)
        on_cpu = "gloo" in dist.get_backend(group) or "mpi" in dist.get_backend(group)
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        length = torch.tensor([len(mine)], device=device)
        lengths = [torch.empty_like(length) for _ in range(world)]
        dist.all_gather(lengths, length, group=group)
        most = int(max(lengths))
        padded = torch.frombuffer(bytearray(mine.ljust(max(most, 1), b"\0")), dtype=torch.uint8).to(device)
        everybody = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(everybody, padded, group=group)
        return [one.cpu().numpy().tobytes()[: int(size)] for one, size in zip(everybody, lengths, strict=True)]

    return exchange
