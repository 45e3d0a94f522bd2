"""Dynamic pipeline orders against static ones: real processes and messages, emulated compute and links.

    python benchmarks/pipeline.py --quick      # P=4, m=8, two rounds; about 2 minutes
    python benchmarks/pipeline.py              # P=4, m=8 and 32; at most 15 minutes, on an otherwise idle machine

Every order and policy runs under the same seven conditions. In a round all of them run one iteration with the same
seed, so that they meet the same disturbances, and the order in which they do rotates from round to round. What each
took stands beside what the simulator says of the same case and seed. Prints Markdown; what has been measured is kept
in a file of JSON, and a run that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline_report import report
from pipeline_simulated import CONDITIONS
from pipeline_stages import Case, Stages

from trimtab.engines.emulated_pipeline import TokenChunk
from trimtab.pipeline.execute.executor import Executor
from trimtab.pipeline.memory import MemoryGuard
from trimtab.pipeline.orders import make_plan
from trimtab.pipeline.policies import make_policy
from trimtab.pipeline.simulate import simulate
from trimtab.transport.local import local_transports

STAGES = 4
BLOCKING_MICROBATCHES = 8
"""With more, blocking sends are left out: the goal is for these."""
LASTING = ("slow stage x1.5", "link c=.5", "link c=1")
"""Conditions that a job measures and makes a new plan for; otherwise there is none."""
TRANSIENT = "transient link c=4"
ONSETS = (0.25, 0.21, 0.29, 0.23, 0.27)
"""Shares of the iteration at which a transient begins, by round: an action that just misses it, or does not, makes a
difference of several per cent, which would otherwise be the same accident in all rounds."""


@dataclass(frozen=True)
class Contender:
    """An order and what runs it."""

    name: str
    order: str
    chunks: int
    policy: str = "static"
    blocking: bool = False
    replanned: bool = False
    """The plan is made anew for what is slow for good, as between iterations of a job."""

    @property
    def dynamic(self) -> bool:
        """Decides while it runs."""
        return self.policy != "static"


CONTENDERS = (
    Contender("1f1b, blocking sends", "1f1b", 1, blocking=True),
    Contender("1f1b", "1f1b", 1),
    Contender("interleaved v2", "interleaved", 2),
    Contender("zb-v", "zb-v", 2),
    Contender("hint (zb-v)", "zb-v", 2, "hint"),
    Contender("auto (zb-v)", "zb-v", 2, "auto"),
    Contender("auto, planned anew", "zb-v", 2, "auto", replanned=True),
    Contender("greedy, V", "zb-v", 2, "greedy"),
)


@dataclass
class Row:
    """All that was measured of one contender under one condition."""

    microbatches: int
    extra: int
    """Microbatches of activations that it may hold beside the P of zb-v."""
    condition: str
    contender: str
    seconds: list[float] = field(default_factory=list[float])
    predicted: list[float] = field(default_factory=list[float])
    bound: list[float] = field(default_factory=list[float])
    """The largest load of a stage, as simulated."""
    peak: float = 0.0
    cap: float | None = None
    late: float = 0.0
    """Largest share of an iteration by which emulated actions took longer than they should."""
    overhead: list[float] = field(default_factory=list[float])

    @property
    def key(self) -> str:
        """Of the file."""
        return f"m={self.microbatches} cap=+{self.extra} {self.condition}: {self.contender}"


class Bench:
    """Runs what has not been measured yet, and keeps it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._file: Path = arguments.json
        self._settings = {
            "stages": STAGES,
            "forward_ms": arguments.forward_ms,
            "transport": arguments.transport,
            "conditions": CONDITIONS,
            "onsets": list(ONSETS),
        }
        self._warm: set[str] = set()
        self.rows: dict[str, Row] = {}
        if self._file.exists() and not arguments.fresh:
            kept = json.loads(self._file.read_text())
            if kept["settings"] != self._settings and not arguments.report:
                sys.exit(f"{self._file} is of other settings: --fresh begins anew, --json FILE leaves it alone")
            self.rows = {row.key: row for row in (Row(**one) for one in kept["rows"])}

    def run(self, stages: Stages) -> None:
        """Every condition, contender and round."""
        arguments = self._arguments
        for microbatches, rounds in arguments.sizes:
            for extra in arguments.extras:
                for condition in CONDITIONS:
                    self._condition(stages, microbatches, extra, condition, rounds)

    def _condition(self, stages: Stages, microbatches: int, extra: int, condition: str, rounds: int) -> None:
        contenders = [one for one in CONTENDERS if one.dynamic or not extra]
        contenders = [one for one in contenders if not one.blocking or microbatches <= BLOCKING_MICROBATCHES]
        contenders = [one for one in contenders if not one.replanned or condition in LASTING]
        for number in range(rounds):
            shift = number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                row = Row(microbatches, extra, condition, contender.name)
                row = self.rows.setdefault(row.key, row)
                if len(row.seconds) <= number:
                    self._measure(stages, row, self._case(contender, microbatches, extra, condition, number), number)
        print(f"m={microbatches} cap=+{extra} {condition}: done", file=sys.stderr)

    def _case(self, contender: Contender, microbatches: int, extra: int, condition: str, number: int) -> Case:
        disturb = CONDITIONS[condition]
        if condition == TRANSIENT:
            onset = ONSETS[number % len(ONSETS)]
            disturb = f"{disturb.partition(',')[0]},{onset:g}-{onset + 0.25:g}"
        return Case(
            contender.order,
            contender.policy,
            STAGES,
            contender.chunks,
            microbatches,
            self._arguments.forward_ms / 1e3,
            disturb=disturb,
            cap=STAGES + extra if contender.dynamic else None,
            blocking=contender.blocking,
            replanned=contender.replanned,
        )

    def _measure(self, stages: Stages, row: Row, case: Case, seed: int) -> None:
        if case.policy != "static" and row.key not in self._warm:
            stages.run(case, 1000)  # times of the actions are known from the second iteration on
            self._warm.add(row.key)
        measured = stages.run(case, seed)
        simulated = simulate(
            case.plan, case.make_policy(), case.costs, case.disturbance, case.cap, seed, blocking=case.blocking
        )
        row.seconds.append(measured.seconds)
        row.predicted.append(simulated.makespan)
        row.bound.append(simulated.bound)
        row.peak = max(row.peak, measured.peak)
        row.cap = case.cap
        row.late = max(row.late, measured.late)
        row.overhead.append(measured.overhead)
        self._save()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": self._settings, "rows": [asdict(r) for r in self.rows.values()]}))
        partial.replace(self._file)


def scheduling() -> str:
    """What an action costs beside itself where there are no messages: one stage, actions that take no time."""
    plan = make_plan("zb-v", (1, 2, 64))
    found: list[str] = []
    for name in ("static", "hint", "auto"):
        chunks = [TokenChunk(plan.shape, 0, chunk, 16) for chunk in range(2)]
        executor = Executor(0, chunks, local_transports(1)[0])
        guard = MemoryGuard(plan.peak(), [0.5, 0.5])
        times = [executor.run(plan, make_policy(name), guard=guard).overhead for _ in range(20)]
        found.append(f"{name} {1e6 * statistics.median(times):.0f}")
    return f"- the same without messages (one stage, actions that take no time), us: {', '.join(found)}"


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="m=8 only, two rounds")
    parser.add_argument("--forward-ms", type=float, default=24.0, help="F of a stage; B and W take the same")
    parser.add_argument("--transport", choices=("auto", "ucx", "torch"), default="auto")
    parser.add_argument("--ucx-library", default="", help="path of libucp.so")
    parser.add_argument("--json", type=Path, help="where measurements are kept (default: in build/)")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--report", action="store_true", help="measure nothing: print what the file holds")
    arguments = parser.parse_args()
    arguments.sizes = [(8, 2)] if arguments.quick else [(8, 4), (32, 2)]
    arguments.extras = [0] if arguments.quick else [0, 2]
    arguments.json = arguments.json or Path(f"build/pipeline{'-quick' if arguments.quick else ''}.json")
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    bench = Bench(arguments)
    if not arguments.report:
        with Stages(STAGES, arguments.transport, arguments.ucx_library) as stages:
            bench.run(stages)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(report(list(bench.rows.values()), STAGES))
    print(scheduling())


if __name__ == "__main__":
    main()
