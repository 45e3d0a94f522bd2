"""What a profiler window costs: the examples with one open on rank 0 against the same job, recorded without.

    python benchmarks/window.py --ranks 1                          # one CPU process
    python benchmarks/window.py --ranks 1 --gpu                    # one GPU, hidden 4096, sequence 4096, bf16
    python benchmarks/window.py --ranks 2 --gpu --workload ddp     # plain PyTorch, also --workload fsdp

One recorded job in which blocks of steps with a window and without take turns. A block is one step longer than the
window, because that ends where the next step begins. The first window is left out of the medians and told by itself:
it initialises what the profiler needs (on a GPU, CUPTI). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workloads import WORKLOADS, Step

SETTLE = 3
WARM_UP = 5


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="megatron")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="steps of a window")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--granularity", default="layer")
    parser.add_argument("--with-stack", action="store_true")
    parser.add_argument("--record-shapes", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="the model for GPUs")
    parser.add_argument("--compile", action="store_true", help="torch.compile (ddp and fsdp)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """A window at the start of each round, after the steps that settle."""
    window = {
        "steps": arguments.steps,
        "start": WARM_UP + SETTLE,
        "every": 2 * (arguments.steps + 1 + SETTLE),
        "with_stack": arguments.with_stack,
        "record_shapes": arguments.record_shapes,
    }
    return {"dir": folder, "granularity": arguments.granularity, "window": window}


def block(arguments: argparse.Namespace, step: Step, steps: int) -> float:
    """Seconds that the steps take, all ranks together."""
    import torch

    def together() -> None:
        if arguments.gpu:
            torch.cuda.synchronize()
        torch.distributed.barrier()

    together()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    together()
    return time.perf_counter() - begin


def opened(folder: str) -> tuple[list[dict[str, float]], tuple[float, float]]:
    """What the run tells of each window of rank 0, times in seconds, and the lag of the profiler's clock."""
    from trimtab.traces.kineto import read_kineto
    from trimtab.traces.read import read
    from trimtab.traces.window_kernels import find_windows, read_window

    trace = read(folder)
    events = trace.events.filter(trace.events["name"].cast(str) == "window").sort("start")
    windows: dict[int, dict[str, float]] = {}
    for row in events.iter_rows(named=True):
        args = json.loads(row["args"])
        window = windows.setdefault(args["first"], {"bytes": args["bytes"], "packing": args["packing_ms"] / 1e3})
        window[args["part"]] = (row["end"] - row["start"]) / 1e9
        if args["part"] == "closing":
            window["events"] = len(read_kineto(Path(folder) / args["file"])[0].slices)
    return list(windows.values()), read_window(find_windows(Path(folder))[-1], trace).lag_us


def worker(arguments: argparse.Namespace) -> None:
    """One rank; rank 0 prints a JSON line."""
    import torch

    import trimtab

    step = WORKLOADS[arguments.workload](arguments)
    engine = "megatron" if arguments.workload == "megatron" else "torch"
    times: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        rank = torch.distributed.get_rank()
        session = trimtab.attach(engine={"name": engine}, record=settings(arguments, folder))
        block(arguments, step, WARM_UP)
        for _ in range(arguments.rounds + 1):
            for condition in times:
                block(arguments, step, SETTLE)
                times[condition].append(block(arguments, step, arguments.steps + 1))
        session.detach()
        if rank == 0:
            windows, lag = opened(folder)
            print("RESULT " + json.dumps({"times": times, "windows": windows, "lag": lag}), flush=True)
    torch.distributed.destroy_process_group()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks; what rank 0 measured."""
    from trimtab.localjob import run_ranks

    results: list[dict[str, Any]] = []

    def line(rank: int, text: str) -> None:
        if text.startswith("RESULT "):
            results.append(json.loads(text[len("RESULT ") :]))
        elif "warn" not in text.lower() and not text.startswith("USDT"):
            print(f"[rank {rank}] {text}", file=sys.stderr)

    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if not arguments.gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    run_ranks([sys.executable, __file__, *sys.argv[1:], "--worker"], arguments.ranks, environment, line)
    if not results:
        sys.exit("no result: rank 0 has failed, see above")
    return results[0]


def table(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print it."""
    first, *windows = result["windows"]
    times = {name: measured[1:] for name, measured in result["times"].items()}
    plain = statistics.median(times["without"]) / (arguments.steps + 1)
    extra = [one - other for one, other in zip(times["with"], times["without"], strict=True)]
    during = [
        (more - window["opening"] - window["closing"]) / arguments.steps
        for more, window in zip(extra, windows, strict=True)
    ]

    def middle(values: Sequence[float], scale: float, digits: int = 1) -> str:
        low, high = min(values) * scale, max(values) * scale
        return f"{statistics.median(values) * scale:.{digits}f} | {low:.{digits}f} to {high:.{digits}f}"

    def column(name: str) -> list[float]:
        return [window[name] for window in windows]

    per_event = [1e6 * window["closing"] / window["events"] for window in windows]
    print(f"| {len(windows)} windows of {arguments.steps} steps | median | range |")
    print("|---|---|---|")
    print(f"| step without a window, ms | {middle([one / (arguments.steps + 1) for one in times['without']], 1e3)} |")
    print(f"| each step of a window longer by, ms | {middle(during, 1e3)} |")
    print(f"| the same, % of a step | {middle(during, 100 / plain)} |")
    print(f"| opening, ms (the very first: {first['opening'] * 1e3:.1f}) | {middle(column('opening'), 1e3)} |")
    print(f"| closing, ms (the very first: {first['closing'] * 1e3:.1f}) | {middle(column('closing'), 1e3)} |")
    print(f"| closing, us for each event in the file | {middle(per_event, 1)} |")
    print(f"| whole price of a window, ms | {middle(extra, 1e3)} |")
    print(f"| compressing, in the background, ms | {middle(column('packing'), 1e3)} |")
    print(f"| events in the file | {middle(column('events'), 1, 0)} |")
    print(f"| size of the file, MB | {middle(column('bytes'), 1e-6, 2)} |")
    median, most = result["lag"]
    print(f"\nAnnotations after the recorder's own times: median {median:.1f} us, most {most:.1f} us.")


def main() -> None:
    """Start the ranks and print the table."""
    arguments = parse_arguments()
    if arguments.worker:
        worker(arguments)
    else:
        table(arguments, measure(arguments))


if __name__ == "__main__":
    main()
