"""The hub's side of a shared directory: a thread that looks into it every few seconds.

It has a folder of its own there, named by its stream, so that what an earlier hub has left is neither read nor kept. A
file system that hangs stops this thread and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trimtab.control.broker import Broker
from trimtab.control.directory_files import (
    ALIVE,
    FROM_ENDPOINT,
    STREAM_BYTES,
    TO_ENDPOINT,
    Content,
    Infile,
    Outfile,
    file_key,
)
from trimtab.control.endpoint import Complaints, Seconds
from trimtab.control.link import Limits
from trimtab.control.messages import HEARTBEAT, Envelope, checked_name
from trimtab.control.sockets import Waker, wait_for

POLLS_KEPT: Final = 10
"""A writer keeps envelopes, and a reader believes a silent writer alive, for this many polls."""
POLLS_PER_BEAT: Final = 3
"""A writer that has nothing to say replaces its file every so many polls."""
_ABANDONED_SECONDS: Final = 600.0
_FOLDER: Final = re.compile(r"hub-[0-9a-f]{32}")


class DirectoryChannel:
    """The files of one endpoint."""

    def __init__(self, name: str, began_ns: int, incoming: Infile, outgoing: Outfile, limits: Limits) -> None:
        self.name = name
        self.began_ns = began_ns
        self.incoming = incoming
        self.outgoing = outgoing
        self.queue: deque[Envelope] = deque(maxlen=limits.queue)
        self.heard = 0.0
        self.attached = False

    def deliver(self, envelope: Envelope) -> None:
        """Queue it; of too many the oldest go."""
        self.queue.append(envelope)

    def cut(self, reason: str) -> None:
        """It came again, perhaps by TCP; its files are not looked at until a new stream writes them."""
        del reason
        self.attached = False


class DirectoryServer:
    """Serves the endpoints that write into one folder."""

    def __init__(
        self,
        directory: Path,
        secret: bytes,
        poll_seconds: float,
        limits: Limits,
        most: int,
        broker: Broker,
        post: Callable[[Callable[[], None]], None],
        complaints: Complaints,
        clock: Seconds,
    ) -> None:
        """Make the folder in ``directory``, and clear away those of earlier hubs. Raises OSError.

        ``post`` has something done on the hub's thread, the only one that may use ``broker``.
        """
        self.stream = secrets.token_bytes(STREAM_BYTES)
        self.folder = directory / f"hub-{self.stream.hex()}"
        self._secret = secret
        self._poll_seconds = poll_seconds
        self._limits = limits
        self._most = most
        self._broker = broker
        self._post = post
        self._complaints = complaints
        self._clock = clock
        self._channels: dict[str, DirectoryChannel] = {}
        self._polls = 0
        self._stopping = False
        self._waker = Waker()
        self._thread: threading.Thread | None = None
        self._began_ns = time.time_ns()
        self.folder.mkdir(mode=0o700, parents=True)
        self._alive = Outfile(self.folder / ALIVE, self._key("hub", "alive"), self.stream, self._began_ns, 0.0)
        self._alive.save(clock())
        _clear(directory, self.folder)

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="trimtab-hub-directory", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Remove the folder with all that is in it, and its parent if that is empty."""
        self._stopping = True
        self._waker.wake()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return
        self._waker.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    def poll(self) -> None:
        """Look once: read what is new, write what waits. Raises OSError where the folder cannot be read."""
        now = self._clock()
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(FROM_ENDPOINT)]
        for name in names:
            self._look(name.removesuffix(FROM_ENDPOINT), now)
        for channel in list(self._channels.values()):
            self._tend(channel, now)
        if self._polls % POLLS_PER_BEAT == 0:
            self._alive.save(now)
        self._polls += 1

    def _look(self, name: str, now: float) -> None:
        channel = self._channels.get(name)
        try:
            if channel is None:
                if len(self._channels) >= self._most:
                    raise ValueError(f"more than {self._most} endpoints")
                channel = self._channels[name] = self._meet(checked_name(name))
            if not channel.incoming.changed():
                return
            found = channel.incoming.read()
        except ValueError as error:
            self._complaints.about("files", f"{self.folder}: {ascii(name)[:80]} is passed over: {error}")
            return
        if found is not None:
            self._heard(channel, *found, now)

    def _meet(self, name: str) -> DirectoryChannel:
        keep = POLLS_KEPT * self._poll_seconds
        incoming = Infile(self.folder / (name + FROM_ENDPOINT), self._key(name, FROM_ENDPOINT), self._limits.body_bytes)
        path, key = self.folder / (name + TO_ENDPOINT), self._key(name, TO_ENDPOINT)
        return DirectoryChannel(name, -1, incoming, Outfile(path, key, self.stream, self._began_ns, keep), self._limits)

    def _heard(self, channel: DirectoryChannel, content: Content, fresh: tuple[Envelope, ...], now: float) -> None:
        channel.heard = now
        again = content.began_ns != channel.began_ns
        if again:
            channel.began_ns = content.began_ns
            channel.outgoing.addressee = content.stream
            channel.queue.clear()
        if again or not channel.attached:
            channel.attached = True
            self._post(lambda: self._broker.attach(channel))
        for envelope in fresh:
            if envelope.kind != HEARTBEAT:
                self._post(lambda envelope=envelope: self._broker.handle(channel, envelope, self._clock()))

    def _tend(self, channel: DirectoryChannel, now: float) -> None:
        if channel.queue:
            while channel.queue:
                channel.outgoing.add(channel.queue.popleft(), now)
            channel.outgoing.save(now)
        if channel.attached and now - channel.heard > POLLS_KEPT * self._poll_seconds:
            channel.attached = False
            self._post(lambda: self._broker.detach(channel, f"not heard of for {now - channel.heard:.0f} s"))
            for suffix in (FROM_ENDPOINT, TO_ENDPOINT):
                (self.folder / (channel.name + suffix)).unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.poll()
            except Exception as error:
                self._complaints.about(
                    "directory", f"{self.folder}: {type(error).__name__}: {error}; it is tried again"
                )
            else:
                self._complaints.forget("directory")
            wait_for(self._waker, self._poll_seconds)

    def _key(self, name: str, direction: str) -> bytes:
        return file_key(self._secret, self.stream, name, direction)


def _clear(directory: Path, ours: Path) -> None:
    """Remove what hubs that ended without order have left in ``directory``: by the file system's clock, which all
    hosts share, their last sign of life is long past."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        long_ago = (ours / ALIVE).stat().st_mtime - _ABANDONED_SECONDS
        for entry in entries:
            if _FOLDER.fullmatch(entry.name) is None or not entry.is_dir(follow_symlinks=False):
                continue
            sign = Path(entry.path, ALIVE)
            if (sign if sign.exists() else Path(entry.path)).stat().st_mtime < long_ago:
                shutil.rmtree(entry.path, ignore_errors=True)
