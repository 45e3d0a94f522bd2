"""The hub and its clients, over real sockets on loopback: who gets what, who is cut, and who never waits."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from control_wires import OPENED, SECRET, HandClock, dial, hung_up, running_hub, said, shaken, taken, turn_until

from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import Complaints, Inbox, NoReply
from trimtab.control.handshake import ClientSide
from trimtab.control.hub import Hub, allow_descriptors
from trimtab.control.link import Limits, Link
from trimtab.control.messages import PUBLISH, SUBSCRIBE, Envelope, Message
from trimtab.control.sockets import Backoff, hang_up

SOON = 20.0


def connected(hub: Hub, name: str, secret: bytes = SECRET, **settings: object) -> Client:
    """A client that has begun to connect to ``hub``."""
    assert hub.address is not None
    offer = Offer(secret, (hub.address,))
    settings = {"backoff": Backoff(0.01, 0.02), "complaints": Complaints(lambda _: None)} | settings
    client = Client(name, lambda: offer, **settings)  # pyright: ignore[reportArgumentType]
    client.start()
    return client


@pytest.fixture(autouse=True)
def _hang_up() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as (running, _):
        yield running


def test_what_is_published_reaches_all_who_subscribed(hub: Hub) -> None:
    inbox, other, own = Inbox(), Inbox(), Inbox()
    hub.subscribe("summary", inbox.put)
    watcher, rank = connected(hub, "watch.1"), connected(hub, "rank.0")
    watcher.subscribe("summary", other.put)
    rank.subscribe("summary", own.put)
    assert watcher.wait_connected(SOON)
    assert rank.wait_connected(SOON)
    assert watcher.request("rank.0", "nothing").exception(SOON) is not None  # so the subscription has arrived
    rank.publish("summary", b"hello")
    rank.publish("other", b"nobody listens")
    expected = [Message("summary", "rank.0", b"hello")]
    assert inbox.take(SOON) == expected
    assert other.take(SOON) == expected
    assert own.take() == [], "nobody hears himself"
    for client in (watcher, rank):
        client.close()


def test_requests_are_answered_refused_or_given_up(hub: Hub) -> None:
    rank, silent = connected(hub, "rank.0"), connected(hub, "rank.1")
    asked = threading.Event()
    held = threading.Event()

    def hold(_: Message) -> bytes:
        asked.set()
        held.wait(SOON)
        return b"late"

    rank.answer("ping", lambda message: b"pong " + message.body + message.sender.encode())
    rank.answer("fail", _raises(ValueError("not today")))
    rank.answer("break", _raises(KeyError("inner")))
    silent.answer("hold", hold)
    assert rank.wait_connected(SOON)
    assert silent.wait_connected(SOON)
    assert hub.request("rank.0", "ping", b"x").result(SOON) == b"pong xhub"
    assert rank.request("hub", "ping").exception(SOON).args == ("hub has no answer to ping",)  # pyright: ignore
    for subject, reason in (
        ("fail", "not today"),
        ("break", "KeyError: 'inner'"),
        ("no", "rank.0 has no answer to no"),
    ):
        with pytest.raises(NoReply, match=reason):
            hub.request("rank.0", subject).result(SOON)
    with pytest.raises(NoReply, match=r"rank\.9 is not connected"):
        hub.request("rank.9", "ping").result(SOON)
    waiting = rank.request("rank.1", "hold", timeout=0.2)
    assert asked.wait(SOON)
    with pytest.raises(NoReply, match=r"rank.1: no answer to hold within 0.2 s"):
        waiting.result(SOON)
    held.set()
    rank.close()
    silent.close()


def _raises(error: Exception) -> Callable[[Message], bytes]:
    def answer(_: Message) -> bytes:
        raise error

    return answer


def test_a_request_to_one_that_goes_is_refused_at_once(hub: Hub) -> None:
    rank, _ = shaken(hub, "rank.0")
    asked = hub.request("rank.0", "go", timeout=60.0)
    assert rank.recv(4096)
    rank.close()
    with pytest.raises(NoReply, match=r"rank\.0 is gone"):
        asked.result(SOON)


def test_presence_tells_who_came_left_and_was_lost() -> None:
    with running_hub() as (hub, seen):
        gone = threading.Event()
        hub.on_presence(lambda presence: gone.set() if presence.state == "left" else None)
        rank = connected(hub, "rank.3")
        assert rank.wait_connected(SOON)
        rank.close()
        assert gone.wait(SOON)
        assert [(one.name, one.state) for one in seen] == [("rank.3", "connected"), ("rank.3", "left")]
        assert hub.names == ()


def test_a_name_that_comes_again_replaces_the_old_one_but_not_the_hub() -> None:
    with running_hub() as (hub, seen):
        first, _ = shaken(hub, "rank.0")
        shaken(hub, "rank.0")
        assert hung_up(first)
        assert hub.names == ("rank.0",)
        assert [one.state for one in seen] == ["connected", "lost", "connected"]
        assert hung_up(shaken(hub, "hub")[0])


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 4,
        b"\x00\x00\x00\x10" + b"\x00" * 16,
        b"\x00\x00\x00\x2a" + b"trimtab\x09" + b"\x00" * 34,
        b"\x80\x04\x95.pickle of something",
    ],
)
def test_strangers_are_cut_and_told_of_once(bytes_sent: bytes) -> None:
    with said() as lines, running_hub() as (hub, seen):
        for _ in range(3):
            connection = dial(hub)
            connection.sendall(bytes_sent)
            assert hung_up(connection)
        rank = connected(hub, "rank.0")
        assert rank.wait_connected(SOON), "the hub goes on"
        assert hub.counts.refused == 3
        assert [one.name for one in seen] == ["rank.0"]
        rank.close()
    assert len(lines) == 1
    assert "the hub has refused a connection from 127.0.0.1" in lines[0]


def test_a_client_without_the_secret_is_told_and_tries_again_quietly() -> None:
    lines: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        lines.append(text)
        told.set()

    with running_hub(complaints=Complaints(lambda _: None)) as (hub, seen):
        stranger = connected(hub, "rank.0", b"another secret, not ours", complaints=Complaints(say))
        assert told.wait(SOON)
        assert not stranger.connected
        stranger.close()
        assert seen == []
        assert hub.counts.established == 0
    assert len(lines) == 1
    assert "is the secret the same?" in lines[0]


def test_a_replayed_session_gets_nowhere() -> None:
    with said(), running_hub() as (hub, seen):
        connection, link = dial(hub), Link(SECRET, "rank.0", Limits(), 0.0)
        recorded = b""
        while not link.established:
            link.received(connection.recv(4096), 0.0)
            recorded += (out := taken(link))
            connection.sendall(out)
        link.send(Envelope(PUBLISH, "summary", "", 0, b"x"))
        recorded += (out := taken(link))
        connection.sendall(out)
        again = dial(hub)
        again.recv(4096)
        again.sendall(recorded)
        assert hung_up(again)
        assert [one.state for one in seen] == ["connected"]


def test_a_replayed_frame_ends_the_connection() -> None:
    with said(), running_hub() as (hub, seen):
        inbox, lost = Inbox(), threading.Event()
        hub.subscribe("summary", inbox.put)
        hub.on_presence(lambda presence: lost.set() if presence.state == "lost" else None)
        connection, link = shaken(hub, "rank.0")
        link.send(Envelope(PUBLISH, "summary", "", 0, b"pay once"))
        raw = taken(link)
        connection.sendall(raw)
        assert inbox.take(SOON) == [Message("summary", "rank.0", b"pay once")]
        connection.sendall(raw)
        assert hung_up(connection)
        assert lost.wait(SOON)
        assert inbox.take() == []
        assert seen[-1].reason == "a frame is not authentic"


def test_connections_are_limited_and_strangers_get_a_part_of_them() -> None:
    with said() as lines, running_hub(most=8) as (hub, _):
        strangers = [dial(hub) for _ in range(3)]
        assert hung_up(strangers[2]), "two of eight may be strangers"
        while OPENED:
            OPENED.pop().close()
        clients = []
        for number in range(8):
            client = connected(hub, f"rank.{number}")
            assert client.wait_connected(SOON)
            clients.append(client)
        late = dial(hub)
        assert hung_up(late)
        for client in clients:
            client.close()
    assert any("connections and takes no more" in line for line in lines)


def test_the_slow_and_the_dead_are_cut_and_nobody_waits_for_them() -> None:
    clock = HandClock()
    hub = Hub(SECRET, address=("127.0.0.1", 0), clock=clock, complaints=Complaints(lambda _: None))
    try:
        slow, dead = dial(hub), dial(hub)
        link = Link(SECRET, "rank.0", Limits(), 0.0)
        dead.setblocking(False)

        def proved() -> bool:
            try:
                link.received(dead.recv(4096), 0.0)
            except BlockingIOError:
                return "rank.0" in hub.names
            dead.sendall(taken(link))
            return "rank.0" in hub.names

        turn_until(hub, proved)
        assert hub.counts.accepted == 2
        for _ in range(12):  # a byte a second, as slow-loris does
            with contextlib.suppress(ConnectionError):
                slow.sendall(b"\0")
            clock.now += 1.0
            hub.turn(0.01)
        turn_until(hub, lambda: hub.counts.refused == 1)
        clock.now += 30.0
        turn_until(hub, lambda: hub.names == ())
    finally:
        hub.close()


def test_who_does_not_read_loses_messages_and_holds_up_nobody() -> None:
    limits = Limits(queue=16)
    clock = HandClock()
    hub = Hub(SECRET, address=("127.0.0.1", 0), clock=clock, limits=limits, complaints=Complaints(lambda _: None))
    connection = dial(hub)
    try:
        link = Link(SECRET, "watch.1", limits, 0.0)
        connection.setblocking(False)

        def subscribed() -> bool:
            with contextlib.suppress(BlockingIOError):
                link.received(connection.recv(4096), 0.0)
                link.send(Envelope(SUBSCRIBE, "summary"))
                connection.sendall(taken(link))
            return hub.messages > 0

        turn_until(hub, subscribed)
        for _ in range(200):
            hub.publish("summary", b"x" * 100_000)
            hub.turn(0.0)
        channel = next(iter(hub._tcp._channels))  # pyright: ignore
        assert channel.link.queue.dropped > 100
        assert len(channel.link.queue) <= 16
    finally:
        hub.close()


def test_a_hub_that_comes_back_is_found_again() -> None:
    offers: list[Offer] = []
    inbox = Inbox()
    with running_hub() as (hub, _):
        assert hub.address is not None
        offers.append(Offer(SECRET, (hub.address,)))
        client = Client(
            "rank.0", lambda: offers[-1], backoff=Backoff(0.01, 0.02), complaints=Complaints(lambda _: None)
        )
        client.subscribe("news", inbox.put)
        client.start()
        assert client.wait_connected(SOON)
    turned = threading.Event()
    with running_hub() as (hub, _):
        assert hub.address is not None
        hub.on_presence(lambda presence: turned.set() if presence.state == "connected" else None)
        offers.append(Offer(SECRET, (hub.address,)))
        client.publish("summary", b"said meanwhile")
        assert turned.wait(SOON)
        assert hub.request("rank.0", "x").exception(SOON) is not None  # its subscriptions have come
        hub.publish("news", b"again")
        assert inbox.take(SOON) == [Message("news", "hub", b"again")]
        client.close()


def test_what_is_said_while_the_hub_is_away_is_kept_up_to_a_limit() -> None:
    offers: list[Offer] = []
    looked = threading.Event()

    def find() -> Offer:
        looked.set()
        if not offers:
            raise ValueError("there is none yet")
        return offers[0]

    limits = Limits(queue=4)
    client = Client("rank.0", find, limits=limits, backoff=Backoff(0.01, 0.02), complaints=Complaints(lambda _: None))
    client.start()
    assert looked.wait(SOON)
    for number in range(10):
        client.publish("summary", str(number).encode())
    inbox, news = Inbox(), Inbox()
    client.subscribe("news", news.put)
    for number in range(10):
        client.publish("summary", str(number).encode())
    hub = Hub(SECRET, address=("127.0.0.1", 0))
    hub.subscribe("summary", inbox.put)
    hub.start()
    assert hub.address is not None
    offers.append(Offer(SECRET, (hub.address,)))
    got: list[bytes] = []
    while len(got) < 4:
        got += [message.body for message in inbox.take(SOON)]
    assert got == [b"6", b"7", b"8", b"9"]
    assert client.dropped == 17
    hub.publish("news", b"the subscription was not given up")
    assert news.take(SOON)
    client.close()
    hub.close()


def test_nothing_is_left_behind() -> None:
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("trimtab")]

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    threads, files = ours(), descriptors()
    with running_hub() as (hub, _):
        client = connected(hub, "rank.0")
        assert client.wait_connected(SOON)
        client.close()
        client.close()
        assert client.ended
    hub.close()
    assert ours() == threads
    assert descriptors() == files


def test_a_client_ends_when_there_is_no_hub_any_more() -> None:
    client = Client("rank.0", lambda: None)
    client.start()
    thread = client._thread  # pyright: ignore[reportPrivateUsage]
    assert thread is not None
    thread.join(SOON)
    assert client.ended
    client.publish("summary", b"into the void")
    assert client.request("hub", "x", timeout=0.0) is not None
    client.close()


def test_a_forked_child_says_nothing_and_closes_nothing(hub: Hub) -> None:
    inbox = Inbox()
    hub.subscribe("summary", inbox.put)
    client = connected(hub, "rank.0")
    assert client.wait_connected(SOON)
    child = os.fork()
    if child == 0:
        client.publish("summary", b"from the child")
        client.close()
        hub.close()
        os._exit(0)
    os.waitpid(child, 0)
    client.publish("summary", b"from the parent")
    assert inbox.take(SOON) == [Message("summary", "rank.0", b"from the parent")]
    client.close()


def test_a_handler_that_raises_is_told_of_once_and_disturbs_nobody() -> None:
    with said() as lines, running_hub() as (hub, _):
        inbox = Inbox()
        hub.subscribe("summary", _break)
        hub.subscribe("summary", inbox.put)
        client = connected(hub, "rank.0")
        for body in (b"1", b"2"):
            client.publish("summary", body)
        got: list[Message] = []
        while len(got) < 2:
            got += inbox.take(SOON)
        client.close()
    assert [line for line in lines if "ZeroDivisionError" in line] == lines
    assert len(lines) == 1


def _break(_: Message) -> None:
    raise ZeroDivisionError


def test_garbage_of_one_that_is_known_ends_only_its_connection(hub: Hub) -> None:
    rank = connected(hub, "rank.0")
    assert rank.wait_connected(SOON)
    connection, link = shaken(hub, "rank.1")
    sealed = link._sending.seal(b"\x63 is no kind of envelope")  # pyright: ignore
    connection.sendall(len(sealed).to_bytes(4, "big") + sealed)
    assert hung_up(connection)
    assert hub.request("rank.0", "x").exception(SOON) is not None
    assert rank.connected
    rank.close()


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing(hub: Hub) -> None:
    assert hub.address is not None
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(OSError, match="in use"):
        Hub(SECRET, address=hub.address)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_backoff_grows_and_is_never_the_same() -> None:
    backoff = Backoff(1.0, 8.0, chance=iter([0.0, 1.0, 0.5, 0.0, 1.0, 0.0]).__next__)
    assert [backoff.next() for _ in range(5)] == [0.5, 2.0, 3.0, 4.0, 8.0]
    backoff.reset()
    assert backoff.next() == 0.5


def test_hanging_up_reaches_the_other_side_though_a_copy_is_open() -> None:
    here, there = socket.socketpair()
    copy = here.dup()
    hang_up(here)
    assert there.recv(1) == b""
    copy.close()
    there.close()


def test_the_limit_of_descriptors_is_never_lowered() -> None:
    assert allow_descriptors(1) >= 1


def test_a_name_that_is_none_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="a name is"):
        ClientSide(SECRET, "Rank 0")


def test_a_connection_that_breaks_within_a_frame_says_nothing(hub: Hub) -> None:
    inbox, lost = Inbox(), threading.Event()
    hub.subscribe("summary", inbox.put)
    hub.on_presence(lambda presence: lost.set() if presence.state == "lost" else None)
    connection, link = shaken(hub, "rank.0")
    link.send(Envelope(PUBLISH, "summary", "", 0, b"half of it"))
    connection.sendall(taken(link)[:-3])
    hang_up(connection)
    assert lost.wait(SOON)
    assert inbox.take() == []
    assert hub.names == ()
