"""Opening the transport over UCX: addresses are exchanged, endpoints made, processes watched."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from trimtab.config import TransportConfig
from trimtab.transport.errors import TransportError
from trimtab.transport.ucx.library import Ucx
from trimtab.transport.ucx.transport import UcxTransport
from trimtab.transport.ucx.worker import Worker, default_options, shares_memory
from trimtab.transport.watch import open_watch

_ALL: Final = ""
"""The address for whoever has none of his own."""


def open_ucx(
    ucx: Ucx,
    rank: int,
    exchange: Callable[[bytes], list[bytes]],
    said: Sequence[Mapping[str, Any]],
    settings: TransportConfig,
    device: torch.device,
    apart: Iterable[int] = (),
) -> UcxTransport:
    """``said``: of each rank ``token``, ``host``, ``pid`` and ``started``. ``apart``: see :class:`Worker`.
    TransportError: some rank cannot be reached; every rank gets one then, so that nobody waits for an answer."""
    problem = ""
    worker: Worker | None = None
    near = [peer for peer, one in enumerate(said) if peer != rank and one["host"] == said[rank]["host"]]
    in_memory = set(near) if shares_memory() else set[int]()
    alone = sorted(in_memory.intersection(apart))
    mine: dict[str, str] = {}
    try:
        worker = Worker(ucx, default_options(), alone)
        mine = {_ALL: worker.address().hex()} | {str(peer): worker.address(peer).hex() for peer in alone}
    except TransportError as error:
        problem = str(error)
    everybody = [json.loads(text) for text in exchange(json.dumps(mine).encode())]
    if worker is not None and all(everybody):
        try:
            for peer, addresses in enumerate(everybody):
                if peer != rank:
                    address = bytes.fromhex(addresses.get(str(rank), addresses[_ALL]))
                    worker.connect(peer, address, shared_memory=peer in in_memory)
        except TransportError as error:
            problem = str(error)
    problems = [text.decode() for text in exchange(problem.encode())]
    if worker is None or any(problems) or not all(everybody):
        if worker is not None:
            worker.close(lambda: True)
        first = next((number for number, text in enumerate(problems) if text), 0)
        raise TransportError(f"stage {first}: {problems[first]}")
    watched = {
        fd: peer
        for peer in near
        if said[peer]["pid"] != os.getpid() and (fd := open_watch(said[peer]["pid"], said[peer]["started"])) is not None
    }
    tokens = [one["token"] for one in said]
    try:
        return UcxTransport(rank, len(said), worker, tokens, watched, settings.credits, device)
    except BaseException:
        for fd in watched:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise
