"""One connection without its socket: bytes in and envelopes out, envelopes in and bytes out. Knows no clock.

Until the handshake is over, the other side may be anybody: it gets small frames and little time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from trimtab.control.frames import FrameReader, frame
from trimtab.control.handshake import HANDSHAKE_BYTES, TAG_BYTES, ClientSide, Established, HubSide, Nonce, Sealer
from trimtab.control.messages import ENVELOPE_BYTES, HEARTBEAT, Envelope, pack, unpack

HANDSHAKE_SECONDS: Final = 10.0
_MISSED: Final = 3.5
"""Heartbeats until the other side is believed dead."""
_WRITE_BYTES: Final = 1 << 16
_BEAT: Final = Envelope(HEARTBEAT)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may take."""

    body_bytes: int = 1 << 20
    """Longest body."""
    queue: int = 1024
    """Envelopes that wait to be sent; of more, the oldest go and are counted."""
    queue_bytes: int = 4 << 20
    """The same of their bodies."""
    heartbeat_seconds: float = 5.0

    @property
    def frame_bytes(self) -> int:
        """Longest frame."""
        return self.body_bytes + ENVELOPE_BYTES + TAG_BYTES


class Queue:
    """Envelopes that wait, the oldest of which go when there are too many. Single-threaded."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[Envelope] = deque()
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """Of the bodies that wait."""
        return self._bytes

    def put(self, envelope: Envelope) -> None:
        """One more."""
        self._waiting.append(envelope)
        self._bytes += len(envelope.body)
        limits = self._limits
        while len(self._waiting) > limits.queue or (self._bytes > limits.queue_bytes and len(self._waiting) > 1):
            self.get()
            self.dropped += 1

    def get(self) -> Envelope:
        """The oldest; IndexError where there is none."""
        envelope = self._waiting.popleft()
        self._bytes -= len(envelope.body)
        return envelope


class Link:
    """The protocol of one connection. Whatever is wrong is a ValueError, after which the connection is to be cut."""

    def __init__(self, secret: bytes, name: str | None, limits: Limits, now: float, nonce: Nonce | None = None) -> None:
        """``name`` of the client whose side this is; None on the hub's."""
        self.peer = ""
        """Name of the client, on the hub's side."""
        self.queue = Queue(limits)
        self._limits = limits
        self._reader = FrameReader(HANDSHAKE_BYTES)
        self._began = self._heard = self._spoke = now
        self._out = bytearray()
        self._hub: HubSide | None = None
        self._client: ClientSide | None = None
        self._greeted = False
        self._sending: Sealer | None = None
        self._receiving: Sealer | None = None
        more = {} if nonce is None else {"nonce": nonce}
        if name is None:
            self._hub = HubSide(secret, **more)
            self._out += frame(self._hub.greeting)
        else:
            self._client = ClientSide(secret, name, **more)

    @property
    def established(self) -> bool:
        """Both sides have proved themselves."""
        return self._sending is not None

    @property
    def wants_to_write(self) -> bool:
        """Something waits to be sent and may be."""
        return bool(self._out) or (self._sending is not None and len(self.queue) > 0)

    def received(self, data: bytes | memoryview, now: float) -> list[Envelope]:
        """Envelopes that ``data`` completes, without heartbeats."""
        self._heard = now
        envelopes: list[Envelope] = []
        for payload in self._reader.feed(data):
            if self._receiving is None:
                self._shake(payload)
                continue
            envelope = unpack(self._receiving.unseal(payload))
            if envelope.kind != HEARTBEAT:
                envelopes.append(envelope)
        return envelopes

    def send(self, envelope: Envelope) -> None:
        """Queue it; it goes out once the handshake is over."""
        self.queue.put(envelope)

    def outgoing(self) -> bytearray:
        """Bytes to be written now. Whatever was, is to be said with :meth:`sent`."""
        if self._sending is not None:
            while len(self.queue) and len(self._out) < _WRITE_BYTES:
                self._out += frame(self._sending.seal(pack(self.queue.get())))
        return self._out

    def sent(self, count: int, now: float) -> None:
        """The first ``count`` bytes of :meth:`outgoing` are written."""
        del self._out[:count]
        self._spoke = now

    def tick(self, now: float) -> None:
        """At least once a second: queues a heartbeat if it is time. ValueError where the other side seems dead."""
        beat = self._limits.heartbeat_seconds
        if self._sending is None:
            if now - self._began > HANDSHAKE_SECONDS:
                raise ValueError(f"no handshake within {HANDSHAKE_SECONDS:g} s")
            return
        if now - self._heard > _MISSED * beat:
            raise ValueError(f"not heard of for {now - self._heard:.0f} s")
        if now - self._spoke >= beat and not self.wants_to_write:
            self.queue.put(_BEAT)

    def _shake(self, payload: bytes) -> None:
        if self._hub is not None:
            welcome, established = self._hub.answered(payload)
            self._out += frame(welcome)
            self._establish(established)
        elif self._client is not None and not self._greeted:
            self._greeted = True
            self._out += frame(self._client.greeted(payload))
        elif self._client is not None:
            self._establish(self._client.welcomed(payload))

    def _establish(self, established: Established) -> None:
        self.peer = established.peer
        self._sending, self._receiving = Sealer(established.sending), Sealer(established.receiving)
        self._reader.limit = self._limits.frame_bytes
        self._hub = self._client = None
