"""What recording costs: step time of the examples with trimtab attached against without.

    python benchmarks/recorder.py --emulate                          # the demo's job: 8 ranks, emulated devices
    python benchmarks/recorder.py --ranks 1                          # one CPU process, nothing emulated
    python benchmarks/recorder.py --ranks 1 --gpu                    # one GPU, hidden 4096, sequence 4096, bf16
    python benchmarks/recorder.py --ranks 2 --gpu --workload fsdp    # plain PyTorch, also --workload ddp
    python benchmarks/recorder.py --ranks 2 --gpu --tp 2             # Megatron-Core with tensor parallelism
    python benchmarks/recorder.py --ranks 1 --gpu --reduce --size "--hidden-size 2048 --num-layers 12"

All conditions run in the same processes, one block of steps each, in an order that rotates from round to round;
trimtab is attached before a block and detached after it. The figure is the median over rounds of a block's mean
step time, and of its ratio to the mean of the same round's two blocks without: ``off`` and ``off again`` show what that
is worth. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
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

OFF = ("off", "off again")
CONDITIONS = ("off", "step", "layer", "off again", "op")
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
    parser.add_argument("--settle", type=int, default=3, help="steps before them that are not timed")
    parser.add_argument("--seconds", type=float, default=0.0, help="no new round after this many; 0: all rounds")
    parser.add_argument("--size", type=str.split, default=[], help="more arguments of examples/pretrain_gpt.py")
    parser.add_argument("--reduce", action="store_true", help="layers all-reduce as with TP (megatron, also one rank)")
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
    if condition in OFF and not arguments.emulate:
        return None
    import trimtab

    record = {"enabled": condition not in OFF, "dir": folder}
    if condition not in OFF:
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
        for _ in range(arguments.settle):
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
    begin = time.monotonic()
    for round_number in range(arguments.rounds):
        if round_number and not _agreed(not 0 < arguments.seconds < time.monotonic() - begin, arguments.gpu):
            break
        shift = round_number % len(CONDITIONS)
        for condition in CONDITIONS[shift:] + CONDITIONS[:shift]:
            blocks[condition].append(block(condition, arguments, step))
        if torch.distributed.get_rank() == 0:
            print("RESULT " + json.dumps(blocks), flush=True)
    torch.distributed.destroy_process_group()


def _agreed(flag: bool, gpu: bool) -> bool:
    """Rank 0's answer, on all ranks."""
    import torch

    told = torch.tensor([int(flag)], device="cuda" if gpu else "cpu")
    torch.distributed.broadcast(told, 0)
    return bool(told.item())


def measure(arguments: argparse.Namespace) -> dict[str, list[tuple[float, float, float]]]:
    """Start the ranks; the blocks of rank 0 by condition. Interrupted, those of the rounds that were over by then."""
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
    with contextlib.suppress(KeyboardInterrupt):
        run_ranks([sys.executable, __file__, *sys.argv[1:], "--worker"], arguments.ranks, environment, line)
    if not results:
        sys.exit("no result: rank 0 has failed, see above")
    return results[-1]


def table(blocks: dict[str, list[tuple[float, float, float]]]) -> None:
    """Print it."""
    columns = ("condition", "step time, median", "over off, median of rounds", "quartiles", "range", "host memory")
    print("| " + " | ".join((*columns, "device memory")) + " |")
    print("|---" * (len(columns) + 1) + "|")
    rounds = zip(*(blocks[name] for name in OFF), strict=True)
    baseline = [statistics.mean(seconds for seconds, _, _ in both) for both in rounds]
    for name in sorted(blocks, key=lambda name: name not in OFF):
        times, host, device = zip(*blocks[name], strict=True)
        ratios = sorted(100 * (one / off - 1) for one, off in zip(times, baseline, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        print(
            f"| {name} | {statistics.median(times) * 1e3:.2f} ms | {middle:+.2f} % | {low:+.2f} to {high:+.2f} % "
            f"| {ratios[0]:+.2f} to {ratios[-1]:+.2f} % | {max(host):+.0f} MB | {max(device):+.0f} MB |"
        )
    print(f"\n{len(baseline)} rounds")


def main() -> None:
    """Start the ranks and print the table."""
    arguments = parse_arguments()
    if arguments.worker:
        worker(arguments)
    else:
        table(measure(arguments))


if __name__ == "__main__":
    main()
