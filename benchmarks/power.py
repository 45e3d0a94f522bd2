"""Power: how small a fault of each kind is still found, and is it named right?

    python benchmarks/power.py --seeds 40 --jobs 2

Synthetic TP2 x PP2 x DP2 jobs of 12 steps, 4 microbatches, at the noise of benchmarks/healthy.py. A run counts
as found when a finding of the right kind names exactly the faulty ranks. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass

from healthy import NOISE

from trimtab.scan import analyze
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

LAYOUT = Topology(tp=2, pp=2, dp=2)


@dataclass(frozen=True)
class Sweep:
    """A fault in growing sizes."""

    name: str
    unit: str
    finding: str
    ranks: tuple[int, ...]
    sizes: tuple[float, ...]
    fault: Callable[[float], SyntheticFault]


def _slow(size: float) -> SyntheticFault:
    return SyntheticFault("slow_compute", ranks=(3,), factor=size)


def _late(size: float) -> SyntheticFault:
    return SyntheticFault("slow_compute", ranks=(3,), factor=size, steps=(6, None))


def _stage(size: float) -> SyntheticFault:
    return SyntheticFault("slow_stage", stage=1, factor=size)


def _sequence(size: float) -> SyntheticFault:
    return SyntheticFault("long_sequence", dp=1, factor=size, every=3)


def _tp_link(size: float) -> SyntheticFault:
    return SyntheticFault("slow_link", link=(0, 1), ms=size)


def _pp_link(size: float) -> SyntheticFault:
    return SyntheticFault("slow_link", link=(2, 6), ms=size)


def _stall(size: float) -> SyntheticFault:
    return SyntheticFault("host_stall", ranks=(2,), ms=size)


def _pause(size: float) -> SyntheticFault:
    return SyntheticFault("gc_pause", ranks=(1,), ms=size)


def _data(size: float) -> SyntheticFault:
    return SyntheticFault("slow_data", ranks=(0,), ms=size)


FACTORS = (1.02, 1.03, 1.05, 1.08, 1.15, 1.3, 2.0)
MILLISECONDS = (1.0, 2.0, 3.0, 5.0, 8.0, 15.0, 30.0)
SWEEPS = (
    Sweep("slow compute on one rank", "x", "slow_rank", (3,), FACTORS, _slow),
    Sweep("the same from step 6 on", "x", "slow_rank", (3,), FACTORS, _late),
    Sweep("heavier stage", "x", "slow_stage", (4, 5, 6, 7), FACTORS, _stage),
    Sweep("long sequences, every 3rd of one replica", "x", "workload_imbalance", (2, 3, 6, 7), FACTORS, _sequence),
    Sweep("link within a TP group", "ms", "slow_link", (0, 1), (0.05, 0.1, 0.2, 0.3, 0.5, 1, 3), _tp_link),
    Sweep("link between stages", "ms", "slow_link", (2, 6), MILLISECONDS, _pp_link),
    Sweep("host stall", "ms a step", "host_stall", (2,), MILLISECONDS, _stall),
    Sweep("garbage collection", "ms a step", "garbage_collection", (1,), MILLISECONDS, _pause),
    Sweep("slow data loading", "ms a microbatch", "data_loading", (0,), (0.5, 1, 2, 3, 5, 8, 15), _data),
)


def run(task: tuple[int, str, float, int]) -> tuple[bool, int, float]:
    """(found and named right, other findings, cost as a share of the step time)."""
    index, noise, size, seed = task
    sweep = SWEEPS[index]
    operation, rank_step = NOISE[noise]
    job = SyntheticJob(
        LAYOUT, steps=12, op_noise=operation, rank_step_noise=rank_step, seed=seed, faults=(sweep.fault(size),)
    )
    report = analyze(generate(job)).report
    right = [f for f in report.findings if f.kind.value == sweep.finding and f.ranks == sweep.ranks]
    cost = right[0].seconds_lost_per_step / report.step_time_s.actual if right else 0.0
    return bool(right), len(report.findings) - len(right), cost


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for noise in NOISE:
            print(f"\nNoise {noise} (per operation / per rank and step); found and named right, of {len(seeds)}:\n")
            print("| fault | unit | " + " | ".join(["size: found"] * 7) + " | smallest found in all | other findings |")
            print("|---|---|" + "---|" * 9)
            for index, sweep in enumerate(SWEEPS):
                cells, smallest, others = [], "-", 0
                for size in sweep.sizes:
                    got = pool.map(run, [(index, noise, size, seed) for seed in seeds])
                    found = sum(one[0] for one in got)
                    others += sum(one[1] for one in got)
                    cells.append(f"{size:g}: {found}")
                    if found == len(got) and smallest == "-":
                        smallest = f"{size:g} ({sum(one[2] for one in got) / len(got):.1%} of the step)"
                print(f"| {sweep.name} | {sweep.unit} | {' | '.join(cells)} | {smallest} | {others} |", flush=True)


if __name__ == "__main__":
    main()
