"""Breaking trimtab from inside: every place that runs in the job, found by running the job, can be made to fail.

A *site* is a function of trimtab that another function of trimtab calls, or a call out of trimtab into a library
(``SpanObserver.begin > perf_counter_ns``). Sites are found with Python's profiling hook, so what is added to trimtab
is drilled without being named anywhere. The profiling hook also breaks them: what it raises is raised by the call,
and unlike a wrapper it leaves the stack of frames as it was.

The first function that the job itself calls is no site (nobody can catch what happens before its first line), and
neither are the job's own functions, which trimtab passes on.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from scene import NOT_REACHED, Scene

import trimtab

Act = Callable[[], object]

_OURS = str(Path(trimtab.__file__).parent)
_SHIM = f"{_OURS}/engines/cpu.py"
"""Part of the job, which could not run without it here."""
_LIBRARIES = ("/json/", "/pyarrow/", "/numpy/", "/pathlib", "/threading.py", "/weakref.py")
_OF_TORCH = frozenset(
    [
        "register_hook",
        "queue_callback",
        "unbox",
        "boxed",
        "get_future",
        "add_done_callback",
        "_current_graph_task_id",
        "is_initialized",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "data_ptr",
        "register_forward_hook",
        "register_forward_pre_hook",
    ]
)
"""What trimtab asks of torch for itself. Anything else of torch that it calls is the job's own call, passed on."""
_PLACE = "in the place of the error"
_ENTRIES = frozenset({"span.__init__"})
"""Called by a job as a rule, and by a decorator of ours in its place."""
_THE_JOBS = frozenset({"next", "__next__", "redispatch_boxed"})


SiteCalls = dict[str, dict[str, int]]
"""How often a rank calls each site, by phase: ``attach``, ``run``, ``detach``; ``writer`` is trimtab's own threads."""


def find_sites(scene: Scene) -> None:
    """A drill without a fault: finds where the job comes through trimtab."""
    calls: Counter[tuple[str, str]] = Counter()
    phase = [""]

    def saw(frame: FrameType, event: str, argument: Any) -> None:
        site = _site(frame, event, argument)
        if site is not None:
            calls[_where(phase[0]), site] += 1

    def enter(name: str) -> None:
        phase[0] = name
        if name == "end":
            found: SiteCalls = {}
            for (where, site), count in sorted(calls.items()):
                found.setdefault(where, {})[site] = count
            scene.answer["found"] = found

    scene.at_phase.append(enter)
    _profile(saw)


def at_site(scene: Scene, phases: Sequence[str], act: Act, note: str = "") -> None:
    """Have ``act`` done in the place of one call of a site in one of the phases, both chosen at random.

    How often a thread of trimtab's comes by a site differs from run to run, so that call may not come.
    """
    sites = [(phase, site) for phase in phases for site in sorted(scene.sites.get(phase, {}))]
    phase, site = scene.random.choice(sites)
    number = scene.random.randrange(scene.sites[phase][site])
    scene.site = site
    if not scene.attached:  # there are no sites; the job sees the same at a similar moment
        _at_a_similar_moment(scene, phase, act)
    elif scene.hit:
        what = f"{site} [{phase}, call {number}]{note}"
        scene.tell(f"{what} {NOT_REACHED}")

        def act_and_tell() -> object:
            scene.tell(what)
            return act()

        breaker = Breaker(phase, site, number, act_and_tell)
        scene.at_phase.append(breaker.enter)
        _profile(breaker.saw)


def _at_a_similar_moment(scene: Scene, phase: str, act: Act) -> None:
    if phase == "writer":  # it runs from the beginning
        phase = scene.random.choice(("attach", "run"))
    if phase == "run":
        scene.when_due(act)
        return
    moment = {"attach": "run", "detach": "detach"}[phase]
    scene.at_phase.append(lambda entered: act() if entered == moment and scene.hit else None)


class Breaker:
    """Acts once, in the place of one call of a site; what it raises is raised by the call."""

    def __init__(self, phase: str, site: str, number: int, act: Act) -> None:
        """The call is the one with that number, from 0, in that phase."""
        self._sought = (phase, site)
        self._left = number
        self._act = act
        self._phase = ""
        self._done = False

    def enter(self, phase: str) -> None:
        """The job has come to another phase."""
        self._phase = phase

    def saw(self, frame: FrameType, event: str, argument: Any) -> None:
        """The profiling hook."""
        if self._done or event not in ("call", "c_call"):
            return
        phase, site = self._sought
        if _site(frame, event, argument) != site or _where(self._phase) != phase:
            return
        self._left -= 1
        if self._left < 0:
            self._done = True
            sys.setprofile(None)
            self._act()


def break_for_good(functions: Sequence[FunctionType], error: Exception) -> None:
    """These functions raise from their next call on; a call into a library cannot be broken for good."""
    for function in functions:
        function.__code__ = _raising(error, function.__code__.co_freevars)


def functions_named(site: str) -> list[FunctionType]:
    """Functions of trimtab of that qualified name, closures included; to be asked on the main thread."""
    gc.unfreeze()
    # The type is asked, not the object: some objects answer for others, and do things when asked.
    functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
    return [one for one in functions if _is_ours(one.__code__) and one.__code__.co_qualname == site]


def _raising(error: Exception, free: tuple[str, ...]) -> CodeType:
    """Code of a function that takes anything and raises, with the ``free`` variables of the one it replaces."""
    code = _broken.__code__
    constants = tuple(error if constant == _PLACE else constant for constant in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=free)


def _broken(*_args: Any, **_more: Any) -> None:
    raise "in the place of the error"  # type: ignore[misc]  # noqa


def _profile(saw: Callable[[FrameType, str, Any], None]) -> None:
    threading.setprofile(saw)
    sys.setprofile(saw)


def _where(phase: str) -> str:
    thread = threading.current_thread()
    return "writer" if thread.name.startswith("trimtab") else phase


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS) and code.co_filename != _SHIM


def _site(frame: FrameType, event: str, argument: Any) -> str | None:
    code = frame.f_code
    if event == "c_call":
        if not _is_ours(code) or not _is_called_for_itself(argument, argument.__name__):
            return None
        return None if _within_shim(frame) else f"{code.co_qualname} > {argument.__name__}"
    caller = frame.f_back
    if event != "call" or caller is None or not _is_ours(caller.f_code) or _within_shim(caller):
        return None
    if _is_ours(code):
        return code.co_qualname if _is_site(code) else None
    foreign = code.co_name in _OF_TORCH or any(part in code.co_filename for part in _LIBRARIES)
    return f"{caller.f_code.co_qualname} > {code.co_qualname}" if foreign else None


def _within_shim(frame: FrameType) -> bool:
    """Whether it is code of ours that the shim has called."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_OURS):
        if caller.f_code.co_filename == _SHIM:
            return True
        caller = caller.f_back
    return False


def _is_site(code: CodeType) -> bool:
    # A generator is called once more when it is thrown away, where nobody can catch anything.
    return not (_guards(code) or code.co_qualname in _ENTRIES or code.co_flags & inspect.CO_GENERATOR)


def _guards(code: CodeType) -> bool:
    """Whether the function catches what fails in it, so that there is no place for a failure but inside."""
    return bool(code.co_exceptiontable) and "Exception" in code.co_names


def _is_called_for_itself(function: Any, name: str) -> bool:
    if name in _THE_JOBS:
        return False
    module = getattr(function, "__module__", None) or ""
    owner = type(getattr(function, "__self__", None)).__module__
    of_torch = "torch" in module or "torch" in owner or "c10d" in owner
    return name in _OF_TORCH if of_torch else True
