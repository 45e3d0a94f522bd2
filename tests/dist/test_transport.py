"""The transports do the same, over threads, torch.distributed and UCX; and what only processes can show."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from transport_scenarios import CREDITS, PATIENCE, SCENARIOS, Player, play
from ucx_here import needs_ucx

from trimtab.config import TransportConfig
from trimtab.transport.errors import PeerLost, WrongMessage
from trimtab.transport.interface import Label
from trimtab.transport.local import local_transports
from trimtab.transport.opening import group_exchange, open_transport

WORLD = 3


KINDS = ["torch", pytest.param("ucx", marks=needs_ucx)]


def _open(kind: str, rank: int, world: int, **settings: Any) -> Any:
    """A transport; torch.distributed must have been initialised."""
    return open_transport(kind, rank, world, group_exchange(), TransportConfig(kind, credits=CREDITS, **settings))  # pyright: ignore[reportArgumentType]


def _threads() -> set[str]:
    """Threads of ours."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("trimtab")}


def _files() -> list[str]:
    """What a process has open."""
    return sorted(str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def _check_shared_memory() -> None:
    """No shared memory of UCX stays. Other processes may be just opening some, which has a name until it is open."""
    seen = _shared_memory()
    deadline = monotonic() + 10.0
    while seen and monotonic() < deadline:
        threading.Event().wait(0.01)
        seen &= _shared_memory()
    assert not seen


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "ucx" in path.name}


def _play(rank: int, world: int, kind: str, last: str) -> None:
    dist.init_process_group("gloo")
    play(_open(kind, rank, world), last)
    assert not _threads()
    _check_shared_memory()


@pytest.mark.dist
@pytest.mark.parametrize("last", ["in_flight", "left_alone"])
@pytest.mark.parametrize("kind", KINDS)
def test_scenarios(kind: str, last: str) -> None:
    run_ranks(WORLD, _play, WORLD, kind, last)


@pytest.mark.parametrize("last", ["in_flight", "left_alone"])
def test_scenarios_between_threads(last: str) -> None:
    with ThreadPoolExecutor(WORLD) as threads:
        for done in [threads.submit(play, transport, last) for transport in local_transports(WORLD, CREDITS)]:
            done.result(PATIENCE)


@pytest.mark.dist
@needs_ucx
@pytest.mark.parametrize("allowed", ["self,posix", "self,sysv,cma", "tcp"])
def test_scenarios_over_other_ways_of_ucx(allowed: str) -> None:
    run_ranks(2, _play, 2, "ucx", "in_flight", env={"UCX_TLS": allowed, "UCX_NET_DEVICES": "lo"})


def _killed(rank: int, kind: str, at: str) -> float | None:
    """Rank 1 is killed; how long it takes the others to say so. What is killed is a child, for a rank must answer."""
    ready, say = os.pipe()
    if rank == 1:
        child = os.fork()
        if child:
            os.read(ready, 1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
    dist.init_process_group("gloo")
    transport = _open(kind, rank, WORLD)
    player = Player(transport)
    player.meet()
    if rank == 1:
        player.messages(2)  # the others have met it
        if at == "sending":
            for number in range(CREDITS):
                transport.send(0, Label(False, 0, number), (torch.ones(2_000_000),))
        os.write(say, b"x")
        signal.pause()
    transport.send(1, Label(False, 1, 0), ())
    began = monotonic()
    if at == "sending":  # to somebody who does not take them
        with contextlib.suppress(PeerLost):  # already
            for number in range(CREDITS + 2):
                transport.send(1, Label(True, 0, number), (torch.ones(2_000_000),))
    with pytest.raises(PeerLost, match="stage 1 is lost"):
        player.listen()
    took = monotonic() - began
    with pytest.raises(PeerLost, match="stage 1 is lost"):
        transport.send(1, Label(False, 0, 0), ())
    transport.close()
    threads = _threads()
    if kind == "torch":  # gloo may not tell a thread that the peer with whom it is in the middle of a message is gone
        threads = {name for name in threads if not name.endswith("-1")}
    assert not threads
    _check_shared_memory()
    return took


@pytest.mark.dist
@pytest.mark.parametrize("at", ["rest", "sending"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_peer_is_an_error_on_all_others_and_leaves_nothing(
    kind: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.transport.torch_distributed._GRACE_SECONDS", 1.0)  # of which gloo may need all, twice
    took = run_ranks(WORLD, _killed, kind, at)
    assert max(took[0], took[2]) < 10.0
    _check_shared_memory()


@pytest.mark.dist
@needs_ucx
def test_a_killed_peer_over_tcp() -> None:
    took = run_ranks(WORLD, _killed, "ucx", "sending", env={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"})
    assert max(took[0], took[2]) < 10.0


def _again(rank: int, kind: str) -> None:
    """Open, use and close several times, two at a time."""
    dist.init_process_group("gloo")
    files: list[list[str]] = []
    for round_number in range(3):
        both = [_open(kind, rank, 2) for _ in range(2)]
        players = [Player(transport) for transport in both]
        for number, player in enumerate(players):
            player.transport.send(1 - rank, Label(False, 0, round_number), (torch.tensor([number]),))
        for number, player in enumerate(players):
            assert player.messages(1)[0].take()[0].tolist() == [number]
            player.quiet()
        for transport in both:
            transport.close()
        dist.barrier()
        files.append(_files())
    assert not _threads()
    _check_shared_memory()
    assert len(files[-1]) <= len(files[0]), files  # the first may have loaded something that stays


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_two_transports_in_a_process_and_nothing_stays(kind: str) -> None:
    run_ranks(2, _again, kind)


_LEAVES_OPEN = """
import os, sys, torch, torch.distributed as dist
from trimtab.config import TransportConfig
from trimtab.transport.interface import Label
from trimtab.transport.opening import group_exchange, open_transport
rank, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + sys.argv[3], rank=rank, world_size=2)
transport = open_transport(kind, rank, 2, group_exchange(), TransportConfig(kind))
transport.send(1 - rank, Label(False, 0, 0), (torch.ones(1_000_000),))
assert transport.wait(60)
transport.poll()[0].take()
if os.fork() == 0:
    sys.exit(0)
os.wait()
print("done")
"""


@pytest.mark.dist
@pytest.mark.slow  # processes of their own, which import torch
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_ends_without_closing_ends_well(kind: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _LEAVES_OPEN, str(rank), kind, str(tmp_path / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    for process in ranks:
        out, error = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), error
        assert "Traceback" not in error


def _lying(rank: int) -> None:
    """Rank 0 sends more than its header says."""
    dist.init_process_group("gloo")
    transport = _open("ucx", rank, 2)
    player = Player(transport)
    player.meet()
    if rank == 0:
        wire = transport._protocol._wire
        pack = wire.pack
        wire.pack = lambda *said: pack(*said[:5], *(tuple(t[: len(t) // 2] for t in tensors) for tensors in said[5:]))
        transport.send(1, Label(True, 3, 7, 1), (torch.ones(100_000),))
        with contextlib.suppress(PeerLost):
            transport.wait(2.0)
    else:
        with pytest.raises(WrongMessage, match="gradient of chunk 3, microbatch 7, iteration 1 from stage 0"):
            player.next()
    transport.close()


@pytest.mark.dist
@needs_ucx
def test_a_message_that_is_longer_than_its_header_says() -> None:
    run_ranks(2, _lying)


def test_all_scenarios_are_played() -> None:
    assert len(SCENARIOS) == 14
