"""The shared directory: the same endpoints over files, which nobody else can write, repeat or fill up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_wires import SECRET, HandClock, said

from trimtab.control.broker import Broker, Presence
from trimtab.control.client import Client, Offer
from trimtab.control.directory_client import DirectorySession
from trimtab.control.directory_files import Infile, Outfile, file_key, write_whole
from trimtab.control.directory_server import DirectoryServer
from trimtab.control.endpoint import Complaints, Endpoint, Inbox
from trimtab.control.hub import Hub
from trimtab.control.link import Limits
from trimtab.control.messages import PUBLISH, Envelope, Message
from trimtab.control.session import Line
from trimtab.control.sockets import Backoff, Waker

SOON = 20.0
HUB = bytes(range(16))
KEY = file_key(SECRET, HUB, "rank.0", ".out")
POLL = 2.0


def _said(number: int) -> Envelope:
    return Envelope(PUBLISH, "summary", "", 0, str(number).encode())


@pytest.fixture
def out(tmp_path: Path) -> Outfile:
    return Outfile(tmp_path / "rank.0.out", KEY, b"s" * 16, 100, keep_seconds=10.0)


@pytest.fixture
def infile(tmp_path: Path) -> Infile:
    return Infile(tmp_path / "rank.0.out", KEY, 1000)


def _fresh(infile: Infile) -> list[Envelope]:
    found = infile.read()
    return [] if found is None else list(found[1])


def test_each_envelope_is_read_once_and_gaps_are_counted(out: Outfile, infile: Infile) -> None:
    assert not infile.changed()
    out.add(_said(0), 0.0)
    out.save(0.0)
    assert infile.changed()
    assert _fresh(infile) == [_said(0)]
    assert not infile.changed()
    out.add(_said(1), 1.0)
    out.save(1.0)
    assert _fresh(infile) == [_said(1)]
    assert _fresh(infile) == []
    for number in range(2, 5):
        out.add(_said(number), float(10 * number))
        out.save(float(10 * number))
    assert _fresh(infile) == [_said(3), _said(4)], "the second was gone before it was read"
    assert infile.missed == 1


def test_a_file_is_bounded(out: Outfile, infile: Infile) -> None:
    for number in range(9):
        out.add(Envelope(PUBLISH, "s", "", number, b"x" * 100_000), 0.0)
    out.save(0.0)
    assert out.path.stat().st_size < 300_000
    assert out.dropped == 7
    wide = Infile(out.path, KEY, 100_000)
    assert [envelope.number for envelope in _fresh(wide)] == [7, 8]
    with out.path.open("ab") as more:
        more.truncate(1 << 24)
    with pytest.raises(ValueError, match="too long"):
        infile.read()


def test_an_older_file_in_its_place_is_not_read_again(out: Outfile, infile: Infile) -> None:
    out.add(_said(0), 0.0)
    out.save(0.0)
    old = out.path.read_bytes()
    assert _fresh(infile) == [_said(0)]
    out.add(_said(1), 0.0)
    out.save(0.0)
    assert _fresh(infile) == [_said(1)]
    write_whole(out.path, old)
    assert infile.read() is None
    again = Outfile(out.path, KEY, b"t" * 16, 200, keep_seconds=10.0)  # the rank has started again
    again.add(_said(7), 0.0)
    again.save(0.0)
    assert _fresh(infile) == [_said(7)]
    write_whole(out.path, old)
    assert infile.read() is None


@pytest.mark.parametrize("place", [0, 7, 8, 30, 50, -40, -1])
def test_a_file_that_was_changed_anywhere_is_refused(out: Outfile, infile: Infile, place: int) -> None:
    out.add(_said(0), 0.0)
    out.save(0.0)
    raw = bytearray(out.path.read_bytes())
    raw[place] ^= 1
    out.path.write_bytes(raw)
    with pytest.raises(ValueError, match="not authentic"):
        infile.read()


@pytest.mark.parametrize(
    "key",
    [
        file_key(b"another secret, not ours", HUB, "rank.0", ".out"),
        file_key(SECRET, bytes(16), "rank.0", ".out"),
        file_key(SECRET, HUB, "rank.1", ".out"),
        file_key(SECRET, HUB, "rank.0", ".in"),
    ],
)
def test_keys_are_for_one_hub_one_name_and_one_direction(out: Outfile, key: bytes) -> None:
    out.save(0.0)
    with pytest.raises(ValueError, match="not authentic"):
        Infile(out.path, key, 1000).read()


def test_cut_off_files_links_and_folders_are_refused_or_passed_over(out: Outfile, infile: Infile) -> None:
    out.save(0.0)
    raw = out.path.read_bytes()
    out.path.write_bytes(raw[:-5])
    with pytest.raises(ValueError, match="not authentic"):
        infile.read()
    out.path.write_bytes(b"")
    with pytest.raises(ValueError, match="not authentic"):
        infile.read()
    out.path.unlink()
    out.path.symlink_to("/etc/passwd")
    assert infile.read() is None
    out.path.unlink()
    os.mkfifo(out.path)
    with pytest.raises(ValueError, match="not authentic"):
        infile.read()


class Job:
    """A hub's directory and its broker, with time set by hand and everything on this thread."""

    def __init__(self, directory: Path) -> None:
        self.clock = HandClock()
        self.presence: list[Presence] = []
        self.lines: list[str] = []
        self.name = "hub"
        self.broker = Broker(self.presence.append)
        self.endpoint = Endpoint("hub", self._send, Complaints(self.lines.append), self.clock)
        self.broker.attach(self)
        tasks: list[Callable[[], None]] = []
        self.tasks = tasks
        self.server = DirectoryServer(
            directory, SECRET, POLL, Limits(), 100, self.broker, tasks.append, self.endpoint.complaints, self.clock
        )

    def deliver(self, envelope: Envelope) -> None:
        self.endpoint.receive(envelope)

    def cut(self, reason: str) -> None:
        raise AssertionError(reason)

    def _send(self, envelope: Envelope) -> None:
        self.broker.handle(self, envelope, self.clock())

    def poll(self) -> None:
        """The hub looks, and does what follows."""
        self.server.poll()
        while self.tasks:
            self.tasks.pop(0)()
        self.clock.now += POLL


class Rank:
    """A client's session, polled by hand."""

    def __init__(self, job: Job, name: str, began_ns: int = 1, secret: bytes = SECRET) -> None:
        self.waiting: list[Envelope] = []
        self.endpoint = Endpoint(name, self.waiting.append, Complaints(lambda _: None), job.clock)
        self.met = 0
        self.waker = Waker()
        self.session = DirectorySession(job.server.folder, secret, name, Limits(), POLL, began_ns=began_ns)
        self.line = Line(
            take=lambda: self.waiting.pop(0) if self.waiting else None,
            handle=self.endpoint.receive,
            met=self._met,
            turn=lambda: None,
            stopping=lambda: False,
            waker=self.waker,
            clock=job.clock,
        )

    def _met(self) -> None:
        self.met += 1

    def poll(self) -> None:
        self.session.poll(self.line)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    running = Job(tmp_path / "control")
    yield running
    running.server.close(1.0)
    assert not (tmp_path / "control").exists()


def test_publish_request_and_answer_over_files(job: Job) -> None:
    rank = Rank(job, "rank.0")
    inbox = Inbox()
    job.endpoint.subscribe("summary", inbox.put)
    rank.endpoint.answer("ping", lambda message: b"pong " + message.body)
    rank.endpoint.publish("summary", b"first")
    rank.poll()
    job.poll()
    assert rank.met == 1
    assert [(one.name, one.state) for one in job.presence[1:]] == [("rank.0", "connected")]
    assert inbox.take() == [Message("summary", "rank.0", b"first")]
    asked = job.endpoint.request("rank.0", "ping", b"you")
    job.poll()
    rank.poll()
    rank.poll()
    job.poll()
    assert asked.result(0) == b"pong you"
    rank.waker.close()


def test_a_rank_that_started_again_gets_no_old_commands(job: Job) -> None:
    first = Rank(job, "rank.0")
    first.poll()
    job.poll()
    asked = job.endpoint.request("rank.0", "window")
    job.poll()  # the command lies there, and the rank is killed
    second = Rank(job, "rank.0", began_ns=2)
    calls: list[Message] = []
    second.endpoint.answer("window", lambda message: bytes(len(calls.append(message) or b"")))
    second.poll()
    job.poll()
    second.poll()
    job.poll()
    assert calls == []
    assert asked.exception(0) is not None
    assert [one.state for one in job.presence[1:]] == ["connected", "lost", "connected"]
    for rank in (first, second):
        rank.waker.close()


def test_silence_is_noticed_on_both_sides(job: Job) -> None:
    rank = Rank(job, "rank.0")
    rank.poll()
    for _ in range(12):
        job.poll()
    assert [one.state for one in job.presence[1:]] == ["connected", "lost"]
    assert list(job.server.folder.glob("rank.0.*")) == []
    for _ in range(3):
        rank.poll()
    job.poll()
    assert job.presence[-1].state == "connected", "it was only slow"
    rank.poll()
    job.clock.now += 100 * POLL
    rank.poll()  # finds what the hub has written since
    job.clock.now += 100 * POLL
    with pytest.raises(ValueError, match="shows no sign of life"):
        rank.poll()
    rank.waker.close()


def test_what_a_killed_hub_left_is_no_sign_of_life(job: Job) -> None:
    alive = job.server.folder / "hub.alive"
    long_ago = alive.stat().st_mtime - 60
    os.utime(alive, (long_ago, long_ago))
    rank = Rank(job, "rank.0")
    with pytest.raises(ValueError, match="shown no sign of life for 60 s"):
        rank.poll()
    assert rank.met == 0
    assert [path.name for path in job.server.folder.iterdir()] == ["hub.alive"]
    rank.waker.close()


def test_a_stranger_in_the_directory_is_passed_over(job: Job) -> None:
    stranger = Rank(job, "rank.5", secret=b"another secret, not ours")
    with pytest.raises(ValueError, match="not authentic"):
        stranger.poll()
    (job.server.folder / "rank.6.out").write_bytes(b"\x80\x04 a pickle")
    (job.server.folder / "Rank 7\n.out").write_bytes(b"")
    (job.server.folder / "notes.txt").write_text("hello")
    rank = Rank(job, "rank.0")
    rank.poll()
    job.poll()
    job.poll()
    assert [one.name for one in job.presence[1:]] == ["rank.0"]
    assert len(job.lines) == 1
    for one in (stranger, rank):
        one.waker.close()


def test_what_earlier_hubs_left_is_cleared_once_it_is_old(tmp_path: Path) -> None:
    directory = tmp_path / "control"
    old, young, other = directory / f"hub-{'0' * 32}", directory / f"hub-{'1' * 32}", directory / "hub-mine"
    for folder in (old, young, other):
        folder.mkdir(parents=True)
        (folder / "hub.alive").write_bytes(b"")
        (folder / "rank.0.out").write_bytes(b"")
    long_ago = (young / "hub.alive").stat().st_mtime - 3600
    for folder in (old, other):
        os.utime(folder / "hub.alive", (long_ago, long_ago))
    hub = Hub(SECRET, directory=directory)
    assert not old.exists()
    assert young.exists()
    assert other.exists()
    hub.start()
    hub.close()
    assert sorted(path.name for path in directory.iterdir()) == [young.name, other.name]


def test_threads_and_files_end_with_the_session(tmp_path: Path) -> None:
    hub = Hub(SECRET, directory=tmp_path / "control", poll_seconds=0.05)
    inbox, left = Inbox(), threading.Event()
    hub.subscribe("summary", inbox.put)
    hub.on_presence(lambda presence: left.set() if presence.state == "left" else None)
    hub.start()
    folder = next((tmp_path / "control").iterdir())
    client = Client("rank.0", lambda: Offer(SECRET, (), folder, 0.05), backoff=Backoff(0.01, 0.02))
    client.start()
    assert client.wait_connected(SOON)
    client.publish("summary", b"by file")
    assert inbox.take(SOON) == [Message("summary", "rank.0", b"by file")]
    client.publish("summary", b"last words")
    client.close(SOON)
    assert inbox.take(SOON) == [Message("summary", "rank.0", b"last words")]
    assert left.wait(SOON)
    hub.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_goes_away_is_said_once(tmp_path: Path) -> None:
    with said() as lines:
        hub = Hub(SECRET, directory=tmp_path / "control", poll_seconds=0.05)
        server = hub._directory  # pyright: ignore[reportPrivateUsage]
        assert server is not None
        for path in server.folder.iterdir():
            path.unlink()
        server.folder.rmdir()
        with pytest.raises(OSError, match="No such file"):
            server.poll()
        hub.close()
    assert lines == []
