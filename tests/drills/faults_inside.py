"""Faults inside trimtab: its functions raise, its threads end, its clocks go wrong."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

from inject import at_site, break_for_good, functions_named
from scene import Fault, Scene

ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    RuntimeError,
    MemoryError,
    RecursionError,
    KeyError,
    OSError,
    StopIteration,
    AssertionError,
)


def raises(*phases: str) -> Fault:
    """One call of one site raises."""

    def fault(scene: Scene) -> None:
        kind = scene.random.choice(ERRORS)

        def act() -> None:
            raise kind("the drill's own error")

        at_site(scene, phases, act, f" {kind.__name__}")

    return fault


def raises_for_good(*phases: str) -> Fault:
    """One function of trimtab raises from one call on, for ever."""

    def fault(scene: Scene) -> None:
        functions = {
            phase: {site: count for site, count in calls.items() if " > " not in site}
            for phase, calls in scene.sites.items()
        }
        scene.sites = functions
        found: list[FunctionType] = []
        at_site(scene, phases, lambda: break_for_good(found, RuntimeError("the drill's own error")))
        if scene.hit:
            # Some are made when trimtab is attached, or when it meets a model.
            scene.at_phase.append(lambda _phase: found.extend(functions_named(scene.site)))
            scene.at_step.append(lambda step: found.extend(functions_named(scene.site)) if step == 1 else None)

    return fault


def signal_at_site(number: signal.Signals, *phases: str) -> Fault:
    """A signal arrives in the middle of trimtab's own code, or of its writer."""

    def fault(scene: Scene) -> None:
        at_site(scene, phases, lambda: os.kill(os.getpid(), number))

    return fault


def writer_gets(kind: type[BaseException]) -> Fault:
    """An exception out of nowhere ends the writer thread."""

    def fault(scene: Scene) -> None:
        def act() -> None:
            for thread in threading.enumerate():
                if thread.name.startswith("trimtab-writer") and thread.ident is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))

        scene.when_due(act)

    return fault


def no_threads(scene: Scene) -> None:
    """The system gives trimtab no thread."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("trimtab"):
            raise RuntimeError("can't start new thread")
        start(thread)

    if scene.hit:
        threading.Thread.start = refuse  # pyright: ignore[reportAttributeAccessIssue]


def replace_in_trimtab(old: Any, new: Any) -> None:
    """Whatever of trimtab's modules refers to ``old``, by a global or as a default argument, refers to ``new``."""
    found = 0
    for name, module in list(sys.modules.items()):
        if name != "trimtab" and not name.startswith("trimtab."):
            continue
        for key, value in list(vars(module).items()):
            if value is old:
                setattr(module, key, new)
                found += 1
            for function in _functions(value):
                defaults = function.__defaults__ or ()
                named = function.__kwdefaults__ or {}
                function.__defaults__ = tuple(new if d is old else d for d in defaults) or None
                function.__kwdefaults__ = {k: new if d is old else d for k, d in named.items()} or None
                found += sum(d is old for d in (*defaults, *named.values()))
    if not found:
        raise LookupError(f"trimtab no longer uses {old!r}: this drill would do nothing")


def _functions(value: Any) -> list[FunctionType]:
    if isinstance(value, FunctionType):
        return [value]
    if isinstance(value, type) and value.__module__.startswith("trimtab"):
        return [member for member in vars(value).values() if isinstance(member, FunctionType)]
    return []


class _Time:
    """The module ``time`` as trimtab sees it; once armed, its clocks give what ``broken`` makes of the time."""

    def __init__(self, broken: Callable[[int], Any]) -> None:
        self.armed = False
        self._broken = broken
        for name in ("perf_counter_ns", "thread_time_ns", "time_ns", "monotonic_ns", "monotonic", "perf_counter"):
            setattr(self, name, self._clock(getattr(time, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def _clock(self, right: Callable[[], int]) -> Callable[[], Any]:
        return lambda: self._broken(right()) if self.armed else right()


def clock(broken: Callable[[int], Any]) -> Fault:
    """Every clock that trimtab reads goes wrong, from one step on."""

    def fault(scene: Scene) -> None:
        false = _Time(broken)
        replace_in_trimtab(time, false)
        for name in ("perf_counter_ns", "thread_time_ns", "time_ns"):
            with contextlib.suppress(LookupError):
                replace_in_trimtab(getattr(time, name), getattr(false, name))
        scene.when_due(lambda: setattr(false, "armed", True))

    return fault


def raise_os_error(_now: int) -> int:
    """A clock that cannot be read."""
    raise OSError(errno.EINVAL, "no such clock")
