"""What every transport does, as scenarios that all ranks of a world play at the same time, in order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import pytest
import torch

from trimtab.transport.errors import PeerLost, TransportError, WrongMessage
from trimtab.transport.interface import Announcement, Label, Message

CREDITS = 3
PATIENCE = 60.0
_MEETING = 255
"""The chunk of messages that only say that a rank has come so far."""


class Player:
    """A rank with its transport, and messages that came before they were asked for."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.rank: int = transport.rank
        self.world: int = transport.world
        self.peers = [rank for rank in range(self.world) if rank != self.rank]
        self._early: list[Message | Announcement] = []
        self._met: set[tuple[int, int]] = set()
        self._meetings = 0

    def next(self) -> Message | Announcement:
        """What comes next, but for the messages of meetings."""
        end = monotonic() + PATIENCE
        while not self._early:
            self._look(end)
        return self._early.pop(0)

    def _look(self, end: float) -> None:
        assert self.transport.wait(end - monotonic()), f"stage {self.rank} hears nothing"
        self._sort()

    def _sort(self) -> None:
        for item in self.transport.poll():
            if item.label.chunk == _MEETING:
                item.release()
                self._met.add((item.source, item.label.microbatch))
            else:
                self._early.append(item)

    def listen(self) -> None:
        """Until there is an error."""
        while True:
            self.next()

    def messages(self, count: int) -> list[Message]:
        """The next messages."""
        found: list[Message] = []
        while len(found) < count:
            item = self.next()
            assert isinstance(item, Message)
            found.append(item)
        return found

    def meet(self) -> None:
        """Until all ranks are here; what comes meanwhile is kept."""
        self._meetings += 1
        for peer in self.peers:
            self.transport.send(peer, Label(False, _MEETING, self._meetings), ())
        end = monotonic() + PATIENCE
        while any((peer, self._meetings) not in self._met for peer in self.peers):
            self._look(end)

    def quiet(self) -> None:
        """Nothing is left to be looked at, anywhere, until all have found so."""
        self.transport.drain(PATIENCE)
        self.meet()
        self._sort()
        assert self._early == []
        self.meet()


def _value(source: int, to: int, label: Label) -> float:
    return float(source * 1000 + to * 100 + label.backward * 50 + label.chunk * 10 + label.microbatch)


def tags(player: Player) -> None:
    """Everybody sends to everybody, on two channels of each direction; what comes is what its label says, and a
    channel's messages of one size come in order."""
    labels = [Label(b, c, m, 7, 2) for m in range(6) for b in (False, True) for c in (0, 3)]
    for label in labels:
        for peer in player.peers:
            value = _value(player.rank, peer, label)
            player.transport.send(peer, label, (torch.full((5, 3), value), torch.tensor([label.microbatch])))
    seen: dict[tuple[int, bool, int], list[int]] = {}
    for _ in range(len(labels) * len(player.peers)):
        message = player.messages(1)[0]
        label = message.label
        first, second = message.take()
        assert label.iteration == 7
        assert label.part == 2
        assert first.shape == (5, 3)
        assert (first == _value(message.source, player.rank, label)).all()
        assert second.tolist() == [label.microbatch]
        seen.setdefault((message.source, label.backward, label.chunk), []).append(label.microbatch)
        message.release()
    assert len(seen) == 4 * len(player.peers)
    assert all(numbers == list(range(6)) for numbers in seen.values())
    player.quiet()


def any_order(player: Player) -> None:
    """The sender picks the order of microbatches, and that of directions, the last first."""
    for number in reversed(range(8)):
        for backward in (number % 2 == 0, number % 2 == 1):
            for peer in player.peers:
                label = Label(backward, number % 3, number)
                player.transport.send(peer, label, (torch.full((4,), _value(player.rank, peer, label)),))
    for _ in range(16 * len(player.peers)):
        message = player.messages(1)[0]
        (tensor,) = message.take()
        assert (tensor == _value(message.source, player.rank, message.label)).all()
        message.release()
    player.quiet()


def both_ways(player: Player) -> None:
    """Large messages from everybody to everybody at once: nobody waits for anybody to receive first."""
    elements = 200_000
    for number in range(CREDITS):
        for peer in player.peers:
            player.transport.send(peer, Label(True, 1, number), (torch.arange(elements) + player.rank + number,))
    for message in player.messages(CREDITS * len(player.peers)):
        (tensor,) = message.take()
        assert torch.equal(tensor, torch.arange(elements) + message.source + message.label.microbatch)
        message.release()
    player.quiet()


_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
)
_SHAPES = ((), (1,), (0,), (3, 0, 2), (7,), (33, 65), (2, 3, 4, 5), (1 << 15,))


def _some(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 100, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if shape else data.view(dtype).reshape(())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((_bytes(a) == _bytes(b)).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def sizes_and_dtypes(player: Player) -> None:
    """Every dtype there is, empty tensors, numbers without dimensions, sizes up to the class limits and over them."""
    dtypes = [getattr(torch, name) for name in _DTYPES if hasattr(torch, name)]
    cases = [(dtype, shape) for dtype in dtypes for shape in _SHAPES]
    cases += [(torch.uint8, (size + more,)) for size in (4096, 5120, 8192, 65536, 1 << 20) for more in (-1, 0, 1)]
    to = (player.rank + 1) % player.world
    sent = 0
    for number, (dtype, shape) in enumerate(cases):
        player.transport.send(to, Label(False, number % 5, number), (_some(dtype, shape, number),))
        sent += 1
    for message in (player.messages(1)[0] for _ in range(sent)):
        dtype, shape = cases[message.label.microbatch]
        (tensor,) = message.expect([(dtype, shape)])
        assert tensor.is_contiguous()
        assert _same(tensor, _some(dtype, shape, message.label.microbatch)), (dtype, shape)
        message.release()
    player.quiet()


def counts(player: Player) -> None:
    """Messages of more and of fewer tensors of one shape, one after the other."""
    to = (player.rank + 1) % player.world
    many = (8, 8, 4, 1, 2, 0, 3)
    for number, count in enumerate(many):
        player.transport.send(to, Label(False, 0, number), [torch.full((5,), float(number))] * count)
    for message in (player.messages(1)[0] for _ in many):
        tensors = message.take()
        assert len(tensors) == many[message.label.microbatch]
        assert all(torch.equal(one, torch.full((5,), float(message.label.microbatch))) for one in tensors)
        message.release()
    player.quiet()


def strided(player: Player) -> None:
    """What is not contiguous, has a history, or is a part of something comes as it looks."""
    to = (player.rank + 1) % player.world
    whole = torch.arange(60.0).reshape(5, 12)
    player.transport.send(to, Label(False, 0, 0), (whole.t(), whole[1:3, 2:5], whole[2]))
    player.transport.send(to, Label(False, 0, 1), (whole.clone().requires_grad_() * 2, torch.zeros(1).expand(9)))
    first, second = sorted(player.messages(2), key=lambda message: message.label)
    for tensor, wanted in zip(first.take(), (whole.t(), whole[1:3, 2:5], whole[2]), strict=True):
        assert torch.equal(tensor, wanted)
    doubled, zeros = second.take()
    assert torch.equal(doubled, whole * 2)
    assert not doubled.requires_grad
    assert zeros.shape == (9,)
    doubled.add_(1)  # the receiver's own
    player.quiet()


def ownership(player: Player) -> None:
    """A tensor that is dropped, or whose ``.data`` is replaced, is sent as it was."""
    to = (player.rank + 1) % player.world
    count = 4 * CREDITS
    for number in range(count):
        tensor = torch.full((50_000,), float(number))
        player.transport.send(to, Label(False, 0, number), (tensor,))
        if number % 2:
            tensor.data = torch.zeros(1)
        del tensor
        torch.full((50_000,), -1.0)  # would take the memory, if it had been given back
    for _ in range(count):
        message = player.messages(1)[0]
        assert (message.take()[0] == message.label.microbatch).all()
        message.release()
    player.quiet()


def credit(player: Player) -> None:
    """No more than the credits of a channel are on their way; other channels do not wait for it; each that is taken
    lets the next one go, in order."""
    to = (player.rank + 1) % player.world
    many = CREDITS + 4
    sendings = [player.transport.send(to, Label(False, 2, n), (torch.tensor([n]),)) for n in range(many)]
    for channel in (Label(True, 2, 0), Label(False, 4, 0)):
        player.transport.send(to, channel, (torch.tensor([99]),))
    came = player.messages(CREDITS + 2)
    assert not sendings[-1].done()
    player.meet()  # by now whatever was on its way would be here
    assert player._early == []
    assert sum(message.label.chunk == 2 and not message.label.backward for message in came) == CREDITS
    left = [message for message in came if message.label[:2] == (False, 2)]
    numbers = [message.label.microbatch for message in left]
    while len(numbers) < many:
        left.pop(0).take()
        if not left:  # credits may be returned several at a time
            left = [message for message in player.messages(1) if message.label[:2] == (False, 2)]
            numbers += [message.label.microbatch for message in left]
    assert numbers == list(range(many))
    for message in (*came, *left):
        message.release()
    assert all(sending.exception(PATIENCE) is None for sending in sendings)
    player.quiet()


def pooled(player: Player) -> None:
    """Buffers are used again: their number does not grow with the number of messages."""
    to = (player.rank + 1) % player.world
    pool = player.transport._pool
    made = pool.made
    for _ in range(5):
        for number in range(6):
            player.transport.send(to, Label(False, 0, number), (torch.ones(3000 + number),))
            player.messages(1)[0].release()
    assert pool.made <= made + CREDITS
    player.quiet()


def announcements(player: Player) -> None:
    """What is announced comes before what is sent after it, and needs no credit."""
    to = (player.rank + 1) % player.world
    for number in range(CREDITS + 3):
        player.transport.announce(to, Label(True, 1, number, 5), 0.25 * number)
    player.transport.send(to, Label(True, 1, 0), ())
    came = [player.next() for _ in range(CREDITS + 4)]
    source = (player.rank - 1) % player.world
    for number, item in enumerate(came[:-1]):
        assert isinstance(item, Announcement)
        assert item[:2] == (source, Label(True, 1, number, 5))
        assert 0.25 * number - PATIENCE < item.seconds < 0.25 * number + 1e-6, "counted from its arrival"
    assert isinstance(came[-1], Message)
    assert came[-1].take() == ()
    player.quiet()


def not_ready(player: Player) -> None:
    """What is not ready is not read, and holds up nothing else."""
    to = (player.rank + 1) % player.world
    made = threading.Event()
    tensor = torch.zeros(3)
    late = player.transport.send(to, Label(False, 0, 0), (tensor,), ready=made.is_set)
    player.transport.send(to, Label(False, 0, 1), (torch.ones(3),))
    early = player.messages(1)[0]
    assert early.label.microbatch == 1
    early.release()
    assert not late.done()
    player.meet()
    tensor.fill_(5.0)
    made.set()
    message = player.messages(1)[0]
    assert message.take()[0].tolist() == [5.0] * 3
    message.release()
    player.transport.drain(PATIENCE)
    assert late.exception(0) is None
    player.quiet()


def wrong(player: Player) -> None:
    """What is asked for wrongly is refused there; what comes and was not agreed on names stage, chunk, microbatch."""
    for to in (player.rank, player.world, -1):
        with pytest.raises(ValueError, match="cannot send to stage"):
            player.transport.send(to, Label(False, 0, 0), ())
    with pytest.raises(ValueError, match="no such label"):
        player.transport.send(player.peers[0], Label(False, 256, 0), ())
    with pytest.raises(ValueError, match="at most 8 tensors"):
        player.transport.send(player.peers[0], Label(False, 0, 0), (torch.zeros(1),) * 9)
    to = (player.rank + 1) % player.world
    player.transport.send(to, Label(True, 3, 9, 2), (torch.zeros(2, 3, dtype=torch.float16),))
    message = player.messages(1)[0]
    with pytest.raises(WrongMessage) as raised:
        message.expect([(torch.bfloat16, (2, 3))])
    source = (player.rank - 1) % player.world
    assert str(raised.value) == (
        f"gradient of chunk 3, microbatch 9, iteration 2 from stage {source} is float16[2, 3], not bfloat16[2, 3]"
    )
    message.release()
    player.quiet()


def nothing(player: Player) -> None:
    """Waiting ends in time, and looking does not wait."""
    if player.rank:
        player.messages(1)[0].release()
    else:
        began = monotonic()
        assert player.transport.wait(0.0) is False
        assert player.transport.wait(0.02) is False
        assert player.transport.poll() == []
        assert 0.02 <= monotonic() - began < PATIENCE
        for peer in player.peers:  # they say nothing before
            player.transport.send(peer, Label(False, 0, 0), ())
    player.quiet()


def estimates(player: Player) -> None:
    """Links know what was sent over them."""
    to = (player.rank + 1) % player.world
    for number in range(4):
        player.transport.send(to, Label(False, 0, number), (torch.ones(300_000),)).result(PATIENCE)
        player.messages(1)[0].release()
    link = player.transport.links()[to]
    assert link.samples >= 4
    assert link.bytes_per_s > 0
    assert 0 < link.busy <= 1
    player.quiet()


def in_flight(player: Player) -> None:
    """The last: leave with sends that have no credit, and such as are under way; each ends, well or not."""
    sendings: list[Any] = []
    with contextlib.suppress(PeerLost):  # the others may have left already
        for number in range(CREDITS + 3):
            for peer in player.peers:
                sendings.append(player.transport.send(peer, Label(False, 0, number), (torch.ones(500_000),)))
    began = monotonic()
    player.transport.close()
    player.transport.close()
    assert monotonic() - began < 20
    for sending in sendings:
        assert sending.done()
        assert isinstance(sending.exception(), TransportError | None)
    with pytest.raises(TransportError):
        player.transport.send(player.peers[0], Label(False, 0, 0), ())
    with pytest.raises(TransportError):
        player.listen()


def left_alone(player: Player) -> None:
    """The last: whoever is left by all says so, to those who wait for a message."""
    if player.rank:
        player.transport.close()
        return
    with pytest.raises(PeerLost, match="has closed its transport"):
        player.next()
    player.transport.close()


SCENARIOS: dict[str, Callable[[Player], None]] = {
    scenario.__name__: scenario
    for scenario in (
        tags,
        any_order,
        both_ways,
        sizes_and_dtypes,
        counts,
        strided,
        ownership,
        credit,
        pooled,
        announcements,
        not_ready,
        wrong,
        nothing,
        estimates,
    )
}
LAST: dict[str, Callable[[Player], None]] = {"in_flight": in_flight, "left_alone": left_alone}


def play(transport: Any, last: str) -> None:
    """All scenarios over one transport, which one of the last then ends."""
    player = Player(transport)
    for name, scenario in SCENARIOS.items():
        try:
            scenario(player)
        except Exception as error:
            error.add_note(f"scenario {name}, rank {player.rank}")
            raise
    LAST[last](player)
