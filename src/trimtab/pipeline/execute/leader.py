"""One rank decides for a group: ranks that compute together must run the same actions in the same order.

The ranks of a tensor parallel group meet in collectives inside every action, and so must not choose each for itself.
The leader's policy decides as it would alone; what it decides goes to the followers over :mod:`trimtab.control`, with
no collective and no look at the device. Followers run it as soon as their own inputs are here. The orders that were
possible for the leaders of all stages are so for the others, too.

A decision travels while the leader already runs what it decided, so on a CPU a follower is behind by one message over
the hub. On CUDA it is not: hosts run ahead of their devices by more than that. Each message holds as many decisions as
there are; a planned order is one message. Messages have numbers, and a follower asks for what it has missed.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

from trimtab.control.endpoint import NoReply
from trimtab.control.messages import Message
from trimtab.pipeline.actions import Action, Work
from trimtab.pipeline.policies import Chooser, Policy, Signals, Stage, Wait
from trimtab.pipeline.policies.replay import Replay
from trimtab.pipeline.policies.static import Static
from trimtab.transport.errors import TransportError

_HEAD: Final = struct.Struct(">IIH")
_ACTION: Final = struct.Struct(">BHI")
_MOST_ACTIONS: Final = 4096
"""In one message."""
_KEPT_ITERATIONS: Final = 4
"""Whose decisions are kept for followers that ask."""
_ASK_SECONDS: Final = 0.25
_ASK_SELDOM_SECONDS: Final = 4.0
"""A follower asks after the first time, and then ever more seldom: actions may be long, and followers many."""
_PAUSE_SECONDS: Final = 0.002
"""A wait for a decision is interrupted this often, so that messages between stages are not left alone."""
_WAIT: Final = Wait(None)


class Channel(Protocol):
    """What of an endpoint of ``control`` is used."""

    def publish(self, subject: str, body: bytes) -> None:
        """Send to all who subscribed."""
        ...

    def subscribe(self, subject: str, handler: Callable[[Message], None]) -> None:
        """Have ``handler`` called with what comes, on another thread."""
        ...

    def request(self, to: str, subject: str, body: bytes = b"", timeout: float = 5.0) -> Future[bytes]:
        """Ask an endpoint."""
        ...

    def answer(self, subject: str, handler: Callable[[Message], bytes]) -> None:
        """Answer with ``handler``, on another thread."""
        ...


def pack_decisions(iteration: int, first: int, actions: Sequence[Action]) -> bytes:
    """Decisions number ``first`` and on of an iteration, as bytes."""
    return _HEAD.pack(iteration, first, len(actions)) + b"".join(_ACTION.pack(*action) for action in actions)


def unpack_decisions(body: bytes) -> tuple[int, int, list[Action]]:
    """What :func:`pack_decisions` made; ValueError for anything else."""
    if len(body) < _HEAD.size:
        raise ValueError("decisions are cut off")
    iteration, first, count = _HEAD.unpack_from(body)
    if count > _MOST_ACTIONS or len(body) != _HEAD.size + count * _ACTION.size:
        raise ValueError("decisions make no sense")
    rows = _ACTION.iter_unpack(body[_HEAD.size :])
    try:
        return iteration, first, [Action(Work(work), chunk, microbatch) for work, chunk, microbatch in rows]
    except ValueError:
        raise ValueError("decisions hold an unknown kind of work") from None


class Leading:
    """A policy whose decisions are told to the followers of a group.

    Args:
        policy: What decides.
        channel: The leader's endpoint.
        group: Names the group among all that use the hub: a-z, 0-9, ``_.-``.
    """

    def __init__(self, policy: Policy, channel: Channel, group: str) -> None:
        self._policy = policy
        self._channel = channel
        self._subject = f"{group}.order"
        self._orders: dict[int, list[Action]] = {}
        self._iteration = -1
        channel.answer(f"{group}.missed", self._missed)

    @property
    def name(self) -> str:
        """That of the policy which decides."""
        return self._policy.name

    def chooser(self, stage: Stage) -> _LeadingChooser:
        """Begin an iteration."""
        self._iteration += 1
        self._orders[self._iteration] = []
        self._orders.pop(self._iteration - _KEPT_ITERATIONS, None)
        chooser = self._policy.chooser(stage)
        known: Sequence[Action] = ()
        if isinstance(self._policy, Replay):
            known = self._policy.orders[stage.number]
        elif isinstance(self._policy, Static):
            known = stage.plan.actions[stage.number]
        for begin in range(0, len(known), _MOST_ACTIONS):
            self.tell(known[begin : begin + _MOST_ACTIONS])
        return _LeadingChooser(chooser, None if known else self)

    def tell(self, actions: Sequence[Action]) -> None:
        """The next decisions."""
        order = self._orders[self._iteration]
        first = len(order)
        order.extend(actions)
        self._channel.publish(self._subject, pack_decisions(self._iteration, first, actions))

    def _missed(self, message: Message) -> bytes:
        """What a follower asks for, on the channel's thread."""
        iteration, first, _ = unpack_decisions(message.body)
        order = self._orders.get(iteration, [])
        return pack_decisions(iteration, first, order[first : first + _MOST_ACTIONS])


class _LeadingChooser:
    def __init__(self, chooser: Chooser, leading: Leading | None) -> None:
        self._leading = leading
        self._inner = chooser
        self.choose = chooser.choose

    def began(self, action: Action) -> None:
        """Told before it runs."""
        self._inner.began(action)
        if self._leading is not None:
            self._leading.tell((action,))

    def observe(self, signals: Signals, now: float) -> None:
        """For the policy."""
        self._inner.observe(signals, now)


class Led:
    """The policy of a follower: what the leader has decided.

    Args:
        channel: The follower's endpoint.
        leader: Name of the leader's.
        group: As of the leader.
        lost_seconds: A leader that decides nothing and does not answer for so long is lost.
        clock: Seconds.

    Attributes:
        late: What is waited for, where it is a decision; empty: it is not.
    """

    def __init__(
        self,
        channel: Channel,
        leader: str,
        group: str,
        lost_seconds: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.late = ""
        self._channel = channel
        self._leader = leader
        self._group = group
        self._lost_seconds = lost_seconds
        self._clock = clock
        self._iteration = -1
        self._decided: dict[int, dict[int, Action]] = {}
        self._came = threading.Event()
        self._lock = threading.Lock()
        self._asked: Future[bytes] | None = None
        self._ask_at = 0.0
        self._patience = _ASK_SECONDS
        self._silent_since: float | None = None
        self._trouble = ""
        channel.subscribe(f"{group}.order", self._told)

    @property
    def name(self) -> str:
        """``led``."""
        return "led"

    def chooser(self, stage: Stage) -> _LedChooser:
        """Begin an iteration."""
        with self._lock:
            self._iteration += 1
            self._decided = {number: order for number, order in self._decided.items() if number >= self._iteration}
        self._silent_since = None
        return _LedChooser(self, stage)

    def decision(self, number: int) -> Action | None:
        """Decision ``number`` of this iteration; None: it has not come.

        Raises:
            TransportError: if the leader is lost.
        """
        self._came.clear()
        action = self._decided.get(self._iteration, {}).get(number)
        if action is not None:
            self.late, self._silent_since = "", None
            return action
        self._ask(number)
        self.late = f"decision {number} of {self._leader}{self._trouble}"
        return None

    def pause(self, seconds: float) -> bool:
        """Wait for a decision, a few milliseconds at most, if one is missing; False: none is."""
        if not self.late:
            return False
        self._came.wait(min(seconds, _PAUSE_SECONDS))
        return True

    def _ask(self, number: int) -> None:
        """Now and then, while a decision is late: it may have been lost, and so may the leader."""
        now = self._clock()
        if self._silent_since is None:
            self._silent_since, self._trouble = now, ""
            self._patience = _ASK_SECONDS
            self._ask_at = now + self._patience
        if self._asked is not None and self._asked.done():
            self._answered(self._asked, now)
            self._asked = None
        if self._trouble and now - self._silent_since >= self._lost_seconds:
            raise TransportError(f"the leader {self._leader} of group {self._group} is lost{self._trouble}")
        if self._asked is None and now >= self._ask_at:
            self._patience = min(2 * self._patience, _ASK_SELDOM_SECONDS)
            self._ask_at = now + self._patience
            body = pack_decisions(self._iteration, number, ())
            self._asked = self._channel.request(self._leader, f"{self._group}.missed", body, self._lost_seconds)

    def _answered(self, asked: Future[bytes], now: float) -> None:
        try:
            self._take(asked.result())
        except NoReply as error:
            self._trouble = f" ({error})"
        else:
            self._silent_since, self._trouble = now, ""  # it is there, and has not decided yet

    def _told(self, message: Message) -> None:
        if message.sender == self._leader:
            self._take(message.body)

    def _take(self, body: bytes) -> None:
        """Decisions, on any thread."""
        iteration, first, actions = unpack_decisions(body)
        with self._lock:
            if self._iteration <= iteration < self._iteration + _KEPT_ITERATIONS:
                order = self._decided.setdefault(iteration, {})
                order.update(enumerate(actions, first))
        self._came.set()


class _LedChooser:
    def __init__(self, led: Led, stage: Stage) -> None:
        self._led = led
        self._lanes = stage.lanes
        self._left = set(stage.plan.actions[stage.number])
        self._where = f"stage {stage.number}"
        self._next = 0

    def choose(self, now: float) -> Action | Wait:
        """The leader's next decision, once its input is here."""
        del now
        action = self._led.decision(self._next)
        if action is None:
            return _WAIT
        if action not in self._left:
            raise TransportError(
                f"{self._where}: the leader has decided on {action}, which is not in this rank's plan or has run; "
                "do all ranks of the group have the same settings and microbatches?"
            )
        return action if self._lanes.can_begin(action) else _WAIT

    def began(self, action: Action) -> None:
        """On to the next."""
        self._left.discard(action)
        self._next += 1

    def observe(self, signals: Signals, now: float) -> None:
        """The leader's readings count."""
