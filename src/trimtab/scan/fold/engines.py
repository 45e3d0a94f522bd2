"""Where the files are read: in this process, in processes of this machine, or in those of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from trimtab.scan.fold.task import perform
from trimtab.scan.fold.worker import receive, send

logger = logging.getLogger("trimtab")

MOST_WORKERS = 32
PATIENCE_S = 10.0
"""With a Ray cluster that does not answer."""
RAY_AHEAD = 2
"""Tasks under way for each CPU of a Ray cluster; more would only pile up answers."""


class Engine(Protocol):
    """Something that does tasks."""

    def run(self, tasks: Sequence[bytes]) -> Iterator[bytes]:
        """The answers to ``tasks`` (see :func:`trimtab.scan.fold.task.perform`), in any order."""
        ...


class Inline:
    """In this process, one after the other."""

    def run(self, tasks: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, in order."""
        yield from map(perform, tasks)


class Local:
    """In one process a CPU of this machine; what they leave undone is done here."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = min(workers or len(os.sched_getaffinity(0)), MOST_WORKERS)
        self.processes: list[subprocess.Popen[bytes]] = []
        """Those of the last run."""

    def run(self, tasks: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, as they come."""
        todo: SimpleQueue[bytes] = SimpleQueue()
        for task in tasks:
            todo.put(task)
        done: SimpleQueue[bytes | None] = SimpleQueue()
        workers = [_Worker(todo, done) for _ in range(min(self.workers, len(tasks)))]
        answered = 0
        try:
            for worker in workers:
                worker.start()
            self.processes = [worker.process for worker in workers if worker.process is not None]
            running = len(workers)
            while running:
                answer = done.get()
                if answer is None:
                    running -= 1
                else:
                    answered += 1
                    yield answer
        finally:
            for worker in workers:
                worker.stop()
        if answered < len(tasks):
            logger.warning("trimtab: reading goes on in one process, as others could not be started or ended early")
        for task in _left(todo, workers):
            yield perform(task)


def _left(todo: SimpleQueue[bytes], workers: Sequence[_Worker]) -> Iterator[bytes]:
    yield from (worker.task for worker in workers if worker.task is not None)
    while True:
        try:
            yield todo.get_nowait()
        except Empty:
            return


class _Worker:
    """A process that works for us, and the thread that feeds it."""

    def __init__(self, todo: SimpleQueue[bytes], done: SimpleQueue[bytes | None]) -> None:
        self._todo, self._done = todo, done
        self.process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._feed, name="trimtab-scan", daemon=True)
        self.task: bytes | None = None
        """Begun and not answered."""

    def start(self) -> None:
        """Start the process; where that fails, nothing is done."""
        # Not from the current directory, where anything may lie; what fails there is done, or said, here.
        command = [sys.executable, "-P", "-m", "trimtab.scan.fold.worker"]
        try:
            # One thread each for what would otherwise start as many as there are CPUs.
            limits = dict.fromkeys(("POLARS_MAX_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | limits,
            )
        except OSError as error:
            logger.info("trimtab: no process to read files in (%s)", error)
        self._thread.start()

    def _feed(self) -> None:
        process = self.process
        try:
            while process is not None and process.stdin is not None and process.stdout is not None:
                self.task = self._todo.get_nowait()
                send(process.stdin, self.task)
                answer = receive(process.stdout)
                if answer is None:
                    return
                self.task = None
                self._done.put(answer)
        except (Empty, OSError, ValueError):  # no task left; the process is gone
            pass
        finally:
            self._done.put(None)

    def stop(self) -> None:
        """End the process, whatever it does."""
        process = self.process
        if process is None:
            return
        process.kill()
        if self._thread.is_alive():
            self._thread.join()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not sent any more
                    pipe.close()
        process.wait()


class Ray:
    """In the processes of a Ray cluster, all of whose nodes see the files under the same paths."""

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS")

    def run(self, tasks: Sequence[bytes]) -> Iterator[bytes]:
        """The answers, as they come. ValueError where no cluster answers."""
        import ray

        mine = not ray.is_initialized()
        if mine:
            _connect(ray, self.address)
        try:
            yield from _spread(ray, tasks)
        finally:
            if mine:
                ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    try:
        _knock(address)
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at {address}" if address else "on this machine"
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"no Ray cluster answers {where} ({reason[0] if reason else type(error).__name__}): "
            "start one (ray start --head), or say where it is (--ray-address, RAY_ADDRESS)"
        ) from None


def _knock(address: str | None) -> None:
    """Ray itself tries for minutes; OSError if nobody listens."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S).close()


def _spread(ray: Any, tasks: Sequence[bytes]) -> Iterator[bytes]:
    remote: Callable[[bytes], Any] = ray.remote(perform).remote
    ahead = RAY_AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = [remote(task) for task in tasks[:ahead]]
    left = list(tasks[ahead:][::-1])
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        for one in ready:
            try:
                yield ray.get(one)
            except ray.exceptions.RayError as error:
                raise ValueError(f"a worker of the Ray cluster failed: {_first_line(error)}") from None
        if left:
            waiting.append(remote(left.pop()))


def _first_line(error: Exception) -> str:
    """What a remote traceback ends with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
