"""The collector: hears what ranks publish, keeps what is known of them, and has them do what is wished.

One process at a time collects; others are its clients, hear the same frames, and one of them takes its place when it
ends. Two threads: the channel's, which only queues, and one that handles what has come.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

from trimtab.control.client import Client
from trimtab.control.endpoint import Complaints, Inbox
from trimtab.control.messages import Message, from_json, to_json
from trimtab.scope.collector.asking import is_gone
from trimtab.scope.collector.audit import read_audit
from trimtab.scope.collector.claims import Own
from trimtab.scope.collector.connection import Connection, Place, scope_folder
from trimtab.scope.collector.director import KINDS, Director
from trimtab.scope.collector.doing import CLAIM, Desk
from trimtab.scope.collector.interface import Listener, Notice, Offered, Received
from trimtab.scope.collector.pairs import Pairs
from trimtab.scope.collector.ranks import GONE_SECONDS, Beat, Change, Ranks
from trimtab.scope.collector.remote import GoneError, Remote
from trimtab.scope.collector.reverts import Reverts
from trimtab.scope.frame import split, unpack
from trimtab.scope.messages import BEAT, COLLECTOR, DO, FRAME, HERE, HERE_SECONDS, NOTICE, STATE, rank_endpoint
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.recording.recorder import Recorder
from trimtab.scope.shards import Replicas
from trimtab.scope.subscription import Subscription

_TURN_SECONDS: Final = 0.5
_WAIT_SECONDS: Final = 0.25
_HURRIED_SECONDS: Final = 15.0
_HURRY_SECONDS: Final = 0.1
_TAKEOVER_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 3.0
_SETTLE_TO_END_SECONDS: Final = 6.0
"""A rank that comes back after that keeps what was to be ended."""
_REVERT_SECONDS: Final = 10.0
_CLOSE_SECONDS: Final = 5.0
_LOST: Final = "lost"
"""Subject of what this process tells itself: a rank does not answer."""
_T = TypeVar("_T")


class Collector:
    """See :class:`~trimtab.scope.collector.interface.Scope`. ValueError, in one line, where it cannot begin."""

    def __init__(
        self,
        place: Place,
        *,
        complaints: Complaints | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.complaints = complaints or Complaints()
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._known = Ranks()
        self._inbox = Inbox()
        self._listeners: list[tuple[Listener, bool]] = []
        self._recorder: Recorder | None = None
        self._replicas = Replicas()
        self.pairs = Pairs()
        """What ranks have said of paired runs."""
        self._refused = 0
        self._noticed = threading.Condition()
        self._reverts = Reverts(clock)
        self._here_at = self._turn_at = clock()
        self._hurried_until = self._here_at + _HURRIED_SECONDS
        """Ranks come now: the sooner they hear, the sooner they speak."""
        self._began_anew = -math.inf
        """When this process took another one's place: it hears of the ranks from then on."""
        self._stopping = False
        self._executor = ThreadPoolExecutor(4, "trimtab-scope-do")
        self._director = Director(self._snapshot, self._request, self._say, clock)
        self._remote = Remote(self._ask_collector, clock)
        self._own = Own(self._claim, clock)
        self._leads_since = clock()
        self._desk = Desk(self, self._executor, self._director.claims.take, self._own.remove)
        self._connection = Connection(place, self._prepare)
        self._thread = threading.Thread(target=self._run, name="trimtab-scope", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------- methods

    @property
    def leads(self) -> bool:
        """This process is the collector, and no client of it."""
        return self._connection.leads

    @property
    def ranks(self) -> Ranks:
        """What is known of the ranks, as it is now."""
        return self._snapshot()

    def taps(self, pattern: str = "**") -> list[Offered]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._by(lambda: self._director.taps(pattern), lambda: self._remote.taps(pattern))

    def status(self) -> dict[str, Any]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._by(self._status, self._remote.status)

    def subscribe(self, subscription: Subscription) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        name = self._by(lambda: self._director.subscribe(subscription), lambda: self._remote.subscribe(subscription))
        return self._own.add(name)

    def unsubscribe(self, subscription: str) -> None:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        here, there = self._director.unsubscribe, self._remote.unsubscribe
        self._by(lambda: here(subscription), lambda: there(subscription), _SETTLE_TO_END_SECONDS)
        self._own.remove(subscription)

    def preview(self, perturbation: Perturbation) -> dict[str, Any]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._by(lambda: self._director.preview(perturbation), lambda: self._remote.preview(perturbation))

    def perturb(self, perturbation: Perturbation) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._by(lambda: self._director.perturb(perturbation), lambda: self._remote.perturb(perturbation))

    def expire(self, perturbation: str) -> None:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        self._by(lambda: self._director.expire(perturbation), lambda: self._remote.expire(perturbation))

    def revert(self, perturbation: str) -> dict[str, Any]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._by(lambda: self._revert(perturbation), lambda: self._remote.revert(perturbation))

    def probe(self, spec: Mapping[str, Any]) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._own.add(self._by(lambda: self._director.probe(spec), lambda: self._remote.probe(spec)))

    def pair(self, body: Mapping[str, Any]) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._by(lambda: self._director.pair(body), lambda: self._remote.pair(body))

    def pair_result(self, pair: str) -> dict[str, Any] | None:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self.pairs.result(pair, self._snapshot().world_size)

    def audit(self) -> list[dict[str, Any]]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return read_audit(scope_folder(self._place.run_directory))

    def listen(self, callback: Listener, *, frames: bool = True) -> Callable[[], None]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        entry = (callback, frames)
        self._listeners = [*self._listeners, entry]

        def stop() -> None:
            self._listeners = [one for one in self._listeners if one is not entry]

        return stop

    def record(self, label: str = "", *, budget_bytes: int = 0) -> Callable[[], None]:
        """See :class:`~trimtab.scope.collector.interface.Scope`. One recording at a time."""
        with self._lock:
            if self._recorder is not None:
                raise ValueError("a recording is being written already by this process")
            recorder = Recorder(scope_folder(self._place.run_directory), label, budget_bytes, self._say)
            self._recorder = recorder
        for wish in self._director.wishes("subscription").values():
            recorder.note("subscription", wish)
        self._note_ranks()

        def stop() -> None:
            with self._lock:
                if self._recorder is recorder:
                    self._recorder = None
            recorder.close()

        return stop

    def wait(self, ready: Callable[[Ranks], bool], timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until the ranks are as ``ready`` wants them; are they?"""
        until = self._clock() + timeout
        while not (found := ready(self._snapshot())) and (left := until - self._clock()) > 0:
            with self._noticed:
                self._noticed.wait(min(left, _WAIT_SECONDS))
        return found

    def close(self) -> None:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        self._stopping = True
        self._inbox.put(Message(_LOST, "", b""))
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        self._connection.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._recorder is not None:
            self._recorder.close()

    # ------------------------------------------------------------------ who does it

    def _by(self, here: Callable[[], _T], there: Callable[[], _T], settle: float = _SETTLE_SECONDS) -> _T:
        """By this process, if it collects, or by the one that does."""
        until = self._clock() + _TAKEOVER_SECONDS
        while True:
            if self._connection.leads:
                self.wait(lambda ranks: ranks.settled, self._began_anew + settle - self._clock())
                return here()
            try:
                return there()
            except GoneError:
                if self._stopping or self._clock() > until:
                    raise
                with self._noticed:  # this one takes its place, or another one does
                    self._noticed.wait(_WAIT_SECONDS)

    def _claim(self, names: list[str]) -> None:
        if self._connection.leads:
            self._director.claims.take(names)
        else:
            self._ask_collector({"op": CLAIM, "ids": names})

    def _status(self) -> dict[str, Any]:
        ranks = self._snapshot()
        waited = self._clock() - self._leads_since > GONE_SECONDS  # for ranks that may not come any more
        recorder = self._recorder
        return {
            "state": ranks.state,
            "run": str(self._place.run_directory),
            "world_size": ranks.world_size,
            "step": ranks.step,
            "seconds_per_step": ranks.seconds_per_step,
            "ranks": {str(rank): beat.as_dict() for rank, beat in ranks.beats.items()},
            "missing": ranks.missing,
            "settled": ranks.settled or (waited and ranks.state == "live"),
            **{f"{kind}s": self._director.wishes(kind) for kind in KINDS},
            "recording": None if recorder is None else recorder.as_dict(),
            "refused": self._refused + self._inbox.dropped,
        }

    def _revert(self, name: str) -> dict[str, Any]:
        self._reverts.forget(name)
        _, ranks = self._director.revert(name)
        return self._reverts.wait(name, ranks, _REVERT_SECONDS + 4 * self._snapshot().seconds_per_step)

    def _snapshot(self) -> Ranks:
        with self._lock:
            return self._known.copy()

    def _request(self, rank: int, subject: str, body: Mapping[str, Any]) -> Future[bytes]:
        return self._connection.client.request(rank_endpoint(rank), subject, to_json(dict(body)))

    def _ask_collector(self, body: Mapping[str, Any]) -> Future[bytes]:
        return self._connection.client.request(COLLECTOR, DO, to_json(dict(body)))

    def _say(self, notice: Notice) -> None:
        """Of this process, to all who listen, in others, too."""
        body = to_json(notice.as_dict())
        if self._connection.leads:
            self._connection.client.publish(NOTICE, body)
        self._inbox.put(Message(NOTICE, COLLECTOR, body))

    # ------------------------------------------------------------------ the thread

    def _prepare(self, client: Client, leads: bool) -> None:
        for subject in (FRAME, NOTICE, BEAT):
            client.subscribe(subject, self._inbox.put)
        if leads:
            client.answer(DO, self._answer)
            self._here_at = self._clock()

    def _answer(self, message: Message) -> bytes:
        return to_json(dict(self._desk.answer(from_json(message.body))))

    def _run(self) -> None:
        while not self._stopping:
            for message in self._inbox.take(_HURRY_SECONDS):
                try:
                    self._handle(message)
                except ValueError as error:
                    self._refused += 1
                    self.complaints.about(f"refused {message.subject}", f"{message.sender}: {message.subject}: {error}")
                except Exception as error:  # the next may go well
                    self.complaints.about("scope", f"scope: {type(error).__name__}: {error}")
            now = self._clock()
            if self._connection.leads and now >= self._here_at:
                self._connection.client.publish(HERE, b"")
                soon = not self._known.complete and now < self._hurried_until
                self._here_at = now + (_HURRY_SECONDS if soon else HERE_SECONDS)
            if now >= self._turn_at:
                self._turn_at = now + _TURN_SECONDS
                self._turn(now)

    def _turn(self, now: float) -> None:
        """Twice a second."""
        try:
            anew = self._connection.keep()
            if anew:
                self._here_at = self._began_anew = self._leads_since = self._clock()
                self._hurried_until = self._here_at + _HURRIED_SECONDS
                with self._lock:  # ranks come anew, and are asked what they have to do
                    self._known = Ranks(self._known.world_size)
        except ValueError as error:
            self.complaints.about("connection", f"{error}; it is tried again")
            return
        self._own.turn(anew=anew)
        with self._lock:
            silent, late = self._known.silent(now), self._known.late(now)
        for rank in silent:
            self._ask_state(rank)
        self._changed(late)

    def _handle(self, message: Message) -> None:
        subject = message.subject
        if subject == FRAME:
            self._frames(message)
        elif subject == BEAT:
            beat = Beat.from_dict(from_json(message.body))
            _check(message.sender, beat.rank)
            with self._lock:
                changes = self._known.hear(beat, self._clock())
            self._director.heard(beat)
            self._changed(changes)
            if any(change.kind != "left" for change in changes):
                self._note_ranks()
        elif subject == NOTICE:
            notice = Notice.from_dict(from_json(message.body))
            _check(message.sender, notice.rank)
            self._notice(notice)
        elif subject == STATE:
            rank, state = int(message.sender), from_json(message.body)
            if self._connection.leads and isinstance(state, Mapping):
                self._director.adopt(rank, cast("Mapping[str, Any]", state))
            with self._lock:
                self._known.answered(rank, self._clock())
            self._changed([])
        elif subject == _LOST and message.sender:
            with self._lock:
                changes = self._known.lost(int(message.sender))
            self._changed(changes)

    def _frames(self, message: Message) -> None:
        recorder = self._recorder
        for packed in split(message.body):
            frame = unpack(packed)
            _check(message.sender, frame.rank)
            if recorder is not None:
                recorder.frame(packed)
            for text in self._replicas.add(frame, packed.payload):
                self._say(Notice("replicas", text, step=frame.step, subscription=frame.subscription))
            listeners = [callback for callback, frames in self._listeners if frames]
            if listeners:
                received = Received(frame, packed.raw)
                for callback in listeners:
                    self._call(callback, received)

    def _note_ranks(self) -> None:
        """Of which ranks it is a recording. They learn where they stand when their models are built: while some know
        and others do not, it is waited for the others."""
        recorder, ranks = self._recorder, self._snapshot()
        if recorder is None or not ranks.complete:
            return
        places = {str(rank): beat.coordinates for rank, beat in ranks.beats.items()}
        if all(places.values()) or not any(places.values()):
            recorder.note("ranks", {"world_size": ranks.world_size, "ranks": places})

    def _notice(self, notice: Notice) -> None:
        if self._recorder is not None:
            self._recorder.note("notice", notice.as_dict())
            if notice.kind == "agreed" and notice.details.get("kind") == "subscription":
                self._recorder.note("subscription", notice.details["body"])
        if notice.kind == "paired":
            self.pairs.take(notice)
        if notice.details.get("end") is True and notice.subscription and self._connection.leads:
            self._executor.submit(self._end, notice.subscription)
        self._reverts.take(notice)
        self._director.noticed(notice)
        for callback, _ in self._listeners:
            self._call(callback, notice)

    def _end(self, subscription: str) -> None:
        """A rank says that it costs too much, and cannot pause it alone."""
        with contextlib.suppress(ValueError):  # another rank has said so, too
            self._director.unsubscribe(subscription)

    def _call(self, callback: Listener, what: Received | Notice) -> None:
        try:
            callback(what)
        except Exception as error:
            self.complaints.about(f"listener {callback!r}", f"a listener of scope: {type(error).__name__}: {error}")

    def _changed(self, changes: list[Change]) -> None:
        for change in changes:
            rank = change.rank
            if change.kind in ("came", "back"):
                self._ask_state(rank)
            elif change.kind == "restarted" and self._connection.leads:
                self._executor.submit(self._director.restarted, rank)
            if change.kind not in ("came", "placed"):
                text = {"left": "has left", "restarted": "has started again", "back": "is back"}[change.kind]
                self._notice(Notice("rank", f"rank {rank} {text}", unix_ns=time.time_ns(), details={"rank": rank}))
        with self._noticed:
            self._noticed.notify_all()

    def _ask_state(self, rank: int) -> None:
        """Its answer comes in like a message."""

        def came(future: Future[bytes]) -> None:
            error = future.exception()
            if error is None or not is_gone(error):  # a refusal is an answer, too: others may not ask it
                self._inbox.put(Message(STATE, str(rank), b"{}" if error else future.result()))
            else:
                self._inbox.put(Message(_LOST, str(rank), b""))

        self._request(rank, STATE, {}).add_done_callback(came)


def _check(sender: str, rank: int) -> None:
    """A rank speaks for itself only."""
    if sender != (COLLECTOR if rank < 0 else rank_endpoint(rank)):
        raise ValueError(f"{sender} speaks for rank {rank}")
