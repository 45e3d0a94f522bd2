"""A client's way to the hub over a shared directory. Looks there every few seconds, at a moment of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trimtab.control.directory_files import (
    ALIVE,
    FROM_ENDPOINT,
    STREAM_BYTES,
    TO_ENDPOINT,
    Infile,
    Outfile,
    file_key,
)
from trimtab.control.directory_server import POLLS_KEPT, POLLS_PER_BEAT
from trimtab.control.link import Limits
from trimtab.control.messages import GOODBYE, HEARTBEAT, Envelope
from trimtab.control.session import Line
from trimtab.control.sockets import CHANCE, wait_for

_TURN_SECONDS: Final = 0.5
_COARSE_SECONDS: Final = 2.0
"""Some file systems keep times in seconds."""


class DirectorySession:
    """See :class:`~trimtab.control.session.Session`."""

    def __init__(
        self,
        folder: Path,
        secret: bytes,
        name: str,
        limits: Limits,
        poll_seconds: float,
        *,
        stream: bytes | None = None,
        began_ns: int | None = None,
        chance: Callable[[], float] = CHANCE.random,
    ) -> None:
        """``folder`` is the hub's. Nothing happens before :meth:`run`."""
        hub = bytes.fromhex(folder.name.removeprefix("hub-"))
        self._folder = folder
        self._poll_seconds = poll_seconds
        self._chance = chance
        self._stream = stream or secrets.token_bytes(STREAM_BYTES)
        began = time.time_ns() if began_ns is None else began_ns
        keep = POLLS_KEPT * poll_seconds
        out_key, in_key = (file_key(secret, hub, name, direction) for direction in (FROM_ENDPOINT, TO_ENDPOINT))
        self._out = Outfile(folder / (name + FROM_ENDPOINT), out_key, self._stream, began, keep)
        self._out.addressee = hub
        self._in = Infile(folder / (name + TO_ENDPOINT), in_key, limits.body_bytes)
        self._alive_path = folder / ALIVE
        self._alive = Infile(self._alive_path, file_key(secret, hub, "hub", "alive"), 0)
        self._polls = 0
        self._heard: float | None = None

    def run(self, line: Line) -> None:
        """Until the hub shows no sign of life, or the client stops."""
        polled = line.clock() - self._chance() * self._poll_seconds
        while not line.stopping():
            if line.clock() - polled >= self._poll_seconds:
                polled = line.clock()
                self.poll(line)
            line.turn()
            wait_for(line.waker, min(self._poll_seconds, _TURN_SECONDS))
        if self._heard is not None:
            self._say(line, Envelope(GOODBYE))

    def poll(self, line: Line) -> None:
        """Look once, and say what waits. Raises OSError, or ValueError where the hub seems dead."""
        now = line.clock()
        overdue = self._heard is None or now - self._heard > POLLS_PER_BEAT * self._poll_seconds
        if overdue and self._alive.changed() and self._alive.read() is not None:
            if self._heard is None:
                self._check_recent(now)
                line.met()
            self._heard = now
        if self._heard is None:
            raise ValueError(f"{self._folder}: no hub looks after it")
        if now - self._heard > POLLS_KEPT * self._poll_seconds:
            raise ValueError(f"{self._folder}: the hub shows no sign of life")
        if self._in.changed():
            found = self._in.read()
            if found is not None and found[0].addressee == self._stream:
                for envelope in found[1]:
                    if envelope.kind != HEARTBEAT:
                        line.handle(envelope)
        self._say(line)
        self._polls += 1

    def _check_recent(self, now: float) -> None:
        """A hub that was killed leaves its sign of life behind. It is as old as the file system says, whose clock is
        shared by all hosts: of two files, one has been written just now."""
        self._out.save(now)
        age = self._out.path.stat().st_mtime - self._alive_path.stat().st_mtime
        if age > POLLS_KEPT * self._poll_seconds + _COARSE_SECONDS:
            self._out.path.unlink(missing_ok=True)
            raise ValueError(f"{self._folder}: its hub has shown no sign of life for {age:.0f} s")

    def _say(self, line: Line, *last: Envelope) -> None:
        waiting = list(last)
        while (envelope := line.take()) is not None:
            waiting.insert(len(waiting) - len(last), envelope)
        for envelope in waiting:
            self._out.add(envelope, line.clock())
        if waiting or self._polls % POLLS_PER_BEAT == 0:
            self._out.save(line.clock())
