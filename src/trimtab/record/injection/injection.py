"""Faults at work: makes this rank as slow as the drill asks for, in the steps and places it asks for.

Engines and the session call in at these points, each of which costs next to nothing where no fault acts:

- :meth:`Injection.step_begin`, ``begin`` and ``end``: an observer that comes before all others;
- :meth:`Injection.forward_launch`: at the entry of each forward step, before anything is computed;
- :meth:`Injection.delay_data`: before each read of the job's data iterator, inside whatever measures it;
- :meth:`Injection.factor`: asked by an emulated device how much longer a call takes;
- :meth:`Injection.link_delay`: asked by the interception how much later a communication is complete;
- :meth:`Injection.blocked`: told by the interception of time spent waiting, which is not compute.

``coordinates`` is to be set as soon as the layout is known; faults of a stage or replica begin to act only then.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.record.clocks import Clock, Device
from trimtab.record.injection.faults import Faults
from trimtab.record.observe import Call
from trimtab.record.recorder import Recorder
from trimtab.topology import Coordinates

_LOG = logging.getLogger("trimtab")
_STATE = "injection"
_HIDDEN_SHARE = 0.7  # of the queued work that a hidden stall uses: a sleep may take longer than it was asked to
_YOUNG_GENERATION = 1  # a full collection of a large heap would take longer than the pause asked for


class Injection:
    """The faults of a job on one rank. Loud: see :meth:`announce`."""

    def __init__(
        self,
        faults: Faults,
        rank: int,
        clock: Clock = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._faults = faults
        self._rank = rank
        self._clock = clock
        self._sleep = sleep
        self._queued_ns: Callable[[], int] = _nothing_queued
        self._stretch = True
        self._stream: Any = None
        self._step = -1
        self._launched = False
        self._hidden_left = 0
        self._waited = 0
        self._announced: set[str] = set()
        self._recorder: Recorder | None = None
        self._coordinates: Coordinates | None = None

    def use(self, device: Device) -> None:
        """Say which device the rank computes on. An emulated one asks for :meth:`factor` itself."""
        self._queued_ns = getattr(device, "queued_ns", _nothing_queued)
        self._stretch = device.kind != "emulated"
        if device.kind == "cuda":
            from trimtab.record.injection.spin import StreamTimes  # needs torch

            self._stream = StreamTimes()

    @property
    def coordinates(self) -> Coordinates | None:
        """Where this rank stands, once that is known."""
        return self._coordinates

    @coordinates.setter
    def coordinates(self, at: Coordinates | None) -> None:
        self._coordinates = at
        self.announce(self._recorder)

    def announce(self, recorder: Recorder | None) -> None:
        """Warn of each fault that acts on this rank, and have the recorder write it into the rank's file."""
        self._recorder = recorder
        new = [str(f) for f in self._faults.on(self._rank, self._coordinates) if str(f) not in self._announced]
        for fault in new:
            _LOG.warning("trimtab: rank %d: FAULT INJECTED: %s", self._rank, fault)
        self._announced.update(new)
        if recorder is not None and new:
            recorder.describe(faults=sorted(self._announced))

    # --------------------------------------------------------------- observer

    def step_begin(self, step: int) -> None:
        """The faults of this step act from now on."""
        self._step = step
        self._launched = False
        self._hidden_left = self._faults.hidden_stall_ns(self._rank, step)

    def begin(self, call: Call) -> None:
        """A hidden stall happens here; on a real device the time of the call is taken."""
        if self._hidden_left > 0:
            self._stall_hidden()
        if self._stretch:
            start = self._clock() if self._stream is None else self._stream.now()
            call.state[_STATE] = (start, self._waited)

    def end(self, call: Call) -> None:
        """On a real device the call is lengthened in proportion to its own time, without the waits inside it."""
        begun = call.state.pop(_STATE, None)
        if begun is None:
            return
        factor = self.factor(call)
        start, waited = begun
        if self._stream is not None:
            self._stream.lengthen((call.kind, call.name), start, factor - 1.0)
        elif factor > 1.0:
            own = self._clock() - start - (self._waited - waited)
            self._sleep(max(0, own) * (factor - 1.0) / 1e9)
            self._waited = waited + self._clock() - start  # what lies around it must not lengthen it once more

    # ------------------------------------------------------------------ hooks

    def factor(self, call: Call) -> float:
        """How many times as long the call takes."""
        return self._faults.compute_factor(call.kind, self._rank, self._step, call.microbatch, self._coordinates)

    def link_delay(self, members: Sequence[int]) -> int:
        """Nanoseconds by which a communication between these global ranks is complete later."""
        return self._faults.link_delay_ns(members, self._step)

    def blocked(self, start: int, end: int) -> None:
        """A communication held the host up."""
        self._waited += end - start

    def forward_launch(self) -> None:
        """The first forward of a step stalls, or is interrupted by the garbage collector."""
        if self._launched:
            return
        self._launched = True
        stall = self._faults.host_stall_ns(self._rank, self._step)
        if stall > 0:
            self._sleep(stall / 1e9)
        pause = self._faults.gc_pause_ns(self._rank, self._step)
        if pause > 0:
            self._collect_slowly(pause)

    def delay_data(self) -> None:
        """The read of the data iterator that is about to happen is slow."""
        delay = self._faults.data_delay_ns(self._rank, self._step)
        if delay > 0:
            self._sleep(delay / 1e9)

    def _stall_hidden(self) -> None:
        stall = min(self._hidden_left, int(self._queued_ns() * _HIDDEN_SHARE))
        if stall > 0:
            self._hidden_left -= stall
            self._sleep(stall / 1e9)

    def _collect_slowly(self, pause: int) -> None:
        def prolong(phase: str, info: dict[str, Any]) -> None:
            del info
            if phase == "start":
                self._sleep(pause / 1e9)

        gc.callbacks.append(prolong)  # behind the watch, which so sees the whole pause
        try:
            gc.collect(_YOUNG_GENERATION)
        finally:
            gc.callbacks.remove(prolong)


def _nothing_queued() -> int:
    return 0
