"""Four stages of a Llama-like model on one GPU that they share through MPS: static orders against hint and auto.

``python benchmarks/pipeline_gpu.py --out DIR`` writes ``results.json`` and ``results.md``. Each stage is a process with
a quarter of the GPU; in the second condition one of them gets less, which makes its kernels slower, as a GPU that is
clocked down. All cases run in every round, in an order that rotates. ``--device cpu --tiny`` is for trying it out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mps import multi_process_service
from pipeline_gpu_model import TINY, Sizes

STAGES = 4
SHARE = 25
SLOW_SHARE = 15
SLOW_STAGE = 1
CONDITIONS = {
    "healthy": (SHARE,) * STAGES,
    "one at 15 %": tuple(SLOW_SHARE if s == SLOW_STAGE else SHARE for s in range(STAGES)),
}


@dataclass(frozen=True)
class Case:
    """An order and what leans on it."""

    order: str
    policy: str
    cap: str = ""
    """Microbatches; empty: what the order takes."""

    @property
    def chunks(self) -> int:
        """A stage's."""
        return 1 if self.order == "1f1b" else 2

    def __str__(self) -> str:
        return f"{self.order} {self.policy}" + (f", cap {self.cap}" if self.cap else "")


CASES = (
    Case("1f1b", "static"),
    Case("interleaved", "static"),
    Case("zb-v", "static"),
    Case("zb-v", "hint", "4"),
    Case("zb-v", "auto", "4"),
    Case("zb-v", "hint", "5.5"),
    Case("zb-v", "auto", "5.5"),
)
"""1F1B and ZB-V take 4 microbatches' activations, interleaved 5.5: what deviates gets one or the other."""


@dataclass(frozen=True)
class Arguments:
    """What the stages are told."""

    sizes: Sizes
    device: str
    transport: str
    rounds: int
    seconds: float
    """After so many no further round begins."""
    only: str = ""
    """Cases with this in their names."""
    record: str = ""
    """Directory to record to."""

    @property
    def cases(self) -> tuple[Case, ...]:
        """Those to be run."""
        return tuple(case for case in CASES if self.only in str(case))


def main() -> None:
    """The whole benchmark, or with ``--stage`` one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=220.0, help="for each condition")
    parser.add_argument("--conditions", default=",".join(CONDITIONS))
    parser.add_argument("--microbatches", help="such as 8,16")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--record", default="", help="record to this directory")
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage is not None:
        from pipeline_gpu_stage import run_stage

        told = json.loads(options.told.read_text())
        told["sizes"] = Sizes(**{**told["sizes"], "microbatches": tuple(told["sizes"]["microbatches"])})
        run_stage(options.stage, Arguments(**told), options.told.parent)
        return
    sizes = TINY if options.tiny else Sizes()
    changes: dict[str, Any] = {} if options.layers is None else {"layers": options.layers}
    if options.microbatches:
        changes["microbatches"] = tuple(int(count) for count in options.microbatches.split(","))
    sizes = Sizes(**{**asdict(sizes), **changes})
    arguments = Arguments(
        sizes, options.device, options.transport, options.rounds, options.seconds, options.only, options.record
    )
    text = ""
    results: dict[str, Any] = {"arguments": asdict(arguments), "conditions": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    with multi_process_service(options.device == "cuda") as environment:
        for name in options.conditions.split(","):
            results["conditions"][name] = run_condition(CONDITIONS[name], arguments, environment)
            (options.out / "results.json").write_text(json.dumps(results, indent=1))
            text = as_markdown(results)
            (options.out / "results.md").write_text(text)
    sys.stdout.write(text)


def run_condition(shares: tuple[int, ...], arguments: Arguments, environment: Mapping[str, str]) -> dict[str, Any]:
    """Start the stages and wait for what the first one writes."""
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        told = Path(folder) / "told.json"
        told.write_text(json.dumps(asdict(arguments)))
        processes: list[subprocess.Popen[bytes]] = []
        for stage, share in enumerate(shares):
            own = {
                **os.environ,
                **environment,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share),
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "OMP_NUM_THREADS": "1",
                "RANK": str(stage),
                "WORLD_SIZE": str(len(shares)),
            }
            command = [sys.executable, __file__, "--stage", str(stage), "--told", str(told)]
            processes.append(subprocess.Popen(command, env=own))
        try:
            deadline = time.monotonic() + arguments.seconds + 180
            for process in processes:
                if process.wait(max(deadline - time.monotonic(), 1.0)):
                    raise SystemExit(f"a stage ended with {process.returncode}")
            return json.loads((Path(folder) / "measured.json").read_text())
        finally:
            for process in processes:
                process.kill()
                process.wait()


# ------------------------------------------------------------------------------------------------------------- tables


def as_markdown(results: Mapping[str, Any]) -> str:
    """Tables of everything."""
    out: list[str] = []
    for condition, measured in results["conditions"].items():
        for count, cases in measured["cases"].items():
            out += [f"### {condition}, m = {count}, {measured['rounds']} rounds", ""]
            columns = (
                "case",
                "ms, median",
                "range",
                "over the first",
                "peak, GiB, by stage",
                "deciding, us",
                "beside, us",
                "idle",
            )
            out += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
            first = statistics.median(next(iter(cases.values()))["seconds"])
            out += [_row(name, case, first) for name, case in cases.items()]
            out += ["", _gradients(cases), ""]
    return "\n".join(out) + "\n"


def _row(name: str, case: Mapping[str, Any], first: float) -> str:
    seconds = [1e3 * value for value in case["seconds"]]
    median = statistics.median(seconds)
    peak = " ".join(f"{value / 2**30:.1f}" for value in case["peak"])
    deciding, overhead = (1e6 * statistics.median(case[name]) for name in ("deciding", "overhead"))
    idle = 1 - statistics.median(case["load"]) / (median / 1e3)
    spread = f"{min(seconds):.0f} to {max(seconds):.0f}"
    times = (f"{median:.1f}", spread, f"{median / 1e3 / first - 1:+.1%}")
    cells = (name, *times, peak, f"{deciding:.0f}", f"{overhead:.0f}", f"{idle:.1%}")
    return f"| {' | '.join(cells)} |"


def _gradients(cases: Mapping[str, Any]) -> str:
    """Which cases have the same gradients, bit for bit."""
    groups: dict[str, list[str]] = {}
    for name, case in cases.items():
        groups.setdefault(json.dumps([case["gradients"], case["losses"]], sort_keys=True), []).append(name)
    said = "; ".join(", ".join(names) for names in groups.values())
    return f"Losses and gradients, bitwise equal among each other: {said}."


if __name__ == "__main__":
    main()
