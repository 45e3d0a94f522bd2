"""What the channel of control costs: a summary on its rank and at the hub, with a thousand clients, and its latency.

python benchmarks/control.py [--clients 1000] [--seconds 20]

The clients are real connections, driven by a process of their own without threads. CPU times are those of the hub's
thread, so what else the machine does hardly changes them; latencies it does change.
"""

from __future__ import annotations

import argparse
import multiprocessing
import selectors
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from trimtab.control.client import Client, Offer
from trimtab.control.endpoint import Inbox
from trimtab.control.hub import Hub, allow_descriptors
from trimtab.control.link import Limits, Link
from trimtab.control.messages import PUBLISH, Envelope, Message, from_json, to_json
from trimtab.scan.online.summary import Heartbeat, OpenCommunication, RankSummary, StepTimes, decode, encode

SECRET = b"only for this benchmark, and not a secret"
LIMITS = Limits()
MS = 1_000_000


def summary(rank: int, steps: int = 1) -> RankSummary:
    """As a rank of a large job sends it."""
    times = tuple(StepTimes(10_000 + s, 1234 * MS, 987_654_321, 123_456_789, 1_234_567, 456_789) for s in range(steps))
    return RankSummary(
        "slurm-1234567.0", 0, rank, 10_000, "node-0123.cluster", time.time_ns(), times, load=0.7, sm_clock_mhz=1755
    )


def heartbeat(rank: int) -> Heartbeat:
    """The same."""
    waits = OpenCommunication(
        "TENSOR_MODEL_PARALLEL_GROUP/5@2", "all_reduce", 123_456, 1 << 25, time.time_ns(), ((0, 7, 1),)
    )
    now = time.time_ns()
    return Heartbeat("slurm-1234567.0", 0, rank, 10_000, "node-0123.cluster", now, 10_000, now, "backward", (waits,))


def cpu_of(thread: threading.Thread) -> float:
    """CPU seconds of a thread."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def hub_thread() -> threading.Thread:
    """The hub's."""
    return next(thread for thread in threading.enumerate() if thread.name == "trimtab-hub")


def per_call_us(act: Any, calls: int = 3000, runs: int = 7) -> float:
    """Median over ``runs`` of the thread's CPU time of a call."""
    found: list[float] = []
    for _ in range(runs):
        begun = time.thread_time_ns()
        for _ in range(calls):
            act()
        found.append((time.thread_time_ns() - begun) / calls / 1000)
    return statistics.median(found)


def on_the_rank() -> None:
    """What a rank's writer thread and its channel's thread spend on a summary."""
    message = summary(7)
    body = to_json(encode(message))
    print(f"summary of 1 step: {len(body)} bytes; of 10: {len(to_json(encode(summary(7, 10))))} bytes")
    print(f"heartbeat with one open communication: {len(to_json(encode(heartbeat(7))))} bytes")
    print(f"rank, writer thread: encode one step {per_call_us(lambda: to_json(encode(message))):.1f} us")
    client = Client("rank.7", lambda: None)
    print(f"rank, writer thread: publish {per_call_us(lambda: client.publish('summary', body)):.1f} us")
    link = established()

    def send() -> None:
        link.send(Envelope(PUBLISH, "summary", "", 0, body))
        link.sent(len(link.outgoing()), 0.0)

    print(f"rank, channel's thread: seal and frame {per_call_us(send):.1f} us (and one system call)")
    print(f"watch: read JSON and check it {per_call_us(lambda: decode(from_json(body))):.1f} us")


def established() -> Link:
    """A client's link, after a handshake with nobody."""
    hub, client = Link(SECRET, None, LIMITS, 0.0), Link(SECRET, "rank.7", LIMITS, 0.0)
    for here, there in ((hub, client), (client, hub), (hub, client)):
        out = bytes(here.outgoing())
        here.sent(len(out), 0.0)
        there.received(out, 0.0)
    return client


def simulate(address: tuple[str, int], clients: int, per_second: float, seconds: float, results: Any) -> None:
    """In a process of its own: connect all clients, then each says a summary ``per_second`` times a second."""
    allow_descriptors(clients)
    selector = selectors.DefaultSelector()
    links: list[tuple[socket.socket, Link]] = []
    begun = time.monotonic()
    for rank in range(clients):
        connection = socket.create_connection(address)
        connection.setblocking(False)
        links.append((connection, Link(SECRET, f"rank.{rank}", LIMITS, time.monotonic())))
        selector.register(connection, selectors.EVENT_READ, links[-1])
    waiting = clients
    while waiting:
        for key, _ in selector.select(1.0):
            connection, link = key.data
            link.received(connection.recv(65536), time.monotonic())
            write(connection, link)
            if link.established:
                selector.unregister(connection)
                waiting -= 1
    results.put(time.monotonic() - begun)
    bodies = [encode(summary(rank)) for rank in range(clients)]
    gap, begun = 1.0 / (clients * per_second), time.monotonic()
    sent = 0
    while (now := time.monotonic()) - begun < seconds:
        while sent * gap <= now - begun:
            connection, link = links[sent % clients]
            said = bodies[sent % clients]
            said["at"][3] = time.time_ns()
            link.send(Envelope(PUBLISH, "summary", "", 0, to_json(said)))
            write(connection, link)
            sent += 1
        time.sleep(0.002)
    results.put(sent)


def write(connection: socket.socket, link: Link) -> None:
    """Everything, waiting where the socket is full."""
    while out := link.outgoing():
        try:
            link.sent(connection.send(out), time.monotonic())
        except BlockingIOError:
            time.sleep(0.001)


def at_the_hub(clients: int, per_second: float, seconds: float) -> None:
    """CPU of the hub for each summary, and how long one is on its way."""
    allow_descriptors(clients)
    late: list[float] = []

    def heard(message: Message) -> None:
        # The time stands in the body; looking for it is cheaper than reading JSON, and counts as the hub's.
        late.append((time.time_ns() - int(message.body.split(b'"at":[', 1)[1].split(b"]", 1)[0].split(b",")[3])) / 1e6)

    hub = Hub(SECRET, address=("127.0.0.1", 0), most=4 * clients)
    hub.subscribe("summary", heard)
    hub.start()
    thread = hub_thread()
    before = resident_kb()
    results: Any = multiprocessing.get_context("fork").Queue()
    arguments = (hub.address, clients, per_second, seconds, results)
    simulation = multiprocessing.get_context("fork").Process(target=simulate, args=arguments)
    simulation.start()
    connecting, shaking = results.get(), cpu_of(thread)
    memory = (resident_kb() - before) / clients
    begun, messages = cpu_of(thread), hub.messages
    sent = results.get()
    inbox = Inbox()
    inbox.take(1.0)
    used, routed = cpu_of(thread) - begun, hub.messages - messages
    simulation.join()
    hub.close()
    late.sort()
    each, each_shake = used / max(routed, 1) * 1e6, shaking / clients * 1e6
    print(f"{clients} clients, {per_second:g}/s each: connected in {connecting:.1f} s", end="")
    print(f" ({each_shake:.0f} us of CPU and {memory:.1f} kB each); {sent} summaries said, {routed} routed;", end="")
    print(f" {each:.1f} us of CPU each, {100 * used / seconds:.1f} % of a core;", end="")
    print(f" latency {quantile(late, 0.5):.1f} ms, 99 %: {quantile(late, 0.99):.1f} ms")


def quantile(ordered: list[float], share: float) -> float:
    """Of sorted values."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def resident_kb() -> int:
    """Memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def over_files(poll_seconds: float) -> None:
    """Latency over a shared directory."""
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(SECRET, directory=Path(folder, "control"), poll_seconds=poll_seconds)
        inbox, late = Inbox(), []
        hub.subscribe("summary", inbox.put)
        hub.start()
        where = next(Path(folder, "control").iterdir())
        client = Client("rank.0", lambda: Offer(SECRET, (), where, poll_seconds))
        client.start()
        client.wait_connected(60)
        for _ in range(20):
            client.publish("summary", str(time.monotonic()).encode())
            late += [time.monotonic() - float(message.body) for message in inbox.take(10 * poll_seconds)]
        client.close()
        hub.close()
    median, most = statistics.median(late), max(late)
    print(f"shared directory, looked at every {poll_seconds:g} s: latency {median:.2f} s, {most:.2f} s at most")


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    on_the_rank()
    for clients, per_second in ((options.clients // 10, 1.0), (options.clients, 1.0), (options.clients, 4.0)):
        at_the_hub(clients, per_second, options.seconds)
    over_files(0.5)


if __name__ == "__main__":
    main()
