"""How fast `trimtab scope serve` passes frames on, and answers about a recording of a large job.

    python benchmarks/scope_server.py            # live: latency and throughput; 10 M frames of a recording
    python benchmarks/scope_server.py --steps 1000 --ranks 100 --live-only

The server is a process of its own, as in a job; ranks and WebSocket clients are this process. Results go to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Origin

from trimtab.config import ControlConfig
from trimtab.control.client import Client
from trimtab.control.opening import join
from trimtab.scope.frame import Frame, decode_all, encode, split
from trimtab.scope.messages import FRAME, rank_endpoint
from trimtab.scope.recording.format import (
    ROWS,
    STREAMS,
    Rows,
    pack_file_head,
    pack_record,
    pack_rows,
    pack_streams,
)
from trimtab.scope.server import wire
from trimtab.scope.vector import vector_of

TAPS = 100
STEPS_OF_A_FILE = 500


def serve(directory: Path, *arguments: str) -> tuple[subprocess.Popen[str], str, str]:
    """A server, its address and its token."""
    command = [sys.executable, "-m", "trimtab", "scope", "serve", str(directory), "--parent-pipe", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    url, _, token = process.stderr.readline().strip().removeprefix("scope: ").partition("?token=")
    return process, url, token


def frame(tap: int, step: int, rank: int = 0) -> bytes:
    """Statistics, as a rank sends them."""
    arrays = {"vector": np.arange(11.0), "shift": np.zeros(1)}
    return encode(
        Frame(
            f"layers.{tap}.output", "statistics", "s-1", step, 0, rank, (("tp", 0, 2),), 0, arrays, {}, time.time_ns()
        )
    )


async def connected(url: str, token: str) -> ClientConnection:
    """A WebSocket that asks for all frames, of a session of its own."""
    with httpx2.Client(base_url=url) as browser:
        browser.get("/", params={"token": token})
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    live = await connect(
        url.replace("http", "ws") + "api/v1/live",
        additional_headers={"Cookie": cookie},
        origin=Origin(url.rstrip("/")),
        compression=None,
        max_size=None,
    )
    await live.send(json.dumps({"op": "subscribe", "id": "a", "pattern": "**"}))
    while json.loads(await live.recv())["type"] != "subscribed":
        pass
    return live


async def latency(rank: Client, url: str, token: str, samples: int) -> list[float]:
    """Seconds from a frame at the rank until a client has it decoded, one at a time, 100 a second."""
    live = await connected(url, token)
    found: list[float] = []
    for step in range(samples):
        await asyncio.sleep(0.01)
        rank.publish(FRAME, frame(0, step))
        while True:
            said = await live.recv()
            if isinstance(said, bytes):
                (received,) = decode_all(wire.unpack(said)[1])
                found.append((time.time_ns() - received.unix_ns) * 1e-9)
                break
    await live.close()
    return found


def listen(url: str, token: str, ready: Any, result: Any) -> None:
    """A client, in a process of its own, until nothing comes any more: how many frames, and when the last one came."""

    async def read() -> tuple[int, float]:
        live = await connected(url, token)
        ready.release()
        count, end = 0, 0.0
        while True:
            try:
                said = await asyncio.wait_for(live.recv(), 3.0)
            except TimeoutError:
                await live.close()
                return count, end
            if isinstance(said, bytes):
                count += wire.HEAD.unpack_from(said)[1]
                end = time.monotonic()
            elif count and time.monotonic() - end > 1.5:
                await live.close()
                return count, end

    result.put(asyncio.run(read()))


def throughput(
    rank: Client, server: int, url: str, token: str, clients: int, steps: int, rate: float
) -> dict[str, Any]:
    """Frames that clients get of ``steps`` steps of TAPS frames each, sent at ``rate`` steps a second (0: at once)."""
    context = multiprocessing.get_context("spawn")
    ready, result = context.Semaphore(0), context.Queue()
    processes = [context.Process(target=listen, args=(url, token, ready, result)) for _ in range(clients)]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    cpu, began = cpu_seconds(server), time.monotonic()
    for step in range(steps):
        rank.publish(FRAME, b"".join(frame(tap, step) for tap in range(TAPS)))
        if rate:
            time.sleep(max(began + (step + 1) / rate - time.monotonic(), 0.0))
    heard = [result.get() for _ in processes]
    for process in processes:
        process.join()
    sent, got = steps * TAPS, sum(count for count, _ in heard)
    took = max(end for _, end in heard) - began
    return {
        "clients": clients,
        "sent": sent,
        "got": f"{got / (sent * clients):.0%}",
        "frames/s a client": round(got / clients / took),
        "frames/s in all": round(got / took),
        "server, us of CPU a frame sent by the rank": round((cpu_seconds(server) - cpu) / sent * 1e6),
    }


def cpu_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def live_part() -> None:
    """Latency and throughput."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        process, url, token = serve(directory, "--no-watch", "--no-record")
        rank = join(rank_endpoint(0), ControlConfig(), directory, os.environ)
        assert rank.wait_connected(10)
        time.sleep(1.0)
        try:
            found = sorted(asyncio.run(latency(rank, url, token, 500)))
            p50, p99 = (found[int(len(found) * share)] * 1e3 for share in (0.5, 0.99))
            print(f"latency, rank to client: p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {found[-1] * 1e3:.2f} ms")
            for clients in (1, 10):
                for rate in (10.0, 50.0, 0.0):
                    said = throughput(rank, process.pid, url, token, clients, 300, rate)
                    print(f"{rate * TAPS:g} frames/s" if rate else "as fast as it goes", said)
        finally:
            rank.close()
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


def write_recording(folder: Path, steps: int, ranks: int) -> int:
    """Statistics of one tensor on many ranks; bytes written."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    vectors = np.stack([vector_of(rng.normal(size=256) * (1 + rank / ranks)) for rank in range(ranks)])
    arrays = np.concatenate((vectors, np.zeros((ranks, 1))), axis=1).astype("<f8").view(np.uint8).reshape(ranks, -1)
    headers = [
        bytes(
            split(
                encode(
                    Frame("layers.0.output", "statistics", "s-1", 0, 0, rank, (("dp", rank, ranks),), 0,
                          {"vector": vectors[rank], "shift": np.zeros(1)})
                )
            )[0].header
        )
        for rank in range(ranks)
    ]  # fmt: skip
    written = 0
    for number, first in enumerate(range(0, steps, STEPS_OF_A_FILE)):
        with (folder / f"large-{number:05d}.ttscope").open("wb") as file:
            file.write(pack_file_head({"recording": "large", "number": number, "label": "", "unix_ns": 1}))
            file.write(pack_record(STREAMS, pack_streams(0, headers)))
            for step in range(first, min(first + STEPS_OF_A_FILE, steps)):
                rows = Rows(
                    np.full(ranks, step),
                    np.full(ranks, step),
                    np.zeros(ranks, np.int32),
                    np.arange(ranks, dtype=np.uint32),
                    arrays,
                )
                file.write(pack_record(ROWS, pack_rows(rows)))
            written += file.tell()
    return written


def recorded_part(steps: int, ranks: int) -> None:
    """How long views of a large recording take, the first time and again."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        size = write_recording(directory / "scope", steps, ranks)
        print(f"recording: {steps:,} steps x {ranks:,} ranks, {size / 1e9:.2f} GB")
        process, url, token = serve(directory, "--no-live")
        try:
            with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=600) as client:
                (run,) = client.get("api/v1/runs").json()["runs"]
                tap = "layers.0.output"
                last = steps // 2
                views: list[tuple[str, str, dict[str, Any]]] = [
                    ("series", "series", {"tap": tap, "buckets": 1000}),
                    ("series again, other statistic", "series", {"tap": tap, "buckets": 1000, "statistic": "std"}),
                    ("series of a tenth", "series", {"tap": tap, "first": last, "last": last + steps // 10}),
                    ("grid of a step", "grid", {"tap": tap, "step": last}),
                    ("ranks x 500 columns, binary", "matrix",
                     {"pattern": tap, "rows": "ranks", "buckets": 500, "format": "binary"}),
                    ("ranks x 500 columns of a tenth", "matrix",
                     {"pattern": tap, "rows": "ranks", "buckets": 500, "format": "binary", "first": last,
                      "last": last + steps // 10}),
                ]  # fmt: skip
                for what, path, query in views:
                    began, cpu = time.perf_counter(), cpu_seconds(process.pid)
                    answer = client.get(f"api/v1/runs/{run['name']}/{path}", params=query)
                    took, cpu = time.perf_counter() - began, cpu_seconds(process.pid) - cpu
                    size = f"{len(answer.content):,} bytes, status {answer.status_code}"
                    print(f"{what}: {took:.2f} s ({cpu:.2f} s of CPU), {size}")
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
                print(f"server, largest resident size (mapped files included): {int(peak.split()[1]) / 1024:.0f} MB")
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--live-only", action="store_true")
    options = parser.parse_args()
    live_part()
    if not options.live_only:
        recorded_part(options.steps, options.ranks)


if __name__ == "__main__":
    main()
