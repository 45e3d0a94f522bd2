"""What may be asked of a rank over the channel: is it there, what is it doing, and a window of torch.profiler."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any, Final, cast

from trimtab.config import MOST_WINDOW_STEPS
from trimtab.control.endpoint import Endpoint
from trimtab.control.messages import Message, from_json, to_json
from trimtab.record.clocks import Clock
from trimtab.record.live.doing import Doing
from trimtab.record.windows.window import Windows
from trimtab.scan.online.summary import encode

PING: Final = "ping"
DUMP: Final = "dump"
WINDOW: Final = "window"
_LATEST_NS: Final = 3600 * 10**9
_LOG = logging.getLogger("trimtab")


class Requests:
    """Answers them, on the channel's thread; each subject is noted in the log once."""

    def __init__(self, rank: int, doing: Doing, windows: Windows | None, unix: Clock = time.time_ns) -> None:
        self._rank = rank
        self._doing = doing
        self._windows = windows
        self._unix = unix
        self._noted: set[str] = set()

    def register(self, endpoint: Endpoint) -> None:
        """Answer what comes to ``endpoint``."""
        endpoint.answer(PING, self.ping)
        endpoint.answer(DUMP, self.dump)
        endpoint.answer(WINDOW, self.window)

    def ping(self, message: Message) -> bytes:
        """``{"rank", "unix_ns"}``."""
        self._note(message)
        return to_json({"rank": self._rank, "unix_ns": self._unix()})

    def dump(self, message: Message) -> bytes:
        """``{"heartbeat": as published, "open": [...], "groups": [...], "stack": [...]}``, not cut short."""
        self._note(message)
        beat, stack = self._doing.everything()
        open_ones, groups = map(asdict, beat.open), map(asdict, beat.groups)
        return to_json({"heartbeat": encode(beat), "open": [*open_ones], "groups": [*groups], "stack": stack})

    def window(self, message: Message) -> bytes:
        """Asked with ``{"steps": 1 to 1000, "begins_unix_ns": when, or 0 for now}``; answered with the same."""
        steps, begins = _window_of(message.body)
        if self._windows is None:
            raise ValueError("windows are switched off (record.window.request_seconds is 0)")
        now = self._unix()
        if begins > now + _LATEST_NS:
            raise ValueError("a window has to begin within an hour")
        self._note(message)
        begins = begins or now
        self._windows.ask(begins, steps)
        return to_json({"steps": steps, "begins_unix_ns": begins})

    def _note(self, message: Message) -> None:
        if message.subject not in self._noted:
            self._noted.add(message.subject)
            what = f"{message.sender} asks for a {message.subject}"
            _LOG.info("trimtab: rank %d: %s (further ones are not reported)", self._rank, what)


def _window_of(body: bytes) -> tuple[int, int]:
    loaded = from_json(body)
    if not isinstance(loaded, dict):
        raise ValueError("window: expected an object with steps and begins_unix_ns")
    said = cast("dict[str, Any]", loaded)
    steps, begins = said.get("steps"), said.get("begins_unix_ns", 0)
    if type(steps) is not int or not 1 <= steps <= MOST_WINDOW_STEPS:
        raise ValueError(f"window: steps is to be 1 to {MOST_WINDOW_STEPS}")
    if type(begins) is not int or not 0 <= begins < 1 << 63:
        raise ValueError("window: begins_unix_ns is to be a time in Unix nanoseconds, or 0")
    return steps, begins
