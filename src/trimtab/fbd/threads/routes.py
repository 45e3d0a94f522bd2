"""One transport for the virtual ranks of a process: to each of them its own, whose world are the virtual ranks.

They are numbered as :class:`~trimtab.fbd.ranks.Placement` of one virtual rank a process numbers processes, so whoever
is written for a process of his own runs in a thread as he is. On the wire the number of the receiving thread is part
of a label's chunk, so that each has credits of its own, and that of the sending one part of its iteration.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from trimtab.fbd.ranks import Placement, VirtualRank
from trimtab.fbd.threads.turns import Turns
from trimtab.transport.errors import PeerLost, TransportError
from trimtab.transport.inbox import Inbox
from trimtab.transport.interface import Announcement, Departure, Label, LinkEstimate, Message, Transport
from trimtab.transport.labels import MOST_CHUNKS, check_send
from trimtab.transport.sending import Sending

_ITERATION_BITS: Final = 40
_LOOK_SECONDS: Final = 0.1
"""How long the thread that receives waits, until it looks whether it is to end."""
_END_SECONDS: Final = 10.0


class Routes:
    """Between virtual ranks and a transport between their processes, which belongs to it from now on.

    A context manager, on every process of the job. Transports of one process's virtual ranks may be used by as many
    threads, each by one.
    """

    def __init__(self, transport: Transport, placement: Placement, turns: Turns | None = None) -> None:
        """``turns``: of this process's virtual ranks, in order; None where it has only one.

        Raises:
            ValueError: the job is not laid out so, or more virtual ranks are together than labels have room for.
        """
        placement.fits(transport.world)
        hosted = placement.hosted(transport.rank)
        if len(hosted) > 1 and turns is None:
            raise ValueError(f"{len(hosted)} virtual ranks of one process take turns: give Routes their Turns")
        self.turns = turns if len(hosted) > 1 else None
        self._transport = transport
        self._placement = placement
        self._single = Placement(placement.layout)
        self._span = MOST_CHUNKS // placement.together
        if self._span < 1:
            raise ValueError(f"{placement.together} virtual ranks are more than a process can have ({MOST_CHUNKS})")
        self._sends = threading.Lock()
        self._ending = threading.Event()
        self._ranks = {rank: RoutedTransport(self, self._single.process(rank), self._single.world) for rank in hosted}
        self._order = tuple(self._ranks.values())
        self._receiver = threading.Thread(target=self._receive, name="trimtab-routes", daemon=True)
        if self.turns is not None:
            self._receiver.start()

    def of(self, rank: VirtualRank) -> RoutedTransport:
        """The transport of a virtual rank. ValueError where it is not of this process."""
        if rank not in self._ranks:
            raise ValueError(f"{rank} is on process {self._placement.process(rank)}, not on {self._transport.rank}")
        return self._ranks[rank]

    def __enter__(self) -> Routes:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """After an error the transport stays open: others take a goodbye for a rank that is done, and the end of the
        process for what it is."""
        if error is None:
            self.close()
        else:
            self._end()

    def drain(self, timeout: float) -> None:
        """Return when all sends of all of them are complete; TransportError: some are not within ``timeout`` s."""
        with contextlib.nullcontext() if self.turns is None else self.turns.given_up():
            self._transport.drain(timeout)

    def close(self) -> None:
        """Leave, and close the transport. Again: nothing."""
        self._end()
        self._transport.close()

    def _end(self) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        if self._receiver.ident is not None:
            self._receiver.join(_END_SECONDS)
        for one in self._order:
            one.fail(TransportError("the transport of this process is closed"))

    # --- for the virtual ranks' transports

    def send(self, source: int, to: int, label: Label, tensors: Sequence[torch.Tensor], **more: Any) -> Sending:
        """From one virtual rank to another, by their addresses."""
        process, place = self._where(to)
        if label.chunk >= self._span or label.iteration >> _ITERATION_BITS:
            raise ValueError(f"with {self._placement.together} virtual ranks a process there is no such label: {label}")
        if process == self._transport.rank:
            return self._hand_over(source, place, label, tensors)
        with self._sends, self._translated():
            return self._transport.send(process, self._outward(source, place, label), tensors, **more)

    def announce(self, source: int, to: int, label: Label, seconds: float) -> None:
        """The same of an announcement."""
        process, place = self._where(to)
        if process == self._transport.rank:
            self._order[place].arrived(Announcement(source, label, seconds))
            return
        with self._sends, self._translated():
            self._transport.announce(process, self._outward(source, place, label), seconds)

    def take(self) -> None:
        """What has come over the transport, to those whom it is for; raises where nothing will come any more."""
        with self._translated():
            came = self._transport.poll()
        for one in came:
            if isinstance(one, Departure):
                self._departed(one)
                continue
            place, source, label = self._inward(one.source, one.label)
            if isinstance(one, Announcement):
                self._order[place].arrived(Announcement(source, label, one.seconds))
            else:
                self._order[place].arrived(_renamed(one, source, label))

    def let_go(self, addresses: Iterable[int]) -> None:
        """The loss of the processes of these virtual ranks is no error of the transport."""
        own = self._transport.rank
        processes = {process for process, _ in map(self._where, addresses) if process != own}
        with self._sends:
            self._transport.let_go(sorted(processes))

    def wait(self, timeout: float | None) -> bool:
        """Until something has come over the transport."""
        with self._translated():
            return self._transport.wait(timeout)

    def links(self) -> dict[int, LinkEstimate]:
        """By virtual rank; those of one process share theirs."""
        measured = self._transport.links()
        return {
            self._single.process(rank): estimate
            for process, estimate in measured.items()
            for rank in self._placement.hosted(process)
        }

    # ---

    def _where(self, address: int) -> tuple[int, int]:
        """Process of a virtual rank, and its place among that one's."""
        rank = self._single.hosted(address)[0]
        process = self._placement.process(rank)
        return process, self._placement.hosted(process).index(rank)

    def _outward(self, source: int, place: int, label: Label) -> Label:
        _, own = self._where(source)
        return label._replace(
            chunk=label.chunk + self._span * place, iteration=label.iteration | own << _ITERATION_BITS
        )

    def _inward(self, process: int, label: Label) -> tuple[int, int, Label]:
        """Place of the receiver, address of the sender, and the label as that one gave it."""
        place, chunk = divmod(label.chunk, self._span)
        own, iteration = label.iteration >> _ITERATION_BITS, label.iteration & ((1 << _ITERATION_BITS) - 1)
        source = self._single.process(self._placement.hosted(process)[own])
        return place, source, label._replace(chunk=chunk, iteration=iteration)

    def _hand_over(self, source: int, place: int, label: Label, tensors: Sequence[torch.Tensor]) -> Sending:
        """Within the process: a copy, as what is received may be written into, made in the order of the current
        stream, which is where it will be read."""
        copies = tuple(one.detach().clone(memory_format=torch.contiguous_format) for one in tensors)
        device = next((one.device for one in copies if one.is_cuda), None)
        event = None if device is None else torch.cuda.current_stream(device).record_event()
        self._order[place].arrived(Message(source, label, copies, event=event))
        sending = Sending()
        sending.finish()
        return sending

    def _departed(self, departure: Departure) -> None:
        """A process that may go is gone, with all its virtual ranks; whoever has not let one of them go, fails."""
        for rank in self._placement.hosted(departure.source):
            for one in self._order:
                one.fail(PeerLost(self._single.process(rank), departure.why))

    def _receive(self) -> None:
        """The thread that receives for all."""
        assert self.turns is not None
        try:
            while not self._ending.is_set():
                if self.wait(_LOOK_SECONDS):
                    self.take()
                    self.turns.notify()
        except TransportError as error:
            self._fail(error)
        except Exception as error:
            self._fail(TransportError(f"what came could not be given to whom it was for: {error!r}"))

    def _fail(self, error: TransportError) -> None:
        assert self.turns is not None
        for one in self._order:
            one.fail(error)
        self.turns.notify()

    def _translated(self) -> _Translated:
        return _Translated(self._lost)

    def _lost(self, error: PeerLost) -> PeerLost:
        """Said of the first virtual rank of the process that is lost."""
        first = next(iter(self._placement.hosted(error.peer)))
        return PeerLost(self._single.process(first), error.why)


class _Translated(contextlib.AbstractContextManager[None]):
    """PeerLost of a process becomes that of a virtual rank."""

    def __init__(self, translate: Callable[[PeerLost], PeerLost]) -> None:
        self._translate = translate

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerLost):
            raise self._translate(error) from error


class RoutedTransport:
    """Of one virtual rank: see :class:`trimtab.transport.interface.Transport`."""

    def __init__(self, routes: Routes, address: int, world: int) -> None:
        self.rank = address
        self.world = world
        self._routes = routes
        self._inbox = Inbox()

    def send(
        self,
        to: int,
        label: Label,
        tensors: Sequence[torch.Tensor],
        ready: Callable[[], bool] | None = None,
        due: float = 0.0,
    ) -> Sending:
        """See the interface. To a virtual rank of the same process ``ready`` is what the current stream has been given
        before, and nothing is delayed."""
        check_send(self.rank, self.world, to, label, tensors)
        self._inbox.check()
        return self._routes.send(self.rank, to, label, tensors, ready=ready, due=due)

    def announce(self, to: int, label: Label, seconds: float) -> None:
        """See the interface."""
        check_send(self.rank, self.world, to, label)
        self._inbox.check()
        self._routes.announce(self.rank, to, label, seconds)

    def let_go(self, peers: Iterable[int]) -> None:
        """See the interface."""
        peers = tuple(peers)
        self._inbox.let_go(peers)
        self._routes.let_go(peers)

    def poll(self) -> list[Message | Announcement | Departure]:
        """See the interface."""
        if self._routes.turns is None:
            self._routes.take()
        return self._inbox.poll()

    def wait(self, timeout: float | None) -> bool:
        """See the interface. Meanwhile other threads of the process compute."""
        turns = self._routes.turns
        if turns is None:
            return bool(self._inbox) or self._routes.wait(timeout)
        turns.until(lambda: bool(self._inbox) or self._inbox.error is not None, timeout)
        return self._inbox.ready()

    def links(self) -> Mapping[int, LinkEstimate]:
        """See the interface."""
        return self._routes.links()

    def drain(self, timeout: float) -> None:
        """See the interface; of all virtual ranks of the process."""
        self._routes.drain(timeout)

    def close(self) -> None:
        """Nothing: :meth:`Routes.close` closes that of the process, once all have ended."""

    # --- for Routes

    def arrived(self, item: Message | Announcement) -> None:
        """Something has come for this one."""
        self._inbox.put(item)

    def fail(self, error: TransportError) -> None:
        """Nothing will come any more."""
        self._inbox.fail(error)


def _renamed(message: Message, source: int, label: Label) -> Message:
    """As from a virtual rank; taking and releasing it does so with what came."""

    def credit() -> None:
        message.take()

    return Message(source, label, message.tensors, credit, message.release, message.due, message.event)
