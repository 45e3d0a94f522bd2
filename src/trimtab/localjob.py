"""The ranks of a job as processes of this machine, with torchrun's variables; none of them outlives the call."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Final

_POLL_SECONDS: Final = 0.1
_GRACE_SECONDS: Final = 3.0
"""Between asking a rank to end and ending it."""


class RankError(Exception):
    """A rank ended with an error: its number and exit code."""

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(f"rank {rank} ended with exit code {code}")
        self.rank = rank
        self.code = code


def run_ranks(
    command: Sequence[str], world_size: int, environment: Mapping[str, str], on_line: Callable[[int, str], None]
) -> None:
    """Run ``command`` once a rank and wait for all; each line of output goes to ``on_line(rank, line)``.

    Raises :class:`RankError` for the first rank that ends with an error. However this ends, Ctrl-C and SIGTERM
    included, every rank and what it started has ended, too.
    """
    shared = {
        **environment,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    children: list[subprocess.Popen[str]] = []
    lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    readers: list[threading.Thread] = []
    with _interrupt_on_termination():
        try:
            for rank in range(world_size):
                child = _start(command, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                children.append(child)
                reader = threading.Thread(target=_read, args=(rank, child, lines), daemon=True)
                reader.start()
                readers.append(reader)
            _wait(children, lines, on_line)
        finally:
            _end(children)
            for reader in readers:
                reader.join(_GRACE_SECONDS)
            _hand_over(lines, on_line)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    # A process group of its own: a Ctrl-C reaches us alone, and whatever a rank starts can be ended with it.
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )


def _read(rank: int, child: subprocess.Popen[str], lines: queue.SimpleQueue[tuple[int, str]]) -> None:
    assert child.stdout is not None
    with child.stdout:
        for line in child.stdout:
            lines.put((rank, line.rstrip("\n")))


def _wait(
    children: Sequence[subprocess.Popen[str]],
    lines: queue.SimpleQueue[tuple[int, str]],
    on_line: Callable[[int, str], None],
) -> None:
    while True:
        codes = [child.poll() for child in children]
        for rank, code in enumerate(codes):
            if code:
                raise RankError(rank, code)
        if all(code == 0 for code in codes):
            return
        with contextlib.suppress(queue.Empty):
            on_line(*lines.get(timeout=_POLL_SECONDS))


def _hand_over(lines: queue.SimpleQueue[tuple[int, str]], on_line: Callable[[int, str], None]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            on_line(*lines.get_nowait())


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    with _ignoring_interrupts():
        _signal(children, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        _signal(children, signal.SIGKILL)
        for child in children:
            child.wait()


def _signal(children: Sequence[subprocess.Popen[str]], number: signal.Signals) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)


@contextlib.contextmanager
def _interrupt_on_termination() -> Iterator[None]:
    """SIGTERM and SIGHUP as KeyboardInterrupt; signal handlers exist in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
