"""Methods of ``Work`` and ``ProcessGroup`` that show the end of a communication, wrapped while trimtab is attached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch._C._distributed_c10d import ProcessGroup, Work

from trimtab.record.communication.works import C10D_FILE, SUBJECT_WAIT, Works
from trimtab.record.complain import Complaints

WAITING: Final = ("wait", "synchronize", "block_current_stream")
"""Methods of ``Work`` that wait; which of them there are depends on the version of torch."""
POLLING: Final = "is_completed"
"""The method of ``Work`` that only asks."""
COALESCING: Final = ("_start_coalescing", "_end_coalescing")
"""Methods of ``ProcessGroup`` around communications that become one."""


def wrapped() -> Iterator[tuple[type, str]]:
    """Every method that is wrapped while trimtab is attached, and the class that it is of."""
    yield from ((Work, method) for method in WAITING if method in Work.__dict__)
    yield Work, POLLING
    yield from ((ProcessGroup, method) for method in COALESCING)


class WorkMethods:
    """Wraps the methods, and puts the originals back."""

    def __init__(self, works: Works, complaints: Complaints) -> None:
        self._works = works
        self._complain = complaints.about
        self._originals: dict[tuple[type, str], tuple[Any, Any]] = {}

    def install(self) -> None:
        """Wrap them."""
        wrappers = dict.fromkeys(WAITING, self._waiting) | {
            POLLING: self._polling,
            COALESCING[0]: self._starting_together,
            COALESCING[1]: self._ending_together,
        }
        for owner, method in wrapped():
            self._replace(owner, method, wrappers[method])

    def remove(self) -> None:
        """Put the originals back. Where others wrapped a method since, ours stays in between and just passes on."""
        for (owner, name), (original, ours) in self._originals.items():
            if owner.__dict__.get(name) is ours:
                setattr(owner, name, original)
        self._originals.clear()

    def _replace(self, owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        ours = wrap(getattr(owner, name))
        self._originals[owner, name] = (original, ours)
        setattr(owner, name, ours)

    def _waiting(self, original: Any) -> Any:
        works, complain = self._works, self._complain
        in_place_of_thread, under_way, mark = works.waits_in_place, works.under_way, works.mark

        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            pending, at_once, in_place, begin = None, False, False, 0
            try:
                code = sys._getframe(1).f_code
                # Is it a function of torch.distributed that waits, on behalf of a synchronous call?
                in_place = code.co_filename == C10D_FILE and code.co_name != "wait"
                pending = in_place_of_thread() if in_place else None
                if pending is not None:
                    at_once = True
                else:
                    pending = under_way(work)
                    if pending is not None:
                        begin = pending.waited_from = mark()
            except Exception as error:
                complain(SUBJECT_WAIT, error)
            result = original(work, *args, **kwargs)
            if pending is None:
                return result
            try:
                if at_once:
                    works.ended_in_place(pending)
                else:
                    works.waited(pending, work, begin, in_place)
            except Exception as error:
                complain(SUBJECT_WAIT, error)
            if pending.late is not None:
                pending.late.value()  # raises what the communication itself raised
            return result

        return wait

    def _polling(self, original: Any) -> Any:
        def is_completed(work: Work) -> bool:
            complete = original(work)
            if complete:
                self._guard(lambda: self._works.seen_complete(work))
            return complete

        return is_completed

    def _starting_together(self, original: Any) -> Any:
        def _start_coalescing(group: Any, *args: Any) -> Any:
            result = original(group, *args)
            self._guard(self._works.start_together)
            return result

        return _start_coalescing

    def _ending_together(self, original: Any) -> Any:
        def _end_coalescing(group: Any, *args: Any) -> Any:
            work = original(group, *args)
            try:
                work = self._works.changed_together(work)
            except Exception as error:
                self._complain(SUBJECT_WAIT, error)
            self._guard(lambda: self._works.end_together(work))
            return work

        return _end_coalescing

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._complain(SUBJECT_WAIT, error)
