"""An emulated device: real arithmetic on the host, but the time of an accelerator with a queue.

Many ranks on few cores make wall times useless, so the compute of each call is padded to a target duration. The
device works through its queue asynchronously: a call starts when the one before it has ended, the host runs ahead,
and it sleeps only where a real host would be held up by its device, before a communication and at the end of a step.
So a pause of the host costs nothing as long as the device still has work, as on real hardware.

Time of the device follows from the host's clock and the targets alone. Within a layer the target is spread evenly
over the stretches between its communications (how many there are is learnt from the last layer), so that a slow rank
comes late to its next collective and not only to the one after the layer. In an optimizer step and an embedding the
arithmetic lies too unevenly for that: what is left of the target comes at their end.

Where the actions of a pipeline have times of their own (``[emulate.pipeline]``, ``engines/emulated_pipeline.py``), the
layers within them have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trimtab.config import EmulateConfig
from trimtab.events import Kind
from trimtab.record.observe import Call

_STATE = "emulate"
_SPREAD = ("layer", "output")
_Key = tuple[Kind, str]


class _Frame:
    """A call that has begun on the device and not ended."""

    __slots__ = ("communications", "key", "since", "target", "used")

    def __init__(self, key: _Key, target: int, since: int) -> None:
        self.key = key
        self.target = target
        self.used = 0
        """Device time taken so far, in stretches that are over."""
        self.since = since
        """When the device began, or will begin, with the present stretch."""
        self.communications = 0


class EmulatedDevice:
    """A :class:`~trimtab.record.clocks.Device` that is also an observer: engines tell it what is computed.

    The padded compute of a call (time blocked by communications inside it not counted) is its target times
    ``factor(call)``. Where the real arithmetic took longer, it takes as long as that and counts as
    ``oversubscribed``. Calls without a target are left alone: on the device they take no time of their own.
    """

    kind = "emulated"

    def __init__(
        self,
        config: EmulateConfig,
        factor: Callable[[Call], float] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = "emulated accelerator"
        self.busy_until = 0
        """When the queue will be empty, nanoseconds of ``clock``."""
        self.oversubscribed = 0
        self._factor = factor
        self._clock = clock
        self._sleep = sleep
        self._forward_ns: dict[str, int] = {}
        if not config.pipeline.forward_ms:
            self._forward_ns = {
                "layer": _nanoseconds(config.layer_forward_ms),
                "embedding": _nanoseconds(config.embedding_ms),
                "output": _nanoseconds(config.output_ms),
            }
        self._backward_ratio = config.backward_ratio
        self._optimizer_ns = _nanoseconds(config.optimizer_ms)
        self._frames: list[_Frame] = []
        # When the last call began or ended: its observer marks next and means that moment, even if held up since.
        self._edge: int | None = None
        self._expected: dict[_Key, int] = {}

    # ----------------------------------------------------------------- device

    def mark(self) -> int:
        """The time at which the device will have done all that is queued; first after a begin or end, of that.

        For the observers of calls. Others ask for the :meth:`position`.
        """
        edge, self._edge = self._edge, None
        return max(self._clock(), self.busy_until) if edge is None else edge

    def position(self) -> int:
        """The time at which the device will have done all that is queued."""
        return max(self._clock(), self.busy_until)

    def resolve(self, mark: int) -> int | None:
        """The mark itself: an emulated device knows its future."""
        return mark

    def drain(self) -> None:
        """Sleep until the queue is empty; inside a call, after the share of its target that is due by now."""
        if not self._frames:
            self._sleep_until(self.busy_until)
            return
        frame = self._frames[-1]
        expected = self._expected.get(frame.key, 0) if frame.key[1] in _SPREAD else 0
        stretches_left = expected + 1 - frame.communications
        share = max(0, frame.target - frame.used) // stretches_left if stretches_left > 1 else 0
        frame.communications += 1
        self.busy_until = max(self.busy_until, frame.since + share)
        self._sleep_until(self.busy_until)
        now = self._clock()  # oversleeping is part of the share, else it would come on top of the target
        frame.used += max(0, now - frame.since)
        frame.since = now

    def blocked(self, start: int, end: int) -> None:
        """The host was held up from ``start`` to ``end`` (a communication, the garbage collector).

        Inside a call that holds the device up, too, except for what it still had queued at ``start``.
        """
        if self._frames:
            frame = self._frames[-1]
            frame.since = max(frame.since, end - max(0, start - frame.since))

    def queued_ns(self) -> int:
        """How long the device is going to be busy from now on."""
        return max(0, self.busy_until - self._clock())

    # --------------------------------------------------------------- observer

    def step_begin(self, step: int) -> None:
        """The host waits for its device; calls that never ended (their forward raised) are forgotten."""
        del step
        self._frames.clear()
        self._sleep_until(self.busy_until)

    def begin(self, call: Call) -> None:
        """The call joins the queue."""
        self._edge = None
        target = self._target(call)
        if target <= 0:
            return
        now = self._clock()
        if self._frames:  # a call within a call (recompute in a backward) interrupts it
            outer = self._frames[-1]
            outer.used += max(0, now - outer.since)
            outer.since = max(outer.since, now)
        frame = _Frame((call.kind, call.name), target, max(now, self.busy_until))
        call.state[_STATE] = frame
        self._frames.append(frame)
        self._edge = frame.since

    def end(self, call: Call) -> None:
        """All of the call is queued: the device will be busy until its target is used up."""
        self._edge = None
        frame = call.state.pop(_STATE, None)
        if frame not in self._frames:
            return
        while self._frames.pop() is not frame:
            pass  # what lies above never ended
        now = self._clock()
        done = frame.since + max(0, frame.target - frame.used)
        if frame.used + max(0, now - frame.since) > frame.target:
            self.oversubscribed += 1
        self.busy_until = max(done, self.busy_until)
        self._edge = max(now, self.busy_until)
        self._expected[frame.key] = frame.communications
        if self._frames:
            outer = self._frames[-1]
            outer.since = max(outer.since, now, self.busy_until)

    def _target(self, call: Call) -> int:
        """Nanoseconds the call takes on the device; 0 where it is not padded."""
        if call.kind is Kind.OPTIMIZER:
            target: float = self._optimizer_ns
        elif call.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            target = self._forward_ns.get(call.name, 0)
        elif call.kind is Kind.BACKWARD:
            target = self._forward_ns.get(call.name, 0) * self._backward_ratio
        else:
            target = 0
        return round(target * (self._factor(call) if self._factor is not None else 1.0))

    def _sleep_until(self, moment: int) -> None:
        while (left := moment - self._clock()) > 0:
            self._sleep(left / 1e9)


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
