"""The demo: train a small GPT on this machine, slow one rank from the middle of the run on, and let scan find it.

Below two GPUs the ranks are CPU processes on *emulated devices*: their arithmetic is real, and each layer's
compute is padded to a set duration, because eight processes on a few cores have no useful times of their own.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trimtab.localjob import RankError, run_ranks
from trimtab.record.injection.faults import parse_fault
from trimtab.scope.server import visiting
from trimtab.topology import Topology

MARKER: Final = ".trimtab-demo"
"""A file that says that a directory is a demo's and may be replaced."""

_OURS: Final = ("run", "demo.toml", "training.log", "scope.log", "report.html", "report.json", "trace.perfetto-trace")
_LEAST_STEPS: Final = 6
_MOST_EMULATED_RANKS: Final = 32
"""Half a gigabyte each, and more of them than cores by far: beyond this a machine chokes instead of training."""
_LAYERS_A_STAGE: Final = 2
_GPU_MODEL: Final = {"--hidden-size": 2048, "--heads": 16, "--seq-length": 2048}
"""Large enough that a GPU, and not its host, sets the pace."""
_MICROBATCHES: Final = 2
_MICRO_BATCH: Final = 2
_TAIL_LINES: Final = 12
_EMULATED_MS: Final = {"layer_forward_ms": 20.0, "embedding_ms": 3.0, "output_ms": 3.0, "optimizer_ms": 20.0}
"""Long enough that eight processes on two cores finish their arithmetic in time; both stages have the same to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose."""

    out: Path = Path("trimtab-demo")
    fault: str | None = None
    """``kind:key=value,...``; ``none`` for a healthy run; None: the default."""
    steps: int = 20
    data: Path | None = None
    layout: str | None = None
    """For example ``tp2,pp2,dp2``; None: by the number of devices."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be run."""

    topology: Topology
    emulated: bool
    steps: int
    fault: str | None
    """Complete, with its steps; None for a healthy run."""
    config: str
    """Text of the configuration file."""
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)


def plan(options: Options, gpus: int, environment: Mapping[str, str]) -> Plan:
    """Decide the layout, the fault and the command. Raises ValueError where the options do not fit each other."""
    emulated = gpus < 2
    topology = _parse_layout(options.layout) if options.layout else _default_layout(8 if emulated else gpus)
    world = topology.world_size
    if not emulated and world > gpus:
        raise ValueError(f"--layout {options.layout} needs {world} GPUs, and there are {gpus}; choose a smaller one")
    if emulated and world > _MOST_EMULATED_RANKS:
        raise ValueError(
            f"--layout {options.layout} is {world} processes on this machine; emulate at most {_MOST_EMULATED_RANKS}"
        )
    if options.steps < _LEAST_STEPS:
        raise ValueError(f"--steps {options.steps} is too few to judge; give at least {_LEAST_STEPS}")
    if options.data is not None and not options.data.exists():
        raise ValueError(f"--data {options.data}: no such file")
    fault = _complete_fault(options.fault, topology, options.steps)
    out = options.out.absolute()
    config = _config_text(out / "run", emulated, fault)
    command = (
        *(sys.executable, "-m", "trimtab", "run", "--config", str(out / "demo.toml")),
        str(example_script()),
        *_script_arguments(topology, options, emulated),
    )
    return Plan(topology, emulated, options.steps, fault, config, command, _environment(environment, emulated))


def _parse_layout(text: str) -> Topology:
    sizes: dict[str, int] = {}
    for part in filter(None, re.split(r"[,x\s]+", text.strip().lower())):
        match = re.fullmatch(r"(tp|pp|dp|vpp)=?(\d+)", part)
        if match is None or match[1] in sizes:
            raise ValueError(f"--layout {text!r}: expected sizes of tp, pp, vpp and dp, for example tp2,pp2,dp2")
        sizes[match[1]] = int(match[2])
    return Topology(**sizes)


def _default_layout(devices: int) -> Topology:
    if devices >= 8:
        return Topology(tp=2, dp=2, pp=2)
    return Topology(tp=2, dp=2) if devices >= 4 else Topology(dp=2)


def _complete_fault(fault: str | None, topology: Topology, steps: int) -> str | None:
    """The fault with the steps that it lacks: from the middle of the run on."""
    if fault is None:
        fault = f"slow_compute:rank={min(3, topology.world_size - 1)},factor=1.5"
    fault = fault.strip()
    if fault in ("", "none"):
        return None
    if "steps=" not in fault:
        fault += f"{',' if ':' in fault else ':'}steps={steps // 2}-"
    parsed = parse_fault(fault)
    if parsed is None:
        return None
    for name, value, size in (
        ("rank", max(parsed.ranks, default=-1), topology.world_size),
        ("stage", parsed.stage, topology.pp),
        ("dp", parsed.dp, topology.dp),
    ):
        if value >= size:
            raise ValueError(f"--fault {fault}: {name} {value} is not in this job, which counts from 0 to {size - 1}")
    return fault


def _config_text(run_dir: Path, emulated: bool, fault: str | None) -> str:
    quoted = json.dumps  # a JSON string is a TOML string, too
    lines = [
        "# Written by trimtab demo.",
        "[record]",
        f"dir = {quoted(str(run_dir))}",
        'run_id = "demo"',
        "",
        "[scope]",
        "look_seconds = 0.1  # the run is short",
        "budget = 0.1  # and so are its steps",
        "",
        "[engine]",
        'name = "megatron"',
    ]
    if emulated:
        lines += ["cpu_shim = true", "", "[emulate]", "enabled = true"]
        lines += [f"{name} = {milliseconds}" for name, milliseconds in _EMULATED_MS.items()]
    if fault:
        lines += ["", "[faults]", f"inject = [{quoted(fault)}]"]
    return "\n".join(lines) + "\n"


def _script_arguments(topology: Topology, options: Options, emulated: bool) -> list[str]:
    arguments: dict[str, int | str] = {
        **({} if emulated else _GPU_MODEL),
        "--tp": topology.tp,
        "--pp": topology.pp,
        "--vpp": topology.vpp,
        "--num-layers": _LAYERS_A_STAGE * topology.pp * topology.vpp,
        "--micro-batch-size": _MICRO_BATCH,
        "--global-batch-size": _MICRO_BATCH * _MICROBATCHES * topology.dp,
        "--steps": options.steps,
    }
    if options.data is not None:
        arguments["--data"] = str(options.data.absolute())
    words = [str(word) for pair in arguments.items() for word in pair]
    return words if emulated else [*words, "--bf16"]


def _environment(environment: Mapping[str, str], emulated: bool) -> dict[str, str]:
    """The ranks' environment: one thread each, this machine only, and no settings of ours that leak in."""
    kept = {name: value for name, value in environment.items() if not name.startswith("TRIMTAB_")}
    kept["OMP_NUM_THREADS"] = "1"
    if emulated:
        kept["CUDA_VISIBLE_DEVICES"] = ""
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return kept


def example_script() -> Path:
    """The training script that the demo runs: from the wheel, or from the repository in an editable installation."""
    here = Path(__file__).resolve().parent
    for script in (here / "_examples" / "pretrain_gpt.py", here.parents[1] / "examples" / "pretrain_gpt.py"):
        if script.is_file():
            return script
    raise ValueError(f"{here}: the demo's training script is missing; install trimtab again")


def count_gpus() -> int:
    """CUDA devices that torch can use. Asked in a process of its own, which is spared where there is no driver."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return 0
    script = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        return int(asked.stdout)
    except (ValueError, subprocess.TimeoutExpired):
        return 0


def check_installed() -> None:
    """Raises ModuleNotFoundError for what the training needs and is not there, before anything is written."""
    for module in ("torch", "megatron"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def prepare(out: Path) -> None:
    """Make the demo's directory; an earlier demo's results in it are removed, and nothing else ever is.

    Raises ValueError where the directory holds something and no demo made it.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: is a file; choose another directory with --out")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise ValueError(f"{out}: holds files that no demo made; choose another directory with --out")
    visiting.close(out / "run")
    for name in _OURS:
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text("trimtab demo wrote this directory and may replace what it wrote.\n", encoding="utf-8")


def train(planned: Plan, out: Path, talk: Callable[[str], None]) -> None:
    """Run the training; its progress goes to ``talk``, all of its output to ``training.log``.

    Raises ValueError with the last lines of a rank that failed.
    """
    (out / "demo.toml").write_text(planned.config, encoding="utf-8")
    log_path = out / "training.log"
    last: dict[int, list[str]] = {}
    with log_path.open("w", encoding="utf-8") as log:

        def on_line(rank: int, line: str) -> None:
            log.write(f"[rank {rank}] {line}\n")
            last[rank] = [*last.get(rank, []), line][-_TAIL_LINES:]
            if line.startswith("step "):
                talk(f"  {line}")

        try:
            run_ranks(planned.command, planned.topology.world_size, planned.environment, on_line)
        except RankError as error:
            shown = "\n".join(f"  {line}" for line in last.get(error.rank, []))
            raise ValueError(f"the training failed: {error}; all output is in {log_path}\n{shown}") from None


def introduction(planned: Plan) -> list[str]:
    """What will happen, told before it does."""
    sizes = (("TP", planned.topology.tp), ("PP", planned.topology.pp), ("DP", planned.topology.dp))
    layout = " x ".join(f"{name}{size}" for name, size in sizes)
    ranks = planned.topology.world_size
    lines = [f"Training a small GPT with Megatron-Core on {ranks} ranks ({layout}), {planned.steps} steps."]
    if planned.emulated:
        lines += [
            "The devices are emulated: each rank is a CPU process that computes for real, and each layer's time is",
            "padded to what a device would take. Losses are real, times are not this machine's.",
        ]
    else:
        lines.append("One GPU a rank, over NCCL.")
    lines.append(f"Injected fault: {planned.fault}" if planned.fault else "No fault is injected.")
    lines.append("Starting the processes; the first step takes a while to appear.")
    return lines
