"""trimtab on several GPUs of one host, over NCCL: all benchmarks of one kind of machine in one call, or each alone.

    python benchmarks/multi_gpu.py --out DIR                          # all parts, on all GPUs, in under 9 minutes
    python benchmarks/multi_gpu.py --parts recorder,scope --out DIR   # some of them
    python benchmarks/multi_gpu.py --device cpu --tiny --out DIR      # does it run? two processes over gloo

| part | what |
|---|---|
| ``recorder`` | losses with trimtab and without; what recording costs at ``step``, ``layer`` and ``op`` |
| ``faults`` | injected faults, a GPU shared through MPS: verdicts of scan, alarms of watch, against the truth |
| ``pipeline`` | dynamic orders against static ones; UCX against NCCL |
| ``fbd`` | forward and backward on different devices |
| ``scope`` | what 100 taps cost |

Each part is a script of its own, ``multi_gpu_<part>.py``, in a process of its own that is ended when its time is up;
what went wrong is printed whole, and the next part begins. ``DIR/tables.md`` has all tables, ``DIR/<part>.json`` and
``DIR/<part>.log`` what they were made of, ``DIR/traces`` small traces.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from multi_gpu_part import BENCHMARKS, SOURCE, markdown, nvidia_smi

PARTS = {"recorder": 100.0, "faults": 130.0, "pipeline": 110.0, "fbd": 100.0, "scope": 65.0}
"""Seconds after which a part begins nothing new."""
LATE = 20.0
"""Seconds after that in which a part has to end."""
USUALLY_LATE = 5.0
"""What is kept back of them for each part that is to come."""
TOTAL = 515.0
"""Seconds of all parts together. What one takes more than its own, those after it have less."""
PACKAGES = ("torch", "megatron-core", "numpy", "pyarrow", "polars", "nvidia-nccl-cu13", "libucx-cu13")


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=0, help="processes; default: all GPUs, 2 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--only", default="", help="pieces of the parts, comma-separated")
    parser.add_argument("--seconds", default="", help="of single parts, as in recorder=60,scope=40")
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds of all parts together")
    parser.add_argument("--out", type=Path, default=Path("multi-gpu"))
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"--parts: no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    return arguments


def machine() -> str:
    """Where this is, in a line."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    gpus = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader")
    where = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    return f"{where}; {os.cpu_count()} CPUs; Python {platform.python_version()}; {', '.join(found)}"


def run_part(name: str, seconds: float, late: float, arguments: argparse.Namespace) -> str:
    """The part's process, to its end or to that of its time; how it ended, empty if well."""
    command = [sys.executable, str(BENCHMARKS / f"multi_gpu_{name}.py"), "--device", arguments.device]
    command += ["--gpus", str(arguments.gpus), "--seconds", str(seconds), "--out", str(arguments.out)]
    command += ["--tiny"] if arguments.tiny else []
    command += ["--only", arguments.only] if arguments.only else []
    path = os.pathsep.join([str(SOURCE), str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with (arguments.out / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(seconds + late)
            return f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            return f"was not done {late:.0f} s after its time, and was ended"
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """With what it started; ranks are sessions of their own, which the part ends when it is asked to end."""
    for kind, grace in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        if child.poll() is not None:
            return
        child.send_signal(kind)
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            continue


def as_markdown(results: list[dict[str, Any]]) -> str:
    """All tables, notes and failures."""
    parts: list[str] = []
    for result in results:
        parts.append(f"## {result['part']}, {result['seconds']:.0f} s\n")
        parts += [markdown(table) for table in result["tables"]]
        parts += [f"- {note}" for note in result["notes"]]
        parts += [f"- **failed**: {failure.splitlines()[0]}" for failure in result["failures"]]
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Part by part."""
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds = PARTS | {name: float(value) for name, _, value in _pairs(arguments.seconds)}
    head = f"# multi_gpu.py, {time.strftime('%Y-%m-%d')}\n\n{machine()}\n"
    print(head, flush=True)
    results: list[dict[str, Any]] = []
    names, end = arguments.parts.split(","), time.monotonic() + arguments.total
    for place, name in enumerate(names):
        began = time.monotonic()
        share, late = shares([seconds[one] for one in names[place:]], end - began)
        found = arguments.out / f"{name}.json"
        found.unlink(missing_ok=True)
        problem = run_part(name, share, late, arguments)
        empty: dict[str, Any] = {"part": name, "tables": [], "notes": [], "failures": []}
        result = empty | (json.loads(found.read_text()) if found.exists() else {})
        if problem or not found.exists():
            said = (arguments.out / f"{name}.log").read_text(errors="replace")[-4000:]
            result["failures"].append(f"the part {problem or 'left no result'}\n{said}")
        result["seconds"] = time.monotonic() - began
        results.append(result)
        print(as_markdown([result]), flush=True)
        for failure in result["failures"]:
            print(f"FAILED {name}: {failure}\n", flush=True)
        (arguments.out / "tables.md").write_text(head + "\n" + as_markdown(results))


def shares(wanted: Sequence[float], left: float) -> tuple[float, float]:
    """Seconds of the first of the parts to come, and how much later it has to end; ``left`` is for all of them."""
    kept = LATE + USUALLY_LATE * (len(wanted) - 1)
    shortened = min(1.0, max(left - kept, 0.0) / sum(wanted))
    return wanted[0] * shortened, min(LATE, max(left - wanted[0] * shortened, 0.0))


def _pairs(text: str) -> list[tuple[str, str, str]]:
    return [word.partition("=") for word in text.split(",") if word]


if __name__ == "__main__":
    main()
