"""What a client and the ways to its hub have to know of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trimtab.control.endpoint import Seconds
from trimtab.control.messages import Envelope
from trimtab.control.sockets import Waker


@dataclass(frozen=True, slots=True)
class Line:
    """The client, as a session sees it. Everything is called on the client's thread."""

    take: Callable[[], Envelope | None]
    """The next envelope to send; None where nothing waits."""
    handle: Callable[[Envelope], None]
    """Something has come in."""
    met: Callable[[], None]
    """The hub is there, and has proved itself."""
    turn: Callable[[], None]
    """To be called about twice a second."""
    stopping: Callable[[], bool]
    """Say goodbye, and return."""
    waker: Waker
    """Wakes when something is to be sent, or when it is time to stop."""
    clock: Seconds


class Session(Protocol):
    """One connection to a hub, by whatever way."""

    def run(self, line: Line) -> None:
        """Until it breaks, which is an OSError or a ValueError that says how, or until the client stops."""
        ...
