"""Turns: of the threads of a process, one computes at a time.

What belongs to a process - its random generators, the groups of torch.distributed, a framework's globals - is then each
thread's own: it changes hands with the turn. A thread keeps its turn until it has to wait, for a message or for the
other members of a collective; so threads that wait for each other go on, and what is drawn and computed does not depend
on who came first. Nothing is lost by it on a GPU, to which one thread gives work as fast as several do; on the CPU the
operations of one use all cores.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from trimtab.fbd.split.random_states import RandomStates

_NOBODY: Final = -1
"""Has the turn: what is the process's is as its main thread left it."""


class Switched(Protocol):
    """What a process has once, and each thread is to have for itself."""

    def fresh(self, member: int) -> Any:
        """With what a thread begins."""
        ...

    def swap(self, state: Any) -> Any:
        """Put this in its place; returns what was there."""
        ...


class OwnRandom:
    """Random generators: PyTorch's as given, and those of Python and NumPy. Each thread begins with the process's."""

    def __init__(self, states: RandomStates | None = None) -> None:
        """None: PyTorch's on the host."""
        self._states = states or RandomStates()

    def fresh(self, member: int) -> Any:  # noqa: ARG002 (the same for all: whoever wants others seeds them)
        """See :class:`Switched`."""
        return self._capture()

    def swap(self, state: Any) -> Any:
        """See :class:`Switched`."""
        before = self._capture()
        tensors, plain, numpy_state = state
        self._states.restore(tensors)
        random.setstate(plain)
        numpy = sys.modules.get("numpy")
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        return before

    def _capture(self) -> tuple[tuple[Any, ...], Any, Any]:
        numpy = sys.modules.get("numpy")
        return self._states.capture(), random.getstate(), None if numpy is None else numpy.random.get_state()


class OtherFailed(RuntimeError):  # noqa: N818 (what happened, not what was wrong)
    """Another thread of this process has failed, so this one ends, too."""


class Turns:
    """Of some threads of this process, numbered from 0."""

    def __init__(self, members: int, switched: Sequence[Switched] | None = None) -> None:
        """``switched``: None: :class:`OwnRandom` on the host.

        Raises:
            ValueError: there are no members.
        """
        if members < 1:
            raise ValueError(f"turns are taken by at least 1 thread, not {members}")
        self._members = range(members)
        self._switched = tuple(switched) if switched is not None else (OwnRandom(),)
        self._changed = threading.Condition()
        self._here = threading.local()
        self._holder = _NOBODY
        self._loaded = _NOBODY
        """Whose state is in place."""
        self._queue: deque[int] = deque()
        """Who waits for a turn: first come, first served."""
        self._states: dict[int, list[Any]] = {
            member: [one.fresh(member) for one in self._switched] for member in self._members
        }
        self._failure: BaseException | None = None
        self._leaving: dict[int, list[Callable[[], None]]] = {member: [] for member in self._members}

    @property
    def failure(self) -> BaseException | None:
        """What ended the threads."""
        return self._failure

    @property
    def member(self) -> int | None:
        """The number of the thread that asks; None: it takes no turns."""
        return getattr(self._here, "member", None)

    @contextmanager
    def taken(self, member: int) -> Iterator[None]:
        """The calling thread is ``member``, and has its turn within, but for when it waits."""
        if member not in self._members or self.member is not None:
            raise ValueError(f"thread {member} cannot take a turn here: there is no such member, or this thread is one")
        self._here.member = member
        with self._changed:
            self._take(member)
        try:
            yield
        finally:
            if self._failure is not None:
                for leave in self._leaving[member]:
                    leave()
            with self._changed:
                self._leave(member)
            self._here.member = None

    def on_failure(self, leave: Callable[[], None]) -> None:
        """To be called as the calling thread ends because it, or another, has failed: what others wait for there."""
        if self.member is not None:
            self._leaving[self.member].append(leave)

    def until(self, found: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait, without the turn, until ``found``, which is asked after each :meth:`notify`; False: not within
        ``timeout`` seconds.

        Raises:
            OtherFailed: meanwhile another thread has failed.
        """
        member = self.member
        with self._changed:
            if member is not None:
                self._leave(member)
            try:
                came = self._changed.wait_for(lambda: self._failure is not None or found(), timeout)
            finally:
                if member is not None:
                    self._take(member)
            self._check()
        return came

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Within, others may compute: for what blocks. OtherFailed afterwards, where one has failed."""
        member = self.member
        if member is not None:
            with self._changed:
                self._leave(member)
        try:
            yield
        finally:
            if member is not None:
                with self._changed:
                    self._take(member)
        with self._changed:
            self._check()

    def notify(self) -> None:
        """Something has happened that a thread may wait for. From any thread."""
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """All threads are to end, at the next thing that they wait for; the first reason is kept."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def end(self) -> None:
        """No thread has a turn any more: what is the process's is put back as it was before the first."""
        with self._changed:
            if self._holder != _NOBODY:
                raise RuntimeError(f"thread {self._holder} still has its turn")
            self._load(_NOBODY)

    # with the condition held

    def _check(self) -> None:
        if self._failure is not None:
            raise OtherFailed(f"another thread of this process has failed: {self._failure}")

    def _take(self, member: int) -> None:
        self._queue.append(member)
        self._changed.wait_for(lambda: self._holder == _NOBODY and self._queue[0] == member)
        self._queue.popleft()
        self._holder = member
        self._load(member)

    def _leave(self, member: int) -> None:
        if self._holder == member:
            self._holder = _NOBODY
            self._changed.notify_all()

    def _load(self, member: int) -> None:
        """What has not changed hands stays where it is: a thread that comes back finds its own."""
        if self._loaded == member:
            return
        states = self._states.pop(member)
        self._states[self._loaded] = [one.swap(state) for one, state in zip(self._switched, states, strict=True)]
        self._loaded = member
