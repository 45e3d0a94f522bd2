"""How long it takes from a wish to the first frame, and to a perturbation in force, on a live job.

python benchmarks/scope_latency.py [--rounds 20] [--emulate-ms 0]

The job is the example script at TP2 x PP2 on the CPU, started by ``trimtab run``, with scope's default settings but
for the budget (steps of a tiny model are so short that any subscription passes one percent). Of each way the median and
the maximum over the rounds:

- joined: a collector that is connected already: ``subscribe`` to the first frame, put together over its ranks;
- joined: ``perturb`` (as soon as can be) to the first rank's word that it has happened;
- cold: the command ``trimtab scope stream``, from the start of its process to its first line: Python, a new hub, ranks
  that look for it once a second, their taps, agreeing, the first frame. The next one begins when ranks have noticed
  that the last one has gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.config import ControlConfig
from trimtab.localjob import run_ranks
from trimtab.scope.collector.collector import Collector
from trimtab.scope.collector.interface import Notice, Received
from trimtab.scope.collector.opening import open_scope
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.shards import Gathering
from trimtab.scope.subscription import Subscription

REPOSITORY = Path(__file__).parents[1]
MODEL = ("--tp", "2", "--pp", "2", "--num-layers", "4", "--hidden-size", "32", "--seq-length", "16")
BATCH = ("--micro-batch-size", "1", "--global-batch-size", "2", "--log-interval", "1000000")
TAP = "layers.2.mlp.hidden"
LONGEST = 60.0


def train(folder: Path, emulate_ms: float) -> None:
    """The job, in a process of its own, until that is terminated; no rank outlives it."""
    lines = ["[record]", f"dir = {json.dumps(str(folder / 'run'))}", "[engine]", 'name = "megatron"']
    lines += ["cpu_shim = true", "[scope]", "allow_perturb = true", "budget = 1.0"]
    if emulate_ms:
        lines += ["[emulate]", "enabled = true", f"layer_forward_ms = {emulate_ms}"]
    (folder / "job.toml").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "trimtab", "run", "--config", str(folder / "job.toml")]
    command += [str(REPOSITORY / "examples" / "pretrain_gpt.py"), *MODEL, *BATCH, "--steps", "10000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    with contextlib.suppress(KeyboardInterrupt):
        run_ranks(
            command, 4, environment, lambda rank, line: print(f"rank {rank}: {line}") if "trimtab:" in line else None
        )


def first_frame(scope: Collector) -> float:
    """Seconds from the wish to the first moment that is complete."""
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stop = scope.listen(came.put)
    began = time.monotonic()
    name = scope.subscribe(Subscription(TAP))
    gathering = Gathering()
    try:
        while True:
            one = came.get(timeout=LONGEST)
            if isinstance(one, Received) and one.frame.subscription == name and gathering.add(one.frame):
                return time.monotonic() - began
    finally:
        stop()
        scope.unsubscribe(name)


def in_force(scope: Collector) -> float:
    """Seconds from the wish to the word that it has happened."""
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stop = scope.listen(came.put, frames=False)
    began = time.monotonic()
    name = scope.perturb(Perturbation("layers.1.mlp.output", "offset", parameters={"value": 0.0}))
    try:
        while True:
            one = came.get(timeout=LONGEST)
            if isinstance(one, Notice) and one.perturbation == name and one.kind == "activated":
                return time.monotonic() - began
    finally:
        stop()


def cold(folder: Path) -> float:
    """Seconds from the start of the command to its first line."""
    words = [sys.executable, "-m", "trimtab", "scope", "stream", str(folder), "--tap", TAP, "--json", "-"]
    began = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        took = time.monotonic() - began
        process.terminate()
        process.stdout.read()
    time.sleep(2.0)
    return took


def measure(title: str, rounds: int, once: Callable[[], float]) -> None:
    """Print median and maximum."""
    found = [once() for _ in range(rounds)]
    print(f"{title:44} median {statistics.median(found):6.3f} s   maximum {max(found):6.3f} s", flush=True)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description="From a wish to what it gives.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--emulate-ms", type=float, default=0.0, help="each layer's forward takes so long")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = multiprocessing.Process(target=train, args=(Path(directory), args.emulate_ms))
        job.start()
        run = Path(directory) / "run"
        try:
            while not run.is_dir():
                time.sleep(0.2)
            with open_scope(run, ControlConfig(), os.environ) as scope:
                assert scope.wait(lambda ranks: ranks.showing, LONGEST)
                scope.wait(lambda ranks: ranks.seconds_per_step > 0, LONGEST)
                print(f"steps of {1e3 * scope.status()['seconds_per_step']:.0f} ms, load {os.getloadavg()[0]:.1f}")
                measure("joined: subscribe to first frame", args.rounds, lambda: first_frame(scope))
                measure("joined: perturb to in force", args.rounds, lambda: in_force(scope))
            time.sleep(2.0)
            measure("cold: command to first line", args.rounds, lambda: cold(run))
        finally:
            job.terminate()
            job.join(30)


if __name__ == "__main__":
    main()
