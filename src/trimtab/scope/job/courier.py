"""A session's own thread: it looks for the collector, and carries notices, frames and beats to it.

A collector is there as long as it says so (:data:`~trimtab.scope.messages.HERE`). What is to be sent while it is not
waits for it, and after the time of a lease nothing is measured any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from trimtab.config import Config
from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import Complaints, Endpoint
from trimtab.control.messages import Message, to_json
from trimtab.control.opening import find_hub, limits_of
from trimtab.control.rendezvous import Lookout
from trimtab.control.sockets import Backoff
from trimtab.record.cuda import permit_captures_elsewhere
from trimtab.scope.job.handle import JobHandle
from trimtab.scope.job.outbox import Outbox
from trimtab.scope.job.sampling import Sampling
from trimtab.scope.job.sending import Sender
from trimtab.scope.job.serving import ServerProcess
from trimtab.scope.job.switchboard import Switchboard
from trimtab.scope.messages import BEAT, BEAT_SECONDS, COLLECTOR, FRAME, HERE, HERE_SECONDS, NOTICE, rank_endpoint

_PRESENT_SECONDS: Final = 3 * HERE_SECONDS
"""Silence after which what is to be sent waits for the collector to come back."""
_JOIN_SECONDS: Final = 2.0
_POLL_SECONDS: Final = (0.004, 0.02)
"""How often events on the device are looked at: at first, and at last. What is ready by then is one copy."""
_DROPPED_SECONDS: Final = 5.0
"""From one notice of what was dropped to the next."""
_GATHER_SECONDS: Final = 0.005
"""In which samples come together: each time this thread wakes, the training thread may have to wait for it."""
_LEAST_SECONDS: Final = 0.25
_MOST_SECONDS: Final = 2.0
_RANKS_A_SECOND: Final = 1000
"""Commands come and go, each with a hub for as long as it runs; so it is looked for again soon, but not by all at
once."""
_QUEUES: Final = 2
"""The channel's queue holds the frames of so many steps."""


class Courier:
    """Runs from :meth:`start` until :meth:`close`; what goes wrong is said once."""

    def __init__(
        self,
        config: Config,
        run_directory: Path,
        environment: Mapping[str, str],
        job: JobHandle,
        board: Switchboard,
        sampling: Sampling,
        outbox: Outbox,
        sender: Sender,
        notices: deque[dict[str, Any]],
        *,
        register: Callable[[Endpoint], None],
        failed: Callable[[str, Exception], None],
        complaints: Complaints,
        clock: Callable[[], float],
    ) -> None:
        """``notices`` are what is to be said. ``register`` puts the answers on a client, ``failed`` says once what went
        wrong, ``complaints`` what is wrong with the hub; ``clock`` in seconds."""
        self._config = config
        self._directory = run_directory
        self._environment = environment
        self._job = job
        self._board = board
        self._sampling = sampling
        self._outbox = outbox
        self._sender = sender
        self._notices = notices
        self._register = register
        self._failed = failed
        self._complaints = complaints
        self._clock = clock
        self._started = time.time_ns()
        self._lookout = Lookout(run_directory)
        self._look_at = clock()
        self._heard_at: float | None = None
        self._beat_at = clock()
        self._told_lost: dict[str, int] = {}
        self._tell_lost_at = clock()
        self._client: Client | None = None
        self.server: ServerProcess | None = None
        """Beside the job, to be looked after."""
        self._stopping = False
        self._permitted = False
        self._poll = _POLL_SECONDS[0]
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look for a collector."""
        thread = threading.Thread(target=self._run, name="trimtab-scope", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Say what can be said yet, and end. May be called again."""
        self._stopping = True
        self._outbox.wake()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except Exception as error:  # it could not even wait
            self._failed("the sender", error)
        try:
            self._leave()
        except Exception as error:
            self._failed("leaving", error)

    def _round(self) -> None:
        """One turn, and the wait for the next."""
        seconds = self._config.scope.look_seconds
        try:
            if not self._permitted and torch.cuda.is_initialized():
                permit_captures_elsewhere()
                self._permitted = True
            seconds = self._turn()
        except Exception as error:
            self._failed("the sender", error)
        if not self._stopping:
            self._outbox.wait(seconds)
        if len(self._outbox) and not self._stopping:
            time.sleep(_GATHER_SECONDS)

    def _turn(self) -> float:
        """One round; seconds until the next, unless something comes."""
        if self.server is not None:
            self.server.look()
        client = self._client
        if client is None or client.ended:
            self._client = None
            self._look()
        elif self._present:
            self._send(client)
        self._keep_lease()
        if self._client is not None and self._present and (self._sender.busy or len(self._outbox)):
            self._poll = min(2 * self._poll, _POLL_SECONDS[1])
            return self._poll
        self._poll = _POLL_SECONDS[0]
        return min(self._config.scope.look_seconds, BEAT_SECONDS if self._client is not None else 3600.0)

    def _look(self) -> None:
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + self._config.scope.look_seconds
        if not (self._config.control.address or self._lookout.changed()):
            return
        limits = limits_of(self._config.control)
        room = max(limits.queue_bytes, _QUEUES * self._config.scope.frame_mb << 20)
        client = Client(
            rank_endpoint(self._job.rank),
            self._find,
            limits=replace(limits, queue_bytes=room),
            backoff=Backoff(_LEAST_SECONDS, max(_MOST_SECONDS, self._job.world_size / _RANKS_A_SECOND)),
            periodic=self._periodic,
            complaints=self._complaints,
        )
        self._register(client)
        client.subscribe(HERE, self._here)
        client.start()
        self._client = client

    def _find(self) -> Offer | None:
        return find_hub(self._config.control, self._directory, self._environment)

    def _send(self, client: Client) -> None:
        while self._notices:
            client.publish(NOTICE, _as_json(self._notices.popleft()))
        if client.waiting_bytes < self._config.scope.frame_mb << 20:
            while self._sender.turn(lambda raw: client.publish(FRAME, raw)):
                if client.waiting_bytes >= self._config.scope.frame_mb << 20:
                    break

    def _leave(self) -> None:
        """What can be said yet, and a last beat."""
        client, self._client = self._client, None
        if client is not None:
            if self._present and client.connected:
                self._send(client)
                self._publish_beat(client, leaving=True)
            client.close()

    @property
    def _present(self) -> bool:
        heard = self._heard_at
        return heard is not None and self._clock() - heard < _PRESENT_SECONDS

    def _here(self, message: Message) -> None:
        if message.sender == COLLECTOR:
            self.hear()

    def hear(self) -> None:
        """The collector has said something. On the channel's thread."""
        was_there, client = self._present, self._client
        self._heard_at = self._clock()
        if not was_there:
            self._outbox.wake()
            if client is not None:
                self._publish_beat(client)  # it waits for it

    def _keep_lease(self) -> None:
        heard = self._heard_at
        away = heard is not None and self._clock() - heard > self._config.scope.lease_seconds
        self._board.away = away
        if away and len(self._outbox):
            self._sender.reset()

    def _periodic(self) -> None:
        """On the channel's thread, about twice a second."""
        now, client = self._clock(), self._client
        if client is not None and now >= self._beat_at and self._present:
            self._beat_at = now + 0.8 * BEAT_SECONDS  # the channel's own rhythm is half a second
            self._publish_beat(client)

    def _publish_beat(self, client: Client, *, leaving: bool = False) -> None:
        try:
            beat = self._beat()
        except Exception as error:  # the next may go well: what is looked at changes meanwhile
            self._failed("a beat", error)
            return
        client.publish(BEAT, to_json(beat | ({"leaving": True} if leaving else {})))

    def _tell_dropped(self) -> None:
        lost = {
            "over scope.frame_mb": self._sampling.over_limit,
            "not sent in time": self._outbox.dropped,
            "no frame": self._sender.dropped,
        }
        new = {why: count - self._told_lost.get(why, 0) for why, count in lost.items()}
        if any(new.values()) and self._clock() >= self._tell_lost_at:
            self._tell_lost_at = self._clock() + _DROPPED_SECONDS
            self._told_lost = lost
            said = ", ".join(f"{count} {why}" for why, count in new.items() if count)
            self._board.notify("dropped", f"samples: {said}", step=self._board.step, count=sum(new.values()))

    def _beat(self) -> dict[str, Any]:
        board, client, place = self._board, self._client, self._job.position
        self._tell_dropped()
        dropped = self._outbox.dropped + self._sampling.over_limit + self._sender.dropped
        return {
            "rank": self._job.rank,
            "world_size": self._job.world_size,
            "coordinates": self._job.coordinates,
            "started": self._started,
            "step": board.step,
            "microbatch": -1 if place is None else place.microbatch,
            "seconds_per_step": board.seconds_per_step,
            "overhead": board.overhead,
            "dropped": dropped + (0 if client is None else client.dropped),
            "sent": self._sender.sent,
            "taps": board.registry.shown,
            "subscriptions": {name: active.state for name, active in board.subscriptions.items()},
            "perturbations": list(board.disturbing.active),
            "unix_ns": time.time_ns(),
        }


def _as_json(notice: dict[str, Any]) -> bytes:
    """A notice without its details, if those cannot be said."""
    try:
        return to_json(notice)
    except (TypeError, ValueError):
        return to_json(notice | {"details": {}})
