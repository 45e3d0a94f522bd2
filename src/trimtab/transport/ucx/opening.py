"""Opening the transport over UCX: addresses are exchanged, endpoints made, processes watched."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trimtab.config import TransportConfig
from trimtab.transport.errors import TransportError
from trimtab.transport.ucx.library import Ucx
from trimtab.transport.ucx.transport import UcxTransport
from trimtab.transport.ucx.worker import Worker, default_options, shares_memory
from trimtab.transport.watch import open_watch


def open_ucx(
    ucx: Ucx,
    rank: int,
    exchange: Callable[[bytes], list[bytes]],
    said: Sequence[Mapping[str, Any]],
    settings: TransportConfig,
    device: torch.device,
) -> UcxTransport:
    """``said``: of each rank ``token``, ``host``, ``pid`` and ``started``. TransportError: some rank cannot be reached;
    every rank gets one then, so that nobody waits for an answer."""
    problem = ""
    worker: Worker | None = None
    addresses: list[bytes] = []
    try:
        worker = Worker(ucx, default_options())
        mine = worker.address()
    except TransportError as error:
        problem, mine = str(error), b""
    addresses = exchange(mine)
    if worker is not None and all(addresses):
        try:
            for peer, address in enumerate(addresses):
                if peer != rank:
                    same_host = said[peer]["host"] == said[rank]["host"]
                    worker.connect(peer, address, shared_memory=same_host and shares_memory())
        except TransportError as error:
            problem = str(error)
    problems = [text.decode() for text in exchange(problem.encode())]
    if worker is None or any(problems) or not all(addresses):
        if worker is not None:
            worker.close(lambda: True)
        first = next((number for number, text in enumerate(problems) if text), 0)
        raise TransportError(f"stage {first}: {problems[first]}")
    watched = {
        fd: peer
        for peer, one in enumerate(said)
        if peer != rank
        and one["host"] == said[rank]["host"]
        and one["pid"] != os.getpid()
        and (fd := open_watch(one["pid"], one["started"])) is not None
    }
    tokens = [one["token"] for one in said]
    try:
        return UcxTransport(rank, len(said), worker, tokens, watched, settings.credits, device)
    except BaseException:
        for fd in watched:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise
