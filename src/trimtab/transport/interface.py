"""The transport's interface: labels, messages, announcements, link estimates, and what a transport does.

The sender picks the order: it may send any message at any time, and the receiver takes them as they come. A channel
is (receiver, direction, chunk); each has credits, so that the receiver never needs more buffers than it agreed to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trimtab.transport.errors import WrongMessage

if TYPE_CHECKING:
    import torch

    from trimtab.transport.sending import Sending


class Label(NamedTuple):
    """What a message is."""

    backward: bool
    """A gradient; otherwise an activation."""
    chunk: int
    """Model chunk of the receiver, 0 to 255."""
    microbatch: int
    iteration: int = 0
    part: int = 0
    """Where one message is not all of it; 0 to 255."""

    def __str__(self) -> str:
        what = "gradient" if self.backward else "activation"
        part = f", part {self.part}" if self.part else ""
        return f"{what} of chunk {self.chunk}, microbatch {self.microbatch}, iteration {self.iteration}{part}"


class Channel(NamedTuple):
    """What credits are counted by, together with the peer."""

    backward: bool
    chunk: int


class Message:
    """A message that has arrived, with its buffers.

    Two things go back to where they came from, at different times: *credit*, when the message is no longer waiting
    (:meth:`take`: its action begins, and the memory guard counts the tensors from then on), so that the sender may
    send the next of this channel; and *buffers*, when nobody reads them any more (:meth:`release`, which gives back
    the credit too if it has not been). Autograd keeps a chunk's input until its backward: take it at F, release it
    after B or W. A message that is never released costs its buffers and nothing else: the pool makes new ones, so
    it is also right to :meth:`take` and then simply forget the message.
    """

    __slots__ = ("_credit", "_give_back", "due", "event", "label", "source", "tensors")

    def __init__(
        self,
        source: int,
        label: Label,
        tensors: tuple[torch.Tensor, ...],
        credit: Callable[[], None] | None = None,
        give_back: Callable[[], None] | None = None,
        due: float = 0.0,
        event: Any = None,
    ) -> None:
        self.source = source
        """Rank in the transport's world."""
        self.label = label
        self.tensors = tensors
        """Contiguous, without history; on the device of the receiver."""
        self.due = due
        """Emulated links: not to be seen before this time; 0 otherwise."""
        self.event = event
        """A CUDA event that the consumer's stream has to wait for before it reads the tensors; None: nothing."""
        self._credit = credit
        self._give_back = give_back

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors; the credit goes back to the sender. Again: the tensors."""
        credit, self._credit = self._credit, None
        if credit is not None:
            credit()
        return self.tensors

    def release(self) -> None:
        """Nobody reads the tensors any more; once. On CUDA what the current stream has been given still may."""
        self.take()
        give_back, self._give_back = self._give_back, None
        self.tensors = ()
        if give_back is not None:
            give_back()

    def expect(self, wanted: Sequence[tuple[torch.dtype, Sequence[int]]]) -> tuple[torch.Tensor, ...]:
        """:meth:`take` after a check: WrongMessage, which names stage, chunk and microbatch, unless the tensors have
        these dtypes and shapes."""
        came = [(t.dtype, tuple(t.shape)) for t in self.tensors]
        agreed = [(dtype, tuple(shape)) for dtype, shape in wanted]
        if came != agreed:
            raise WrongMessage(f"{self.label} from stage {self.source} is {spell(came)}, not {spell(agreed)}")
        return self.take()

    def __repr__(self) -> str:
        return f"Message({self.label} from stage {self.source}, {len(self.tensors)} tensors)"


def spell(tensors: Sequence[tuple[Any, Sequence[int]]]) -> str:
    """Dtypes and shapes as one reads them: ``bfloat16[4, 128]``."""
    words = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in tensors]
    return " and ".join(words) or "empty"


class Announcement(NamedTuple):
    """The sender has begun what this message comes from."""

    source: int
    label: Label
    seconds: float
    """From now until it will probably be sent."""


class Departure(NamedTuple):
    """A peer that may go (:meth:`Transport.let_go`) is gone: the last that comes of it."""

    source: int
    why: str


class LinkEstimate(NamedTuple):
    """An outgoing link, as measured in passing."""

    latency_s: float
    bytes_per_s: float
    """0 while nothing large enough has been sent."""
    busy: float
    """Share of the recent past in which something was on its way or waited for a credit."""
    samples: int
    """Sends that were looked at."""


class Transport(Protocol):
    """Tagged, asynchronous messages between the ranks of one pipeline; used by one thread."""

    rank: int
    """Pipeline stage of this process."""
    world: int
    """Stages."""

    def send(
        self,
        to: int,
        label: Label,
        tensors: Sequence[torch.Tensor],
        ready: Callable[[], bool] | None = None,
        due: float = 0.0,
    ) -> Sending:
        """Send, and return at once.

        The transport owns the tensors until the send is complete: they must not be written before, but may be
        forgotten, or have their ``.data`` replaced. What is not contiguous is copied. ``ready``: asked until it is
        true before the tensors are read, such as the ``query`` of the CUDA event behind what makes them. A message
        without tensors needs no credit. ``due`` goes to the message as it is. ValueError: no such stage or label;
        PeerLost and TransportError as in :meth:`wait`.
        """
        ...

    def announce(self, to: int, label: Label, seconds: float) -> None:
        """Tell ``to`` that this message will be sent in about that many seconds. Needs no credit."""
        ...

    def let_go(self, peers: Iterable[int]) -> None:
        """From now on the loss of any of these ranks is no error: :meth:`poll` gives a :class:`Departure`, once. A send
        to one that is gone raises PeerLost, or fails. Without this, whatever rank is lost ends the transport."""
        ...

    def poll(self) -> list[Message | Announcement | Departure]:
        """What has come since the last call, in the order in which it came; never blocks. Errors as in :meth:`wait`,
        once everything that came before has been given out."""
        ...

    def wait(self, timeout: float | None) -> bool:
        """Until something has come; False: nothing within ``timeout`` seconds. PeerLost: a rank has died or fallen
        silent; TransportError: what happened, to which peer, stage, chunk and microbatch."""
        ...

    def links(self) -> Mapping[int, LinkEstimate]:
        """Outgoing links by peer, for those to which something was sent."""
        ...

    def drain(self, timeout: float) -> None:
        """Return when all sends are complete; TransportError: some are not within ``timeout`` seconds."""
        ...

    def close(self) -> None:
        """Leave, also with sends in flight (their futures fail). No thread, socket or shared memory stays. Again:
        nothing."""
        ...
