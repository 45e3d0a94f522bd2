"""One rank of one drill, from inside: the job runs, the drill's fault happens, and it is written down how it ended."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import job
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.optim import optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

import trimtab

_PR_SET_PDEATHSIG = 1
_PATIENCE = 500
NOT_REACHED = "(not reached)"
"""What a fault says of itself while it has not happened."""
AtStep = Callable[[int], None]


@dataclass
class Scene:
    """What a fault may see and change before the job starts. Random choices are the same on all ranks."""

    rank: int
    job: str
    steps: int
    attached: bool
    random: random.Random
    folder: Path
    """The drill's own; ``folder / "record"`` is where trimtab writes unless the fault says otherwise."""
    leaves: frozenset[str] = frozenset()
    """What may stay in the process."""
    target: int = 0
    """The rank that the fault hits."""
    step: int = 0
    """The step in which it hits."""
    workers: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    """Settings of trimtab's recorder."""
    sites: dict[str, dict[str, int]] = field(default_factory=dict)
    """How often the rank that is hit calls each site, by phase; see inject.py."""
    site: str = ""
    """The one that was drawn."""
    at_step: list[AtStep] = field(default_factory=list)
    """Called at the top of every step of the job."""
    at_phase: list[Callable[[str], None]] = field(default_factory=list)
    """Called with ``attach``, ``run``, ``detach`` when that begins, and with ``end`` after the job."""
    answer: dict[str, Any] = field(default_factory=dict)
    """What the runner gets to know in the end."""
    session: Any = None
    over: bool = False
    """The job has ended."""
    error: BaseException | None = None
    """By this, if it is not finished."""

    @property
    def hit(self) -> bool:
        """Whether this is the rank that the fault hits."""
        return self.rank == self.target

    @property
    def directory(self) -> Path:
        """Where trimtab writes."""
        return Path(self.record["dir"])

    @property
    def engine(self) -> dict[str, str]:
        """Settings of trimtab's engine."""
        return {"name": "auto" if self.job in job.MEGATRON else "torch"}

    def when_due(self, act: Callable[[], None]) -> None:
        """Have ``act`` called at the top of the step in which the fault hits, if this is its rank."""

        def due(step: int) -> None:
            if step == self.step and self.hit:
                act()

        self.at_step.append(due)

    def tell(self, what: str) -> None:
        """Say what the fault is, in this run; kept even if the process dies of it."""
        (self.folder / f"{self.rank}.told").write_text(what)


Fault = Callable[[Scene], None]


def play(scene: Scene, fault: Fault | None, environment: dict[str, str], deadline: float) -> None:
    """The body of a forked rank. Never returns: the process ends as the job did."""
    _become_a_process_of_its_own(scene, environment)
    before = _state()
    while True:
        try:
            if not scene.over:
                _live(scene, fault, deadline)
            _leave(scene, before)
        except (KeyboardInterrupt, SystemExit):  # a second signal came when the first had ended the job
            continue


def _live(scene: Scene, fault: Fault | None, deadline: float) -> None:
    """The job, from the fault's preparations to its end."""
    try:
        if fault is not None:
            fault(scene)
        # Not earlier: its thread would keep a fault from entering a namespace.
        output = (scene.folder / f"{scene.rank}.out").open("a")
        faulthandler.enable(file=output)
        faulthandler.dump_traceback_later(deadline, file=output)
        _run(scene)
    except BaseException as error:
        scene.error = error  # no signal can come between the error and this
    scene.over = True


def _leave(scene: Scene, before: dict[str, Any]) -> None:
    """The interpreter's end, and the drill's own: it is written down how the job ended. May be interrupted, and tried
    again."""
    error, code = scene.error, 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    elif error is not None:
        code = 1
        scene.answer["said"] = str(error)[:1000]
        with (scene.folder / f"{scene.rank}.out").open("a") as output:  # stderr may be closed
            traceback.print_exception(error, file=output)
    atexit._run_exitfuncs()  # as the interpreter does, whatever ended the script
    scene.answer["ended"] = "finished" if error is None else type(error).__name__
    if error is None:
        scene.answer["left"] = _left(before, scene.leaves)
    faulthandler.cancel_dump_traceback_later()
    _write(scene.folder / f"{scene.rank}.ended", scene.answer | {"hit": scene.hit})
    if error is None and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    os._exit(code)


def _become_a_process_of_its_own(scene: Scene, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    atexit._clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    output = (scene.folder / f"{scene.rank}.out").open("a", buffering=1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # Those of a test runner and its libraries: a job has none unless it asks.
    for logger in (logging.getLogger(), logging.getLogger("trimtab")):
        logger.handlers.clear()
    gc.callbacks.clear()
    sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
    warnings.simplefilter("ignore")
    random.seed(0)
    torch.manual_seed(0)


def _run(scene: Scene) -> None:
    """The job: trimtab is attached before anything else, taken off before the last step, and never mentioned else."""
    job.prepare(scene.job)
    _tell(scene, "attach")
    if scene.attached:
        scene.session = trimtab.attach(engine=scene.engine, record=scene.record)
    _tell(scene, "run")
    steps = job.start(scene.job, scene.session.step if scene.session is not None else _nothing, scene.workers)
    with (scene.folder / f"{scene.rank}.progress").open("a", buffering=1) as progress:
        for step in range(scene.steps):
            for act in scene.at_step:
                act(step)
            if step == scene.steps - 1:
                _tell(scene, "detach")
                if scene.session is not None:
                    scene.session.detach()
            began = time.perf_counter_ns()
            loss = next(steps)
            text = "-" if loss is None else float(loss).hex()
            progress.write(f"{step} {text} {began} {time.perf_counter_ns()}\n")
    _tell(scene, "end")


def _tell(scene: Scene, phase: str) -> None:
    for act in scene.at_phase:
        act(phase)


def _nothing() -> None:
    """A job without trimtab has no need to say when a step begins."""


def _write(path: Path, answer: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(answer))
    partial.rename(path)


def _state() -> dict[str, Any]:
    """All that trimtab may have changed in this process, and whether it is as before shows at a glance."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("trimtab")),
        "files": sorted(name for name in _open_files() if ".arrow" in name),
        "gc callbacks": [repr(callback) for callback in gc.callbacks],
        "importers": [type(finder).__name__ for finder in sys.meta_path],
        "optimizer hooks": len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks),
        "works": [id(method) for method in vars(Work).values()],
        "groups": [id(method) for method in vars(ProcessGroup).values()],
        "data": id(_BaseDataLoaderIter.__next__),
        "module hooks": len(torch.nn.modules.module._global_forward_hooks)
        + len(torch.nn.modules.module._global_forward_pre_hooks),
        "signals": [_handler(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "exception hooks": [id(sys.unraisablehook), id(threading.excepthook)],
    }


def _left(before: dict[str, Any], leaves: frozenset[str]) -> list[str]:
    """What is not as it was. Threads that have been told to end get some seconds, which a busy machine may need."""
    left: list[str] = []
    for _ in range(_PATIENCE):
        after = _state()
        left = [what for what, state in before.items() if after[what] != state]
        if leaves.issuperset(left):
            break
        time.sleep(0.01)
    return left


def _open_files() -> Iterator[str]:
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one for the directory itself
            yield str(path.readlink())


def _handler(number: signal.Signals) -> str:
    handler: Callable[[int, FrameType | None], Any] | int | signal.Handlers | None = signal.getsignal(number)
    return repr(handler)
