"""Who may do what: the token of the link, the sessions it was exchanged for, and the token that allows to disturb."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from trimtab.scope.server.limits import Seconds

TOKEN_BYTES: Final = 32
LINK_HOURS: Final = 168.0
SESSION_HOURS: Final = 12.0
CONTROL_HOURS: Final = 1.0
_HOUR: Final = 3600.0


@dataclass(slots=True)
class Session:
    """One browser, or one program that shows the token with each request."""

    name: str
    """Not secret; rates and limits go by it."""
    expires: float
    control_until: float = 0.0
    seen: float = 0.0
    """When it last asked for anything."""
    sockets: int = 0
    """Its open WebSockets."""


def _token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


class Tokens:
    """The secrets of one server. From the event loop only.

    The token of the link is made anew when half of its time is over, and the one before stays good for the rest of
    its own: a link that somebody just got works, and one from an old log does not.
    """

    def __init__(
        self,
        *,
        link_hours: float = LINK_HOURS,
        session_hours: float = SESSION_HOURS,
        control_hours: float = CONTROL_HOURS,
        sessions: int = 256,
        clock: Seconds = time.monotonic,
        make: Callable[[], str] = _token,
    ) -> None:
        """At most ``sessions`` at a time: of more, the one that ends first goes."""
        self._clock = clock
        self._make = make
        self._link_seconds = link_hours * _HOUR
        self._session_seconds = session_hours * _HOUR
        self._control_seconds = control_hours * _HOUR
        self._most = sessions
        self._links: list[tuple[str, float]] = []
        self._sessions: dict[bytes, Session] = {}
        """By the digest of the cookie: how long a dictionary looks for a key must not tell anything of a secret."""
        self._bearer = Session("bearer", 0.0)
        self._made = 0
        self.control = make()
        """The second token."""
        self.renew()

    @property
    def session_seconds(self) -> int:
        """How long a session lasts."""
        return int(self._session_seconds)

    @property
    def link(self) -> str:
        """The token to give out now."""
        return self._links[-1][0]

    def renew(self) -> bool:
        """Make a new token for the link if it is time to; was it?"""
        now = self._clock()
        self._links = [(token, made) for token, made in self._links if now - made < self._link_seconds]
        if self._links and now - self._links[-1][1] < self._link_seconds / 2:
            return False
        self._links.append((self._make(), now))
        return True

    def open(self, token: str) -> str | None:
        """Exchange the link's token for the secret name of a new session, which is the cookie; None: it is wrong."""
        if not self.is_link(token):
            return None
        now = self._clock()
        self._forget(now)
        while len(self._sessions) >= self._most:
            del self._sessions[min(self._sessions, key=lambda key: self._sessions[key].expires)]
        cookie = self._make()
        self._made += 1
        self._sessions[_digest(cookie)] = Session(f"session-{self._made}", now + self._session_seconds)
        return cookie

    def is_link(self, token: str) -> bool:
        """Is it a token of the link that is still good?"""
        now = self._clock()
        good = False
        for known, made in self._links:  # all of them, so that the time taken says nothing
            good |= _same(known, token) and now - made < self._link_seconds
        return good

    def session(self, cookie: str) -> Session | None:
        """The session of a cookie, unless that is unknown or over."""
        found = self._sessions.get(_digest(cookie))
        return found if found is not None and self._clock() < found.expires else None

    def bearer(self, token: str) -> Session | None:
        """The session of all programs that show the link's token with each request."""
        if not self.is_link(token):
            return None
        self._bearer.expires = self._clock() + self._session_seconds
        return self._bearer

    def close(self, session: Session) -> None:
        """The end of a session."""
        session.expires = 0.0
        session.control_until = 0.0
        self._forget(self._clock())

    def is_control(self, token: str) -> bool:
        """Is it the second token?"""
        return _same(self.control, token)

    def grant(self, session: Session) -> float:
        """The session has shown the second token; seconds for which it may disturb."""
        session.control_until = min(self._clock() + self._control_seconds, session.expires)
        return session.control_until - self._clock()

    def control_left(self, session: Session) -> float:
        """Seconds for which it may disturb, 0 for one that may not."""
        return max(session.control_until - self._clock(), 0.0)

    def time_left(self, session: Session) -> float:
        """Seconds until it is over."""
        return session.expires - self._clock()

    def _forget(self, now: float) -> None:
        self._sessions = {key: session for key, session in self._sessions.items() if now < session.expires}


def _same(known: str, shown: str) -> bool:
    return hmac.compare_digest(known.encode(), shown.encode("utf-8", "replace"))


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "replace")).digest()
