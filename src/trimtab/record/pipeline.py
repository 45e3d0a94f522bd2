"""What the pipeline's executor does, as events: its actions, the messages between stages, and changes of mind.

An action is a span on the compute stream that is the parent of the layers in it; where it had to wait for its input,
that wait is an event, too, so that scan follows it to the stage that was late. Both ends of a message carry the same
(group, src, dst, tag, seq), made from its label alone: nothing is exchanged for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from trimtab.events import NAME_WAIT, STREAM_COMM, STREAM_COMPUTE, STREAM_HOST, Kind
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.decisions import DecisionLog
from trimtab.record.clocks import UNKNOWN, Clock, Mark
from trimtab.record.complain import Complaints
from trimtab.record.observe import Call, Observer
from trimtab.record.recorder import Recorder
from trimtab.topology import Coordinates, Topology

if TYPE_CHECKING:
    import torch

    from trimtab.transport.interface import Label, Message
    from trimtab.transport.sending import Sending

NAME_POLICY: Final = "pipeline policy"
"""Of a user span without duration: what the policy leans to from now on; ``args`` say what it did before, and why."""

_KINDS: Final = {Work.F: Kind.FORWARD, Work.B: Kind.BACKWARD, Work.W: Kind.WGRAD, Work.BW: Kind.BACKWARD}
_MICROBATCH_BITS: Final = 24
_PART_BITS: Final = 16
_EARLY_KEPT: Final = 4_096
_SOON_NS: Final = 100_000
"""A message that is seen this soon after the end of an action came while it ran: nobody waited for it."""


def tag_of(label: Label) -> int:
    """One for each channel between two ranks, as the event's ``tag``."""
    return label.part << _PART_BITS | label.chunk << 1 | int(label.backward)


def seq_of(label: Label) -> int:
    """Different for every message of a channel, as the event's ``seq``."""
    return label.iteration << _MICROBATCH_BITS | label.microbatch


class _Arrival(NamedTuple):
    event_id: int
    at: int


class _Came(NamedTuple):
    """A message that has been looked at."""

    label: Label
    source: int
    nbytes: int
    dtype: str
    at: int


class PipelineRecorder:
    """Hooks of the executor (:class:`trimtab.pipeline.execute.hooks.Hooks`) that record one stage's iterations.

    Costs a few microseconds an event where steps are recorded, next to nothing elsewhere, and never raises. Where
    several hooks are combined this one comes first, so that what the others add to an action is seen.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        observer: Observer,
        mark: Callable[[], Mark],
        ranks: Sequence[int],
        stage: int,
        clock: Clock = time.perf_counter_ns,
        world_size: int = 0,
        name: str = "pipeline",
        arrived: Callable[[Message], None] | None = None,
    ) -> None:
        """``ranks`` are the global ranks of the stages, in order, that exchange messages with this one; ``name`` tells
        it from other executors with the same ranks. ``observer`` is told of the actions, also where nothing is recorded
        (an emulated device needs to know). ``mark`` is the device's, of a position in its queue. Where these are all
        ranks of a job of ``world_size`` whose layout nobody has described, that is done here. ``arrived`` is given each
        message before anybody looks at it, and may change it; raises nothing.
        """
        self._recorder = recorder
        self._arrived_first = arrived
        self._whole = world_size == len(ranks)
        self._observer = observer
        self._mark = mark
        self._ranks = tuple(ranks)
        self._me = self._ranks[stage]
        self._group = f"{name}@{self._ranks[0]}"
        self._clock = clock
        self._described = False
        self._complaints = Complaints()
        self._call: Call | None = None
        self._idle_since: Mark = UNKNOWN
        self._idle_since_ns = UNKNOWN
        self._began: Mark = UNKNOWN
        self._iteration = -1
        self._trains = True
        self._chunks = 1
        self._arrived: dict[tuple[bool, int, int], _Arrival] = {}
        self._early: list[_Came] = []
        self._sites: dict[tuple[Kind, int, int, str], int] = {}
        self._wait_site = -1

    @property
    def _recording(self) -> bool:
        return self._recorder is not None and self._recorder.active

    # ------------------------------------------------------------- iteration

    def iteration_begins(self, iteration: int, forward_only: bool) -> None:
        """The stage is ready for the messages of ``iteration``."""
        try:
            now = self._idle_since_ns = self._clock()
            self._iteration = iteration
            self._trains = not forward_only
            self._call = None
            if self._recorder is not None:
                self._recorder.within = None  # an error may have ended the last
            self._arrived.clear()
            self._idle_since = self._mark() if self._recording else UNKNOWN
            self._began = now if self._idle_since == UNKNOWN else self._idle_since
            if self._recorder is not None and self._recording and not self._described:
                self._described = True
                self._recorder.describe(groups={self._group: list(self._ranks)})
            early, self._early = self._early, []
            for message in early:
                self._came(message)
        except Exception as error:
            self._failed("the begin of a pipeline iteration", error)

    def iteration_ends(self, iteration: int) -> None:
        """Nothing more comes of it. The first that trains shows how many chunks there are."""
        del iteration
        self._call = None
        recorder = self._recorder
        if not self._whole or recorder is None or not recorder.active or not self._trains:
            return
        self._whole = False
        try:
            if recorder.coordinates is None:
                topology = Topology(pp=len(self._ranks), vpp=self._chunks)
                at = Coordinates(pp=self._ranks.index(self._me))
                recorder.describe(topology=topology.as_dict(), coordinates=at.as_dict())
        except Exception as error:
            self._failed("the layout of a pipeline", error)

    # --------------------------------------------------------------- actions

    def begin(self, action: Action) -> None:
        """``action`` is about to be launched."""
        if not self._trains:
            return
        work, chunk, microbatch = action
        try:
            call = self._call = Call(_KINDS[work], work.name, microbatch=microbatch, chunk=chunk)
            self._observer.begin(call)
            if self._recorder is not None:
                self._recorder.within = (chunk, microbatch)
            self._chunks = max(self._chunks, chunk + 1)
            if work is not Work.W and self._recording:
                arrival = self._arrived.pop((work is not Work.F, chunk, microbatch), None)
                if arrival is not None:
                    self._waited(arrival, self._mark() if call.began == UNKNOWN else call.began, action)
        except Exception as error:
            self._failed("the begin of a pipeline action", error)

    def end(self, action: Action) -> None:
        """It has been launched (on a CPU: has run)."""
        del action
        call, self._call = self._call, None
        if call is None:
            return
        try:
            self._observer.end(call)
            if self._recorder is not None:
                self._recorder.within = None
            if self._recording:
                self._idle_since = self._mark() if call.ended == UNKNOWN else call.ended
                self._idle_since_ns = self._clock()
        except Exception as error:
            self._failed("the end of a pipeline action", error)

    def _waited(self, arrival: _Arrival, start: Mark, action: Action) -> None:
        """The action needed a message, so it is followed by a wait, be it of no duration.

        On a device that works behind its host the stream itself shows whether it stood still; elsewhere it did if the
        message came after the end of what ran before.
        """
        recorder, since = self._recorder, self._idle_since
        assert recorder is not None
        if since == UNKNOWN or (since > UNKNOWN and arrival.at - self._idle_since_ns <= _SOON_NS):
            since = start
        if self._wait_site < 0 and recorder.open:
            self._wait_site = recorder.span_site(Kind.HOST, NAME_WAIT, STREAM_COMPUTE, -1)
        recorder.push(
            self._wait_site,
            recorder.step,
            recorder.next_id(),
            -1,
            arrival.event_id,
            UNKNOWN,
            since,
            start,
            -1,
            action.microbatch,
            action.chunk,
            -1,
            -1,
            0,
        )

    # -------------------------------------------------------------- messages

    def sent(self, action: Action, to: int, label: Label, tensors: Sequence[torch.Tensor], sending: Sending) -> None:
        """What ``action`` made was handed to the transport; it is recorded when the send is complete."""
        recorder = self._recorder
        if recorder is None or not recorder.active:
            return
        try:
            nbytes, dtype = _size(tensors)
            ready = self._idle_since if self._trains and self._idle_since != UNKNOWN else self._mark()
            site = self._site(recorder, Kind.SEND, self._ranks[to], tag_of(label), dtype)
            issued, step, event_id = self._clock(), recorder.step, recorder.next_id()
            clock, seq, chunk, microbatch = self._clock, seq_of(label), action.chunk, action.microbatch

            def complete(done: Sending) -> None:
                """On any thread."""
                try:
                    if done.exception() is None:
                        end = clock()
                        recorder.push(
                            site, step, event_id, -1, -1, ready, issued, end, -1, microbatch, chunk, seq, nbytes, 0
                        )
                except Exception as error:
                    self._failed("the end of a message of the pipeline", error)

            sending.add_done_callback(complete)
        except Exception as error:
            self._failed("a message of the pipeline", error)

    def received(self, message: Message) -> None:
        """A message is here. It counts as awaited from the begin of its iteration on: there is room for it whether
        anybody waits or not. That begin is the device's, as those of steps and actions are: by the host's clock, which
        may be ahead, it could lie in the step before."""
        if self._arrived_first is not None:
            self._arrived_first(message)
        recorder = self._recorder
        if recorder is None:
            return
        try:
            label = message.label
            early = label.iteration != self._iteration
            if early and len(self._early) >= _EARLY_KEPT:
                return
            if early or recorder.active:
                came = _Came(label, message.source, *_size(message.tensors), self._clock())
                if early:
                    self._early.append(came)
                else:
                    self._came(came)
        except Exception as error:
            self._failed("a message of the pipeline", error)

    def _came(self, message: _Came) -> None:
        recorder = self._recorder
        label, source, nbytes, dtype, at = message
        if recorder is None or not recorder.active or label.iteration != self._iteration:
            return
        # Where the begin is still a handle, the writer sees to it that the end does not come before it.
        event_id, began, ended = recorder.next_id(), self._began, max(at, self._began)
        self._arrived[label.backward, label.chunk, label.microbatch] = _Arrival(event_id, at)
        site = self._site(recorder, Kind.RECV, self._ranks[source], tag_of(label), dtype)
        step, seq = recorder.step, seq_of(label)
        recorder.push(
            site, step, event_id, -1, -1, began, began, ended, -1, label.microbatch, label.chunk, seq, nbytes, 0
        )

    def _site(self, recorder: Recorder, kind: Kind, peer: int, tag: int, dtype: str) -> int:
        key = (kind, peer, tag, dtype)
        site = self._sites.get(key)
        if site is None:
            if not recorder.open:
                return -1  # nothing is stored any more
            src, dst = (self._me, peer) if kind is Kind.SEND else (peer, self._me)
            site = recorder.communication_site(kind, kind.value, STREAM_COMM, self._group, dtype, src, dst, tag)
            self._sites[key] = site
        return site

    # ---------------------------------------------------------------- policy

    def decided(self, log: DecisionLog) -> None:
        """An iteration is over; ``log`` is what was decided in it, in seconds of the recorder's clock."""
        recorder = self._recorder
        if recorder is None or not recorder.active:
            return
        try:
            for switch in log.switches:
                at = round(switch.time * 1e9)
                said = {"before": switch.before, "after": switch.after, "reason": switch.reason, **switch.readings}
                recorder.span(Kind.USER, NAME_POLICY, at, at, stream=STREAM_HOST, args=said)
        except Exception as error:
            self._failed("a change of policy", error)

    def _failed(self, what: str, error: Exception) -> None:
        self._complaints.about(what, error)


def _size(tensors: Sequence[torch.Tensor]) -> tuple[int, str]:
    """Bytes of all, dtype of the first."""
    if not tensors:
        return 0, ""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return nbytes, str(tensors[0].dtype).removeprefix("torch.")


class _Attached:
    """Where executors report to. They are made by the job or an engine that know no session, so this is global."""

    parts: tuple[Recorder | None, Observer, Callable[[], Mark]] | None = None
    arrived: Callable[[Message], None] | None = None
    world_size = 0
    made: ClassVar[Counter[tuple[int, ...]]] = Counter()
    """Executors, by their ranks: each counts its messages from 0. All members make them in the same order."""


def set_parts(recorder: Recorder | None, observer: Observer, mark: Callable[[], Mark], world_size: int) -> None:
    """Executors made from now on report to these."""
    _Attached.parts = (recorder, observer, mark)
    _Attached.world_size = world_size


def set_arrived(arrived: Callable[[Message], None]) -> None:
    """Executors made from now on show this each message first: see :class:`PipelineRecorder`."""
    _Attached.arrived = arrived


def clear_parts() -> None:
    """Executors made from now on report to nobody."""
    _Attached.parts = _Attached.arrived = None
    _Attached.made.clear()


def pipeline_hooks(ranks: Sequence[int], stage: int) -> PipelineRecorder | None:
    """Hooks for the executor of ``stage``, whose messages go between these global ``ranks``, one a stage; None where
    trimtab is not attached."""
    if _Attached.parts is None:
        return None
    members = tuple(ranks)
    number = _Attached.made[members]
    _Attached.made[members] += 1
    name = f"pipeline/{number}" if number else "pipeline"
    more = {"world_size": _Attached.world_size, "name": name, "arrived": _Attached.arrived}
    return PipelineRecorder(*_Attached.parts, members, stage, **more)
