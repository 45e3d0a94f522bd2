"""How far the host may run ahead of the device, and how long actions take: by the clock, or by CUDA events.

On a CPU an action has run when its call returns. On CUDA the call has only launched it, so the host waits, before it
chooses the next action, until no more than a few are launched and not done: a choice made long before its turn is made
with old knowledge. There is no synchronisation of the device, only with the event behind an action.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.costs import Costs, Table
from trimtab.pipeline.shape import Shape

if TYPE_CHECKING:
    from trimtab.transport.interface import Message

_WEIGHT = 0.25
"""Of a new time in the running mean."""


class Times:
    """Running means of how long actions take, by work and chunk; seconds."""

    __slots__ = ("_counts", "_means", "_sums")

    def __init__(self) -> None:
        self._means: dict[tuple[Work, int], float] = {}
        self._sums: dict[tuple[Work, int], float] = {}
        self._counts: dict[tuple[Work, int], int] = {}

    def add(self, action: Action, seconds: float) -> None:
        """An action took this long."""
        key = (action.work, action.chunk)
        mean = self._means.get(key)
        self._means[key] = seconds if mean is None else mean + _WEIGHT * (seconds - mean)
        self._sums[key] = self._sums.get(key, 0.0) + seconds
        self._counts[key] = self._counts.get(key, 0) + 1

    def expected(self, action: Action) -> float | None:
        """How long it will probably take; None: none of its kind has been measured."""
        return self._means.get((action.work, action.chunk))

    @property
    def means(self) -> dict[tuple[Work, int], float]:
        """The running means."""
        return dict(self._means)

    def costs(self, shape: Shape) -> Costs | None:
        """The running means as costs, for this stage's dispatcher (other stages count as this one); None: not all
        kinds of actions have been measured."""
        means = self._means
        whole = all((Work.BW, chunk) in means for chunk in range(shape.chunks))
        kinds = (Work.F, Work.BW) if whole else (Work.F, Work.B, Work.W)
        if any((work, chunk) not in means for work in kinds for chunk in range(shape.chunks)):
            return None

        def table(work: Work) -> Table:
            return (tuple(means.get((work, chunk), 0.0) for chunk in range(shape.chunks)),) * shape.stages

        activation = ((1.0 / shape.chunks,) * shape.chunks,) * shape.stages
        return Costs(table(Work.F), table(Work.BW if whole else Work.B), table(Work.W), activation)

    def take(self) -> dict[tuple[Work, int], float]:
        """Plain means since the last call."""
        taken = {key: total / self._counts[key] for key, total in self._sums.items()}
        self._sums.clear()
        self._counts.clear()
        return taken


class Pace(Protocol):
    """One kind of device."""

    def hold_back(self) -> None:
        """Before an action is chosen: wait while too many are launched and not done."""
        ...

    def backlog(self, now: float) -> float:
        """Seconds from now on until what has been launched will be done, as far as times are known."""
        ...

    def begin(self, action: Action) -> None:
        """The action is about to be launched."""
        ...

    def end(self, action: Action) -> Callable[[], bool] | None:
        """It has been launched. Says whether what it made can be read; None: it can."""
        ...

    def mark(self) -> Callable[[], bool] | None:
        """Says whether all that has been launched so far is done; None: it is."""
        ...

    def admit(self, message: Message) -> None:
        """What is launched from now on may read the message."""
        ...


class HostPace:
    """Actions have run when their call returns."""

    def __init__(self, times: Times, clock: Callable[[], float]) -> None:
        self._times = times
        self._clock = clock
        self._began = 0.0

    def hold_back(self) -> None:
        """Nothing is ahead."""

    def backlog(self, now: float) -> float:
        """Nothing is left to do."""
        del now
        return 0.0

    def begin(self, action: Action) -> None:
        """Look at the clock."""
        del action
        self._began = self._clock()

    def end(self, action: Action) -> None:
        """Look again."""
        self._times.add(action, self._clock() - self._began)

    def mark(self) -> None:
        """It is."""

    def admit(self, message: Message) -> None:
        """It has arrived."""


class _Launched(NamedTuple):
    action: Action
    begin: torch.cuda.Event
    end: torch.cuda.Event
    at: float | None
    """When it began, where the device was idle; None: when the one before ended."""


class CudaPace:
    """Actions run on the current stream of a device.

    Args:
        times: Told of each action once its end has been seen.
        ahead: How many may be launched and not done when the next is chosen; at least 1.
        device: Whose current stream is used.
        clock: Seconds.
    """

    def __init__(self, times: Times, ahead: int, device: torch.device, clock: Callable[[], float]) -> None:
        self._times = times
        self._ahead = ahead
        self._device = device
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._begin: torch.cuda.Event | None = None
        self._at: float | None = None
        self._last: torch.cuda.Event | None = None
        self._ended = 0.0
        """When the last one that was seen to be done ended."""

    def hold_back(self) -> None:
        """Wait for the oldest while there are too many."""
        launched = self._launched
        while launched and (len(launched) > self._ahead or launched[0].end.query()):
            action, begin, end, at = launched.popleft()
            done = end.query()
            end.synchronize()
            seconds = begin.elapsed_time(end) * 1e-3
            self._times.add(action, seconds)
            began, now = self._ended if at is None else at, self._clock()
            self._ended = min(began + seconds, now) if done else now

    def backlog(self, now: float) -> float:
        """From the times that such actions usually take; none where one of them is not known."""
        launched = self._launched
        if not launched:
            return 0.0
        first, *others = (self._times.expected(one.action) for one in launched)
        if first is None or None in others:
            return 0.0
        at = launched[0].at
        began = self._ended if at is None else at
        return max(began + first - now, 0.0) + sum(filter(None, others))

    def begin(self, action: Action) -> None:
        """Where the stream is busy the action begins as the one before ends, and an event is saved."""
        del action
        if self._last is None or self._last.query():
            self._begin, self._at = self._record(), self._clock()
        else:
            self._begin, self._at = self._last, None

    def end(self, action: Action) -> Callable[[], bool]:
        """The event behind the action."""
        end = self._last = self._record()
        assert self._begin is not None
        self._launched.append(_Launched(action, self._begin, end, self._at))
        return end.query

    def mark(self) -> Callable[[], bool]:
        """An event."""
        return self._record().query

    def admit(self, message: Message) -> None:
        """Order the stream after the arrival; the memory is not used again before the stream has read it."""
        stream = torch.cuda.current_stream(self._device)
        if message.event is not None:
            stream.wait_event(message.event)
        for tensor in message.tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
