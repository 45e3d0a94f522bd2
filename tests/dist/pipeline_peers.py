"""Stages of a pipeline as forked processes that may fail: what each says in the end, and what they leave behind."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import free_port
from pipeline_stages import die_with_parent

from trimtab.config import TransportConfig

PATIENCE = 20.0
"""For a test that hangs, not for what is slow on a busy machine."""
_SHARED_MEMORY = Path("/dev/shm")


class End(NamedTuple):
    """How a stage ended: ``kind`` is the class of what it raised, or ``done``; ``killed`` if it said nothing."""

    kind: str
    text: str
    code: int | None


class Peers:
    """Forked stages, each with a pipe to this process."""

    def __init__(self, stacks: Any, world: int, kind: str, body: Callable[..., Any], *args: Any) -> None:
        """``body(stage, transport, pipe, *args)`` runs in each, over a transport of this kind. ``stacks`` is an open
        file for where they are when they hang."""
        context = multiprocessing.get_context("fork")
        port = free_port()
        self._stacks = stacks
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for stage in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_main, args=(stage, world, port, kind, there, self._stacks, body, args))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def hear(self, stage: int) -> Any:
        """The next thing that a stage says."""
        if not self.pipes[stage].poll(PATIENCE):
            raise AssertionError(f"stage {stage} said nothing for {PATIENCE} s; where all are:\n{self._where()}")
        return self.pipes[stage].recv()

    def ends(self) -> list[End]:
        """Wait for all of them."""
        return [self.end(stage) for stage in range(len(self.processes))]

    def signal(self, stage: int, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.processes[stage].pid, number)

    def close(self) -> None:
        """Nothing of them stays."""
        for process in self.processes:
            process.kill()
            process.join()

    def _where(self) -> str:
        """The stacks of those that live."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.2)
        lines = Path(self._stacks.name).read_text().splitlines()
        return "\n".join(line for line in lines if not re.search("multiprocessing|_pytest|pluggy|runpy|pytest/", line))

    def end(self, stage: int) -> End:
        """Wait for one of them."""
        process = self.processes[stage]
        kind, text = "killed", ""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                said = self.hear(stage)
                if isinstance(said, tuple) and said[0] == "end":
                    _, kind, text = said
                    break
        process.join(PATIENCE)
        assert not process.is_alive(), f"stage {stage} has not ended after {kind}: {text}"
        return End(kind, text, process.exitcode)


@contextlib.contextmanager
def peers(world: int, kind: str, body: Callable[..., Any], *args: Any) -> Iterator[Peers]:
    """Stages that are gone when the block is left, and have left no shared memory."""
    before = _shared_memory()
    with tempfile.NamedTemporaryFile(prefix="trimtab-stacks-") as stacks:
        running = Peers(stacks, world, kind, body, *args)
        try:
            yield running
        finally:
            running.close()
    deadline = time.monotonic() + PATIENCE
    while left := _shared_memory() - before:  # of other tests at the same time it goes away by itself
        assert time.monotonic() < deadline, f"left in {_SHARED_MEMORY}: {sorted(left)}"
        time.sleep(0.05)


def _shared_memory() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.exists() else set()


def _main(
    stage: int,
    world: int,
    port: int,
    kind: str,
    pipe: Connection,
    stacks: Any,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    from trimtab.transport.opening import group_exchange, open_transport

    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= environment
    torch.set_num_threads(1)
    transport = None
    end = ("end", "done", "")
    try:
        torch.distributed.init_process_group("gloo", rank=stage, world_size=world)
        transport = open_transport(kind, stage, world, group_exchange(), TransportConfig(kind))
        body(stage, transport, pipe, *args)
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        end = ("end", type(error).__name__, f"{error} {notes}".strip())
    if transport is not None:
        transport.close()
    pipe.send(end)
    pipe.close()
    os._exit(0)  # torch.distributed waits for peers that are no more
