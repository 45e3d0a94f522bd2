"""What jobs do that trimtab has to live with: they fork, raise, exit, handle signals, close their streams."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from scene import Fault, Scene

import trimtab


def together(*faults: Fault) -> Fault:
    """All of them."""

    def fault(scene: Scene) -> None:
        for single in faults:
            single(scene)

    return fault


def dies(scene: Scene) -> None:
    """The process is gone without a word."""
    scene.when_due(lambda: os._exit(7))


def interrupted_while_collecting(scene: Scene) -> None:
    """Ctrl-C while the garbage collector runs: the first Python code to see it is a callback of the collector."""
    interrupt = ctypes.CDLL(None)["raise"]
    interrupt.argtypes = [ctypes.c_int, ctypes.py_object]

    def act() -> None:
        garbage = _Garbage()
        # Called by the collector, in C alone: a function of Python's would be interrupted itself.
        watched = weakref.ref(garbage, functools.partial(interrupt, signal.SIGINT))
        del garbage
        gc.collect(0)
        del watched

    scene.when_due(act)


class _Garbage:
    """Only the collector finds it."""

    def __init__(self) -> None:
        self.itself = self


def job_raises(scene: Scene) -> None:
    """The job's own error, which must come out as it is."""

    def act() -> None:
        raise FloatingPointError("the job's own")

    scene.when_due(act)


def exits_when_told(scene: Scene) -> None:
    """The job has a handler of its own for SIGTERM."""

    def leave(_number: int, _frame: Any) -> None:
        sys.exit(3)

    signal.signal(signal.SIGTERM, leave)


def alarms(scene: Scene) -> None:
    """A handler of the job's own runs all the time."""
    signal.signal(signal.SIGALRM, lambda _number, _frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


def child(ends: Callable[[], None]) -> Fault:
    """The job forks in a step; the child trains on a little and ends."""

    def fault(scene: Scene) -> None:
        def act() -> None:
            pid = os.fork()
            if pid == 0:
                code = 1
                with contextlib.suppress(BaseException):
                    _train_alone()
                    ends()
                    code = 0
                os._exit(code)
            if os.waitpid(pid, 0)[1] != 0:
                raise ChildProcessError("the child failed")

        scene.when_due(act)

    return fault


def _train_alone() -> None:
    """What a child may do: all that comes by trimtab's hooks, without its parent's communication."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        with trimtab.span("in the child", text="x"):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        gc.collect(0)


def as_the_interpreter_ends() -> None:
    """What registered for the end of the process is called."""
    atexit._run_exitfuncs()


def nothing_more() -> None:
    """The child is gone at once, as a worker of multiprocessing."""


def workers(scene: Scene) -> None:
    """Data comes from a forked worker."""
    scene.workers = 1


def runs_programs(scene: Scene) -> None:
    """The job starts other programs."""
    scene.at_step.append(lambda _step: subprocess.run(["true"], check=True) and None)


def no_collector(scene: Scene) -> None:
    """The job turns the garbage collector off, and later on."""
    scene.when_due(gc.disable)
    scene.at_phase.append(lambda phase: gc.enable() if phase == "detach" else None)


def collections_everywhere(scene: Scene) -> None:
    """Garbage is collected in the middle of everything, trimtab's own code included."""
    gc.set_threshold(7, 3, 1000)


def clears_collector_callbacks(scene: Scene) -> None:
    """The job takes every callback of the collector away."""
    scene.when_due(gc.callbacks.clear)


def takes_off(scene: Scene) -> None:
    """trimtab is taken off in the middle of the job."""
    scene.when_due(lambda: scene.session.detach() if scene.session is not None else None)


def takes_off_and_on(scene: Scene) -> None:
    """Off, and on again, on all ranks."""

    def again(step: int) -> None:
        if step == scene.step and scene.session is not None:
            scene.session.detach()
            scene.session = trimtab.attach(engine=scene.engine, record=scene.record)

    scene.at_step.append(again)


def attaches_twice(scene: Scene) -> None:
    """A second part of the job attaches, too."""
    scene.when_due(lambda: trimtab.attach(record={"dir": "elsewhere"}) and None if scene.attached else None)


class _Evil:
    def __repr__(self) -> str:
        raise ValueError("no name")

    __str__ = __repr__


def odd_spans(scene: Scene) -> None:
    """Spans of the job's own with names and arguments that make no sense."""

    def act() -> None:
        for name, args in (("", {}), ("x" * 10_000, {}), ("a", {"of": _Evil()}), ("b\0\ud800", {"of": {1: {2}}})):
            with trimtab.span(name, **args):
                pass
        with trimtab.span("deep", of=_nested(2000)), trimtab.span("big", of=10**400):
            pass

    scene.when_due(act)


def _nested(depth: int) -> list[Any]:
    return [] if depth == 0 else [_nested(depth - 1)] if depth < 500 else [[]]


def raising_handler(scene: Scene) -> None:
    """The job's logging raises."""

    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("the handler's own error")

    logging.getLogger().addHandler(Raises())


def warnings_are_errors(scene: Scene) -> None:
    """Every warning of Python's raises."""
    warnings.simplefilter("error")


def no_stderr(how: Callable[[], None]) -> Fault:
    """There is nowhere to write to."""

    def fault(scene: Scene) -> None:
        how()

    return fault


def close_streams() -> None:
    """Both are closed, for Python and for the system."""
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)


def drop_streams() -> None:
    """As in a process without a console."""
    sys.stdout = sys.stderr = None  # pyright: ignore[reportAttributeAccessIssue]


def full_streams() -> None:
    """Output goes to a disk that is full."""
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)


def session_misused(scene: Scene) -> None:
    """The session is used from several threads, and after its end."""

    def act() -> None:
        if scene.session is None:
            return
        threads = [threading.Thread(target=scene.session.step) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    scene.when_due(act)
