"""Perturbations of communication: what a collective or a receive has brought is changed before the job sees it, what a
send is given is changed on its way, and both can be late.

The interception of :mod:`trimtab.record.communication` calls in here, while there is a perturbation only. Names are
``collectives.<group>.<op>`` (the group as its maker describes it: ``tensor_model_parallel``, ``mesh_dp``,
``default_pg``)
and ``p2p.<send|recv>.<forward|backward|either>``; the microbatch of a communication is its number among
those of its name in the step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import torch

from trimtab.events import Kind
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb.channel import Channel, Launch

Begun = tuple[str, Any, int, list[Launch] | None]
"""A communication: its name, its moment, by how many nanoseconds it is late, what to launch when a device has it."""
_MOST_NAMES: Final = 1024
_KEPT_STEPS: Final = 2
"""For so long what was sent in the place of the job's own tensor stays, for a backend may read it yet."""
_ROOTS: Final = ("collectives", "p2p")


class GroupLike(Protocol):
    """What is asked of :class:`trimtab.record.communication.groups.Group`."""

    label: str
    ranks: tuple[int, ...]
    me: int


class OperatorLike(Protocol):
    """And of :class:`trimtab.record.communication.operators.Operator`."""

    kind: Kind
    op: str


def names_communication(pattern: str) -> bool:
    """May this pattern mean a communication? By its beginning, as these are not known before they happen."""
    first = pattern.partition(".")[0]
    return first in _ROOTS


def name_of(operator: OperatorLike, group: GroupLike, peer: int, interleaved: bool) -> str:
    """Of a communication, as a tap; ``peer`` is the global rank at the other end of a message, -1 unknown."""
    if operator.kind is Kind.COLLECTIVE:
        return f"collectives.{group_segment(group.label)}.{operator.op}"
    return f"p2p.{'send' if operator.kind is Kind.SEND else 'recv'}.{direction(operator, group, peer, interleaved)}"


def group_segment(label: str) -> str:
    """``tensor_model_parallel`` of ``TENSOR_MODEL_PARALLEL_GROUP/5@2``; the number of a group without description."""
    name = label.rpartition("@")[0] or label
    described, _, _number = name.partition("/")
    text = described.lower().removesuffix("_group").replace(".", "_").replace(" ", "_")
    return "".join(character for character in text if character.isprintable()) or "unnamed"


def direction(operator: OperatorLike, group: GroupLike, peer: int, interleaved: bool) -> str:
    """Activations go forward, to the next stage, gradients backward. Between two stages with several chunks each the
    ranks do not say which it is."""
    ranks = group.ranks
    if peer not in ranks or group.me not in ranks:
        return "either"
    if len(ranks) == 2 and interleaved:
        return "either"
    step = (ranks.index(peer) - ranks.index(group.me)) % len(ranks)
    if len(ranks) == 2:
        step = 1 if ranks.index(peer) > ranks.index(group.me) else -1
    towards_next = step == 1
    sends = operator.kind is Kind.SEND
    return "forward" if towards_next == sends else "backward"


class Communications:
    """What is disturbed on this rank. The training thread adds and removes; any thread calls in."""

    def __init__(self, switch: Callable[[Communications | None], None]) -> None:
        """``switch`` tells the interception whom to call, None: nobody."""
        self._switch = switch
        self._channels: tuple[Channel, ...] = ()
        self._step = -1
        self._counts: dict[str, int] = {}
        self._names: dict[str, Tap] = {}
        self._sent: list[tuple[int, list[torch.Tensor]]] = []
        self._lock = threading.Lock()
        self.interleaved = False
        """This rank has several model chunks."""

    def taps(self) -> list[Tap]:
        """Communications that were seen while somebody disturbed some."""
        return list(self._names.values())

    def add(self, channel: Channel, step: int) -> None:
        """It is in force in this step; to be said again at the begin of each."""
        if step != self._step:
            with self._lock:
                self._step = step
                self._counts = {}
                self._sent = [(when, kept) for when, kept in self._sent if when > step - _KEPT_STEPS]
        if channel not in self._channels:
            self._channels = (*self._channels, channel)
            self._switch(self)

    def remove(self, channel: Channel) -> None:
        """It is over."""
        self._channels = tuple(other for other in self._channels if other is not channel)
        if not self._channels:
            self._switch(None)
            self._step = -1  # what comes now is not counted

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As long as this context lasts, only what is added in it disturbs; nothing that is counted here stays."""
        before = self._channels, self._step, self._counts
        self._channels, self._step, self._counts = (), -1, {}
        try:
            yield
        finally:
            self._channels, self._step, self._counts = before
            self._switch(self if self._channels else None)

    # --------------------------------------------------------- from the inside

    def begins(self, operator: OperatorLike, group: GroupLike, peer: int, outputs: Any) -> Begun | None:
        """A communication is about to be issued, and ``outputs``, a tensor or a list, are where it goes (of a send,
        what is sent); None: nobody disturbs it. Raises nothing."""
        try:
            begun = self._begins(name_of(operator, group, peer, self.interleaved), None)
            tensors = tensors_in(outputs)
            if begun is None or operator.kind is Kind.SEND or not any(tensor.is_cuda for tensor in tensors):
                return begun
            name, moment, delay, _ = begun
            channels = [channel for channel in self._channels if not channel.delays and channel.concerns(name, moment)]
            return name, moment, delay, [one for channel in channels for one in channel.prepared(name, tensors, moment)]
        except Exception:  # a name that cannot be made is no reason to disturb the job
            return None

    def _begins(self, name: str, microbatch: int | None) -> Begun | None:
        channels = self._channels
        if not channels:
            return None
        with self._lock:
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            if name not in self._names and len(self._names) < _MOST_NAMES:
                self._names = self._names | {name: Tap(name, "communication")}
        moment = Moment(self._step, number if microbatch is None else microbatch)
        delay = sum(channel.delay_ns(name, moment) for channel in channels)
        if delay or any(not channel.delays and channel.concerns(name, moment) for channel in channels):
            return name, moment, delay, None
        return None

    def outgoing(self, tensors: Sequence[torch.Tensor], begun: Begun) -> list[torch.Tensor]:
        """What is sent in the place of these; they stay as they are."""
        copies = [tensor.detach().clone() for tensor in tensors]
        self.arrived(copies, begun)
        with self._lock:
            self._sent.append((begun[1].step, copies))
        return copies

    def arrived(self, outputs: Any, begun: Begun) -> None:
        """It is complete: change what it has brought, a tensor or a list. In a stream behind it, or on any thread."""
        name, moment, _delay, launches = begun
        if launches is not None:
            with torch.no_grad():
                for launch in launches:
                    launch()
            return
        tensors = tensors_in(outputs)
        for channel in self._channels:
            if not channel.delays and channel.concerns(name, moment):
                channel.change(name, tensors, moment)

    def message(self, message: MessageLike, sleep: Callable[[float], None]) -> None:
        """A message of trimtab's own transport has come, before anybody looks at it. Raises nothing."""
        if not self._channels:
            return
        try:
            name = f"p2p.recv.{'backward' if message.label.backward else 'forward'}"
            begun = self._begins(name, message.label.microbatch)
            if begun is None:
                return
            if begun[2]:
                sleep(begun[2] / 1e9)
            if message.event is not None:
                torch.cuda.current_stream().wait_event(message.event)
            copies = [tensor.clone() for tensor in message.tensors]  # the sender's own may be among them
            self.arrived(copies, begun)
            message.tensors = tuple(copies)
        except Exception:  # what concerns a perturbation was said by it
            return


class MessageLike(Protocol):
    """What is asked of :class:`trimtab.transport.interface.Message`."""

    label: Any
    tensors: tuple[torch.Tensor, ...]
    event: Any


def tensors_in(outputs: Any) -> list[torch.Tensor]:
    """All tensors in an operator's argument, which may be a list, or a list of lists."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, (list, tuple)):
        return [tensor for one in outputs for tensor in tensors_in(one)]
    return []


def arrivals(job: Any) -> Callable[[MessageLike], None]:
    """What is to be shown each message of trimtab's own transport; next to nothing while nobody disturbs one."""

    def arrived(message: MessageLike) -> None:
        found: Communications | None = getattr(job, "communications", None)
        if found is not None:
            found.message(message, time.sleep)

    return arrived


def communications_of(job: Any) -> Communications | None:
    """Those of a job, made when they are first wanted; None where its communication is not intercepted in Python."""
    found = getattr(job, "communications", None)
    interception = getattr(job, "interception", None)
    if found is None and interception is not None and not interception.compiled:
        found = job.communications = Communications(lambda which: setattr(interception, "disturb", which))
        found.interleaved = len(getattr(job, "chunks", ())) > 1
    return found
