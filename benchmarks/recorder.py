"""What recording costs: step time of examples/pretrain_gpt.py with trimtab attached against without.

    python benchmarks/recorder.py --emulate                 # the demo's job: 8 ranks, emulated devices
    python benchmarks/recorder.py --ranks 1 --tp 1 --pp 1   # one CPU process, nothing emulated
    python benchmarks/recorder.py --ranks 1 --tp 1 --pp 1 --gpu   # one GPU, hidden 4096, sequence 4096, bf16

All conditions run in the same processes, one block of steps each, in an order that rotates from round to round;
trimtab is attached before a block and detached after it. The figure is the median over rounds of a block's mean
step time, and of its ratio to the same round's block without. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "examples" / "pretrain_gpt.py"
CONDITIONS = ("off", "step", "layer", "op")
SETTLE = 3
EMULATED_MS = {"layer_forward_ms": 20.0, "embedding_ms": 3.0, "output_ms": 3.0, "optimizer_ms": 20.0}


def resident_mb() -> float:
    """Resident memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1e3


def load_example() -> ModuleType:
    """The training script as a module."""
    specification = importlib.util.spec_from_file_location("pretrain_gpt", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["pretrain_gpt"] = module
    specification.loader.exec_module(module)
    return module


def script_arguments(arguments: argparse.Namespace) -> list[str]:
    """The model that is trained."""
    common = ["--tp", str(arguments.tp), "--pp", str(arguments.pp), "--num-layers", "4", "--steps", "100000"]
    if arguments.gpu:
        size = ["--hidden-size", "4096", "--heads", "32", "--seq-length", "4096", "--bf16"]
        return [*common, *size, "--micro-batch-size", "1", "--global-batch-size", "4"]
    replicas = arguments.ranks // (arguments.tp * arguments.pp)
    return [*common, "--micro-batch-size", "2", "--global-batch-size", str(4 * replicas)]


def stepper(script: ModuleType, words: list[str]) -> Callable[[], None]:
    """Build everything as the script does; the result trains one step."""
    args = script.parse_arguments(words)
    script.dist.init_process_group("nccl" if script.CUDA else "gloo")
    script.parallel_state.initialize_model_parallel(args.tp, args.pp, None)
    script.tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    text = script.load_text(None, args.seq_length + 2)
    model = script.build_model(args, script.transformer_config(args))
    optimizer = script.build_optimizer(args, model)
    state = script.parallel_state
    replica, replicas = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    data = [script.Batches(text, args, replica, replicas)(0)]

    def step() -> None:
        script.train_step(args, model, optimizer, data)

    return step


def attached(condition: str, arguments: argparse.Namespace, folder: str) -> Any:
    """A session for the condition, None where nothing is attached."""
    if condition == "off" and not arguments.emulate:
        return None
    import trimtab

    record = {"enabled": condition != "off", "dir": folder}
    if condition != "off":
        record["granularity"] = condition
    emulate = {"enabled": arguments.emulate, **EMULATED_MS}
    return trimtab.attach(record=record, emulate=emulate, engine={"name": "megatron"})


def worker(arguments: argparse.Namespace) -> None:
    """One rank: run all blocks; rank 0 prints a JSON line."""
    import torch

    if not torch.cuda.is_available():
        from trimtab.engines import cpu

        cpu.install()
    step = stepper(load_example(), script_arguments(arguments))
    barrier = torch.distributed.barrier
    for _ in range(5):
        step()
    times: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    memory: dict[str, float] = {}
    for round_number in range(arguments.rounds):
        shift = round_number % len(CONDITIONS)
        for condition in CONDITIONS[shift:] + CONDITIONS[:shift]:
            with tempfile.TemporaryDirectory() as folder:
                gc.collect()
                before = resident_mb()
                session = attached(condition, arguments, folder)
                for _ in range(SETTLE):
                    step()
                if arguments.gpu:
                    torch.cuda.synchronize()
                barrier()
                begin = time.perf_counter()
                for _ in range(arguments.steps):
                    step()
                if arguments.gpu:
                    torch.cuda.synchronize()
                times[condition].append((time.perf_counter() - begin) / arguments.steps)
                memory[condition] = max(memory.get(condition, 0.0), resident_mb() - before)
                if session is not None:
                    session.detach()
                barrier()
    if torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps({"times": times, "memory": memory}), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Start the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="timed steps a block")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--gpu", action="store_true", help="the model for GPUs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
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
    times, memory = results[0]["times"], results[0]["memory"]
    print("| condition | step time, median | over off, median of rounds | range | memory over before |")
    print("|---|---|---|---|---|")
    for name in CONDITIONS:
        ratios = sorted(100 * (one / off - 1) for one, off in zip(times[name], times["off"], strict=True))
        middle = statistics.median(times[name]) * 1e3
        spread = f"{ratios[0]:+.2f} to {ratios[-1]:+.2f} %"
        print(f"| {name} | {middle:.2f} ms | {statistics.median(ratios):+.2f} % | {spread} | {memory[name]:.0f} MB |")


if __name__ == "__main__":
    main()
