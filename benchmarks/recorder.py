"""What recording costs: step time of the examples with trimtab attached against without.

    python benchmarks/recorder.py --emulate                          # the demo's job: 8 ranks, emulated devices
    python benchmarks/recorder.py --ranks 1                          # one CPU process, nothing emulated
    python benchmarks/recorder.py --ranks 1 --gpu                    # one GPU, hidden 4096, sequence 4096, bf16
    python benchmarks/recorder.py --ranks 2 --gpu --workload fsdp    # plain PyTorch, also --workload ddp
    python benchmarks/recorder.py --ranks 2 --gpu --tp 2             # Megatron-Core with tensor parallelism

All conditions run in the same processes, one block of steps each, in an order that rotates from round to round;
trimtab is attached before a block and detached after it. The figure is the median over rounds of a block's mean
step time, and of its ratio to the same round's block without. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, Step

CONDITIONS = ("off", "step", "layer", "op")
SETTLE = 3
EMULATED_MS = {"layer_forward_ms": 20.0, "embedding_ms": 3.0, "output_ms": 3.0, "optimizer_ms": 20.0}


def parse_arguments() -> argparse.Namespace:
    """The options, and the layout that goes with them where none is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="megatron")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tp", type=int, help="default: 2 with --emulate, else 1")
    parser.add_argument("--pp", type=int, help="default: 2 with --emulate, else 1")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="timed steps a block")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="the model for GPUs")
    parser.add_argument("--compile", action="store_true", help="torch.compile (ddp and fsdp)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    usual = 2 if arguments.emulate else 1
    arguments.tp, arguments.pp = arguments.tp or usual, arguments.pp or usual
    return arguments


def attached(condition: str, arguments: argparse.Namespace, folder: str) -> Any:
    """A session for the condition, None where nothing is attached."""
    if condition == "off" and not arguments.emulate:
        return None
    import trimtab

    record = {"enabled": condition != "off", "dir": folder}
    if condition != "off":
        record["granularity"] = condition
    emulate = {"enabled": arguments.emulate, **EMULATED_MS}
    engine = "megatron" if arguments.workload == "megatron" else "torch"
    return trimtab.attach(record=record, emulate=emulate, engine={"name": engine})


def memory_mb(gpu: bool) -> tuple[float, float]:
    """Resident memory of this process, and what is in use on its GPU (all of it: streams and events, too)."""
    import torch

    status = Path("/proc/self/status").read_text()
    free, total = torch.cuda.mem_get_info() if gpu else (0, 0)
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3, (total - free) / 1e6


def block(condition: str, arguments: argparse.Namespace, step: Step) -> tuple[float, float, float]:
    """Mean seconds of a step, and by how many MB memory grew on the host and on the GPU."""
    import torch

    def together() -> None:
        if arguments.gpu:
            torch.cuda.synchronize()
        torch.distributed.barrier()

    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        host, device = memory_mb(arguments.gpu)
        session = attached(condition, arguments, folder)
        for _ in range(SETTLE):
            step()
        together()
        begin = time.perf_counter()
        for _ in range(arguments.steps):
            step()
        if arguments.gpu:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) / arguments.steps
        host_after, device_after = memory_mb(arguments.gpu)
        if session is not None:
            session.detach()
        torch.distributed.barrier()
    return seconds, host_after - host, device_after - device


def worker(arguments: argparse.Namespace) -> None:
    """One rank: run all blocks; rank 0 prints a JSON line."""
    import torch

    if arguments.gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    step = WORKLOADS[arguments.workload](arguments)
    for _ in range(5):
        step()
    blocks: dict[str, list[tuple[float, float, float]]] = {name: [] for name in CONDITIONS}
    for round_number in range(arguments.rounds):
        shift = round_number % len(CONDITIONS)
        for condition in CONDITIONS[shift:] + CONDITIONS[:shift]:
            blocks[condition].append(block(condition, arguments, step))
    if torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps(blocks), flush=True)
    torch.distributed.destroy_process_group()


def measure(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float, float]]]:
    """Start the ranks; the blocks of rank 0 by condition."""
    from trimtab.localjob import run_ranks

    results: list[dict[str, Any]] = []

    def line(rank: int, text: str) -> None:
        if text.startswith("RESULT "):
            results.append(json.loads(text[len("RESULT ") :]))
        elif "warn" not in text.lower():
            print(f"[rank {rank}] {text}", file=sys.stderr)

    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if not arguments.gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    run_ranks([sys.executable, __file__, *sys.argv[1:], "--worker"], arguments.ranks, environment, line)
    if not results:
        sys.exit("no result: rank 0 has failed, see above")
    return results[0]


def table(blocks: dict[str, list[tuple[float, float, float]]]) -> None:
    """Print it."""
    print("| condition | step time, median | over off, median of rounds | range | host memory | device memory |")
    print("|---|---|---|---|---|---|")
    baseline = [seconds for seconds, _, _ in blocks["off"]]
    for name, measured in blocks.items():
        times, host, device = zip(*measured, strict=True)
        ratios = sorted(100 * (one / off - 1) for one, off in zip(times, baseline, strict=True))
        print(
            f"| {name} | {statistics.median(times) * 1e3:.2f} ms | {statistics.median(ratios):+.2f} % "
            f"| {ratios[0]:+.2f} to {ratios[-1]:+.2f} % | {max(host):+.0f} MB | {max(device):+.0f} MB |"
        )


def main() -> None:
    """Start the ranks and print the table."""
    arguments = parse_arguments()
    if arguments.worker:
        worker(arguments)
    else:
        table(measure(arguments))


if __name__ == "__main__":
    main()
