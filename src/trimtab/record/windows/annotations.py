"""Recorded spans and communications as annotations of torch.profiler, by event id: what joins the two.

Put in place of the span recorder's own methods while a window is open, and taken away again, so that nothing is paid
outside of windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch._C._autograd import _record_function_with_args_enter, _record_function_with_args_exit

from trimtab.events import Kind
from trimtab.record.communication.collectives import Interception
from trimtab.record.communication.pending import Pending
from trimtab.record.complain import Complaints
from trimtab.record.observe import Call
from trimtab.record.spans import SpanObserver

AROUND: Final = "trimtab:"
"""``trimtab:<event_id> <name>`` lies around what the event was."""
BEGIN: Final = "trimtab-begin:"
"""Where an event begins ..."""
END: Final = "trimtab-end:"
"""... and ends that does not nest with the profiler's own slices: backward passes, told of by tensor hooks."""
_NESTED: Final = (Kind.FORWARD, Kind.RECOMPUTE, Kind.OPTIMIZER)
# User annotations (of which the profiler shows what their kernels took on the GPU, too), without the detour over the
# dispatcher that torch.profiler.record_function takes.
_enter: Final[Callable[[str], Any]] = _record_function_with_args_enter
_leave: Final[Callable[[Any], None]] = _record_function_with_args_exit


class Annotations:
    """Annotates what one rank records. :meth:`on` and :meth:`off` on the training thread."""

    def __init__(self, spans: SpanObserver) -> None:
        self.interception: Interception | None = None
        """Communications are annotated where this is set."""
        self._spans = spans
        self._span_begin = spans.begin
        self._span_end = spans.end
        self._open: dict[int, Any] = {}
        self._step: Any = None
        self._complaints = Complaints()

    def on(self) -> None:
        """From here on each span and communication is annotated."""
        self._spans.begin, self._spans.end = self._begin, self._end
        if self.interception is not None:
            self.interception.annotate(self)

    def off(self) -> None:
        """No more, and what is open is closed."""
        vars(self._spans).pop("begin", None)
        vars(self._spans).pop("end", None)
        if self.interception is not None:
            self.interception.annotate(None)
        while self._open:
            _leave(self._open.popitem()[1])
        self.end_step()

    def begin_step(self, step: int) -> None:
        """The name is what the profiler's viewers look for."""
        self._step = _enter(f"ProfilerStep#{step}")

    def end_step(self) -> None:
        """The step ends here."""
        step, self._step = self._step, None
        if step is not None:
            _leave(step)

    def _begin(self, call: Call) -> None:
        self._span_begin(call)
        if call.span is None:
            return
        try:
            event_id = call.span[0]
            if call.kind in _NESTED:
                self._open[event_id] = _enter(f"{AROUND}{event_id} {_title(call)}")
            else:
                _leave(_enter(f"{BEGIN}{event_id} {_title(call)}"))
        except Exception as error:
            self._complaints.about("the annotation of a span", error)

    def _end(self, call: Call) -> None:
        try:
            if call.span is not None:
                event_id = call.span[0]
                around = self._open.pop(event_id, None)
                _leave(_enter(f"{END}{event_id} {_title(call)}") if around is None else around)
        except Exception as error:
            self._complaints.about("the annotation of a span", error)
        self._span_end(call)

    def begin_communication(self, pending: Pending) -> None:
        """See :class:`~trimtab.record.communication.works.Annotator`."""
        if pending.event_id < 0:
            return
        try:
            self._open[pending.event_id] = _enter(f"{AROUND}{pending.event_id} {pending.operator.op}")
        except Exception as error:
            self._complaints.about("the annotation of a communication", error)

    def end_communication(self, pending: Pending) -> None:
        """See :class:`~trimtab.record.communication.works.Annotator`."""
        try:
            around = self._open.pop(pending.event_id, None)
            if around is not None:
                _leave(around)
        except Exception as error:
            self._complaints.about("the annotation of a communication", error)


def _title(call: Call) -> str:
    return f"{call.name} {call.layer} {call.kind}" if call.layer >= 0 else f"{call.name} {call.kind}"
