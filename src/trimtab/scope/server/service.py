"""What all requests share: the job, the recordings, the sessions, and who asked the job for what."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from trimtab import __version__
from trimtab.scope.collector.interface import Notice, Scope
from trimtab.scope.server.answers import Problem
from trimtab.scope.server.arrival import Standing
from trimtab.scope.server.hub import Hub, Told
from trimtab.scope.server.limits import Limits, Seconds
from trimtab.scope.server.memory import Memory
from trimtab.scope.server.runs import Run, Runs
from trimtab.scope.server.tokens import Session, Tokens
from trimtab.scope.server.watching import Watching
from trimtab.scope.subscription import Subscription

AWAY: Final = "away"
"""State of a job whose collector does not answer."""
CLOSE_SECONDS: Final = 5.0
"""For the end of what was asked for over a server that ends itself."""
_PENDING: Final = "pending "
"""A place that is held while the ranks agree."""
_GONE: Final = ""
"""Session of what an earlier server had asked for."""
_MOST_RANKS_SHOWN: Final = 64
"""Of more, their beats are asked for (``/status``), and not told to everybody each second."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A subscription that was made over this server."""

    session: str
    keep: bool
    """It stays when its session is gone."""


class Service:
    """One server. What the threads of requests change is behind a lock; what belongs to WebSockets is the loop's."""

    def __init__(
        self,
        runs: Runs,
        scope: Scope | None,
        *,
        limits: Limits | None = None,
        tokens: Tokens | None = None,
        allow_perturb: bool = False,
        record: bool = False,
        renewed: Callable[[], None] = lambda: None,
        memory: Memory | None = None,
        clock: Seconds = time.monotonic,
    ) -> None:
        """``scope``: the collector of a job; None: there are recordings only. ``renewed`` is called when there is a
        new link. ``record``: what a job sends, from when there is one. ``memory``: of subscriptions, beyond a kill."""
        self.limits = limits or Limits()
        self.tokens = tokens or Tokens(sessions=self.limits.sessions, clock=clock)
        self.runs = runs
        self.allow_perturb = allow_perturb
        self.hub = Hub(self.limits, secrets.token_hex(8))
        self.slow = 0
        """WebSockets that were cut as they took nothing."""
        self.started_ns = time.time_ns()
        self._scope = scope
        self._renewed = renewed
        self._record = record
        self._stop_recording: Callable[[], None] | None = None
        self.watching: Watching | None = None
        self._clock = clock
        self._began = self._seen = clock()
        self._memory = memory
        self._lock = threading.Lock()
        left = () if memory is None or scope is None else memory.read()
        self._wishes: dict[str, Wish] = {name: Wish(_GONE, keep=False) for name in left}
        self._sessions: dict[str, Session] = {}
        """Those that have wishes or sockets, by name."""
        self._shown: dict[str, Any] = {}
        self._shown_before: dict[str, Any] = {}
        """A second earlier: what a rank had sent when it said so is recorded now."""

    # --- the job

    @property
    def attached(self) -> bool:
        """Is there a job, or could there be one?"""
        return self._scope is not None

    def job(self) -> Scope:
        """The job's collector; :class:`Problem` where this server has recordings only."""
        if self._scope is None:
            raise Problem(503, "this server shows recordings only; trimtab scope serve RUN_DIR joins a running job")
        return self._scope

    def state(self) -> dict[str, Any]:
        """What the collector says of the job; of a collector that did not answer a moment ago, that: requests do not
        queue up behind it."""
        return self._shown if self._shown.get("state") == AWAY else self._look()

    def _look(self) -> dict[str, Any]:
        if self._scope is None:
            return {"state": "recordings", "error": ""}
        try:
            return self._scope.status() | {"error": ""}
        except ValueError as error:
            return {"state": AWAY, "error": str(error)}

    def refresh(self) -> None:
        """Look how the job stands, and tell all WebSockets; on a thread, about once a second."""
        made = set(self._wishes)
        self._shown_before = self._shown
        self._shown = self._look()
        if not self._shown["error"] and self._shown.get("settled", True):  # a new collector has to learn of them first
            self._forget(made - set(self._shown.get("subscriptions", {})))
        if self._record and self._scope is not None and self._shown["state"] == "live":
            self._record = False
            try:
                self._stop_recording = self._scope.record()
            except ValueError as error:
                self.hub.hear(
                    Notice("recording", f"nothing is recorded by this server: {error}", unix_ns=time.time_ns())
                )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the recording, and within ``seconds`` what was asked for over this server and not to be kept."""
        if self._stop_recording is not None:
            self._stop_recording()
        with self._lock:
            left = [name for name, wish in self._wishes.items() if not (wish.keep or name.startswith(_PENDING))]
        if self._scope is None or not left or self._shown.get("state") == "ended":
            return
        thread = threading.Thread(target=self._end, args=(left,), name="trimtab-scope-end", daemon=True)
        thread.start()  # ranks that do not answer hold nobody up
        thread.join(seconds)

    def _end(self, subscriptions: list[str]) -> None:
        for name in subscriptions:
            with contextlib.suppress(ValueError):  # it has ended, or the job has
                self.unsubscribe(name)

    def show(self) -> None:
        """Tell what :meth:`refresh` saw. On the event loop."""
        shown = self._shown
        if len(shown.get("ranks", {})) > _MOST_RANKS_SHOWN:
            shown = shown | {"ranks": None, "ranks_left_out": True}
        self.hub.show(shown)

    def greeting(self, session: Session) -> dict[str, Any]:
        """The first message of a WebSocket."""
        return {
            "epoch": self.hub.epoch,
            "number": self.hub.number,
            "version": __version__,
            "state": self._shown.get("state", "waiting" if self.attached else "recordings"),
            "session_seconds": round(self.tokens.time_left(session)),
        }

    def listen(self) -> Callable[[], None]:
        """Hear what comes from the job, until what is returned is called."""
        return (lambda: None) if self._scope is None else self._scope.listen(self.hub.hear)

    def watched(self) -> dict[str, Any] | None:
        """What watch would say of the job now; None: nobody watches here."""
        return None if self.watching is None else self.watching.state()

    def watched_steps(self, most: int) -> dict[str, Any] | None:
        """How the ranks got on in the last steps; None: nobody watches here."""
        if self.watching is None:
            return None
        ranks = max(1, self.watching.state()["world_size"])
        return self.watching.steps(max(1, min(most, self.limits.cells // ranks)))

    def news(self, event: dict[str, Any]) -> None:
        """Watch has something to say. From any thread."""
        self.hub.hear(Told("watch", {"event": event}))

    def renew(self) -> None:
        """Make a new link if it is time to."""
        if self.tokens.renew():
            self._renewed()

    def coordinates(self, run: Run) -> dict[int, dict[str, int]]:
        """Where each rank of a run stands: as the running job says, or as far as the recording does."""
        found = run.recording().coordinates()
        if self.runs.is_live(run):
            for rank, about in self._shown.get("ranks", {}).items():
                found[int(rank)] = about.get("coordinates") or found.get(int(rank), {})
        return found

    def standing(self, run: Run) -> Standing | None:
        """How far the ranks are that record a run; None: nothing more is recorded of it."""
        if self._shown.get("state") not in ("live", AWAY) or not self.runs.is_live(run):
            return None
        shown = self._shown_before
        steps = {int(rank): int(about["step"]) for rank, about in shown.get("ranks", {}).items()}
        return Standing(steps, float(shown.get("seconds_per_step") or 0.0), time.time_ns())

    # --- wishes

    def subscribe(self, session: Session, subscription: Subscription, *, keep: bool) -> str:
        """Ask the job; :class:`Problem` for too many. ValueError where it refuses."""
        job = self.job()
        with self._lock:
            mine = sum(wish.session == session.name for wish in self._wishes.values())
            if mine >= self.limits.subscriptions_each or len(self._wishes) >= self.limits.subscriptions:
                most = self.limits.subscriptions_each if mine >= self.limits.subscriptions_each else len(self._wishes)
                raise Problem(429, f"there are {most} subscriptions, and no more are taken; end some")
            # Its place is taken while the ranks agree, so that nobody slips in meanwhile.
            place = f"{_PENDING}{secrets.token_hex(8)}"
            self._wishes[place] = Wish(session.name, keep)
            self._sessions[session.name] = session
        try:
            found = job.subscribe(subscription)
        finally:
            with self._lock:
                wish = self._wishes.pop(place)
        with self._lock:
            self._wishes[found] = wish
            self._remember()
        return found

    def unsubscribe(self, subscription: str) -> None:
        """End one, whoever made it; ValueError where there is none."""
        self.job().unsubscribe(subscription)
        with self._lock:
            self._wishes.pop(subscription, None)
            self._remember()

    def _remember(self) -> None:
        """Behind the lock: what is to end if this server does not live to end it."""
        if self._memory is not None:
            passing = (name for name, wish in self._wishes.items() if not (wish.keep or name.startswith(_PENDING)))
            self._memory.write(passing)

    def _forget(self, names: set[str]) -> None:
        """The job does not know them any more."""
        with self._lock:
            for name in names:
                if not name.startswith(_PENDING):
                    self._wishes.pop(name, None)
            self._remember()

    def wish(self, subscription: str) -> Wish | None:
        """Who made a subscription; None: not over this server."""
        return self._wishes.get(subscription)

    def abandoned(self) -> list[str]:
        """Subscriptions of sessions that are gone; they are to be ended."""
        now = self._clock()
        with self._lock:
            gone = {
                name
                for name, session in self._sessions.items()
                if not session.sockets and now - session.seen >= self.limits.abandoned_seconds
            }
            if now - self._began >= self.limits.abandoned_seconds:
                gone.add(_GONE)
            for name in gone & self._sessions.keys():
                if not any(wish.session == name for wish in self._wishes.values()):
                    del self._sessions[name]
            return [
                found
                for found, wish in self._wishes.items()
                if wish.session in gone and not (wish.keep or found.startswith(_PENDING))
            ]

    def seen(self, session: Session) -> None:
        """It has asked for something."""
        session.seen = self._seen = self._clock()

    def idle_seconds(self) -> float:
        """Since anybody who may has asked for anything; 0 while a WebSocket is open."""
        return 0.0 if self.hub.clients else self._clock() - self._seen

    def opened(self, session: Session) -> None:
        """It has one more WebSocket."""
        session.sockets += 1
        self.seen(session)

    def closed(self, session: Session) -> None:
        """It has one less."""
        session.sockets -= 1
        self.seen(session)
