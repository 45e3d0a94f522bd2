"""What the callbacks have in common: the session that they hold, and that they never fail the trainer."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from trimtab.attach import Session, attach, current_session
from trimtab.config import Config
from trimtab.events import STREAM_HOST, Kind
from trimtab.record.complain import Complaints

Hook = Callable[..., None]


class HeldSession:
    """The session that is in force already, or one that begins with :meth:`attach` and ends with :meth:`detach`.

    Nothing in here raises: what fails is told once, and the session is let go.
    """

    def __init__(self, config: str | os.PathLike[str] | Config | None, overrides: dict[str, Any]) -> None:
        self._config = config
        self._overrides = overrides
        self._complaints = Complaints()
        self._began: dict[Kind, int] = {}
        self._own = False
        self.session: Session | None = None

    def attach(self) -> None:
        """Hold a session."""
        if self.session is None:
            found = current_session()
            self._own = found is None
            self.session = found or attach(self._config, **self._overrides)

    def detach(self) -> None:
        """Let it go, and end it if it began here."""
        session, self.session = self.session, None
        self._began.clear()
        if session is not None and self._own:
            session.detach()

    def failed(self, hook: str, error: Exception) -> None:
        """Tell it, and step aside."""
        self._complaints.about(f"from the trainer's {hook}", error)
        self.detach()

    def begin(self, kind: Kind) -> None:
        """A stretch of ``kind`` begins on the host."""
        self._began[kind] = time.perf_counter_ns()

    def end(self, kind: Kind, name: str) -> None:
        """It ends; nothing if its begin was not seen."""
        began = self._began.pop(kind, None)
        recorder = self.session.recorder if self.session is not None else None
        if began is None or recorder is None or not recorder.active:
            return
        try:
            recorder.span(kind, name, began, time.perf_counter_ns(), stream=STREAM_HOST)
        except Exception as error:
            self.failed(name, error)


def careful(hook: Hook) -> Hook:
    """A method of an owner of ``held``, a :class:`HeldSession`, that never raises into the trainer."""

    @functools.wraps(hook)
    def wrapper(self: Any, *args: Any, **keywords: Any) -> None:
        try:
            hook(self, *args, **keywords)
        except Exception as error:
            self.held.failed(hook.__name__, error)

    return wrapper
