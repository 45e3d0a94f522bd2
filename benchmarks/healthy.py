"""False findings: scan many synthetic healthy runs and count what it raises.

    python benchmarks/healthy.py --runs 10000 --jobs 2

Two layouts at two noise levels, a quarter of the runs each. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from typing import NamedTuple

from trimtab.scan import analyze
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticJob, generate

LAYOUTS = {"TP2 x PP2 x DP2": Topology(tp=2, pp=2, dp=2), "PP4 x DP4": Topology(pp=4, dp=4)}
NOISE = {"2 % / 1 %": (0.02, 0.01), "6 % / 3 %": (0.06, 0.03)}


class Outcome(NamedTuple):
    """One run."""

    layout: str
    noise: str
    findings: tuple[str, ...]
    verdict: str
    smallest: float


def run(task: tuple[str, str, int]) -> Outcome:
    """Scan one healthy job."""
    layout, noise, seed = task
    operation, rank_step = NOISE[noise]
    job = SyntheticJob(
        LAYOUTS[layout], steps=12, op_noise=operation, rank_step_noise=rank_step, ranks_per_host=4, seed=seed
    )
    report = analyze(generate(job)).report
    kinds = tuple(finding.kind.value for finding in report.findings)
    return Outcome(layout, noise, kinds, report.verdict.value, report.smallest_detectable or float("inf"))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    each = arguments.runs // (len(LAYOUTS) * len(NOISE))
    tasks = [(layout, noise, seed) for layout in LAYOUTS for noise in NOISE for seed in range(each)]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        outcomes = pool.map(run, tasks, chunksize=50)
    print("| layout | noise per operation / per rank and step | runs | runs with a finding | kinds | inconclusive |")
    print("|---|---|---|---|---|---|")
    for layout in LAYOUTS:
        for noise in NOISE:
            mine = [one for one in outcomes if (one.layout, one.noise) == (layout, noise)]
            false = [one for one in mine if one.findings]
            kinds = ", ".join(f"{kind} {n}" for kind, n in Counter(k for one in false for k in one.findings).items())
            unsure = sum(one.verdict == "inconclusive" for one in mine)
            print(f"| {layout} | {noise} | {len(mine)} | {len(false)} | {kinds or '-'} | {unsure} |")
    total = sum(bool(one.findings) for one in outcomes)
    print(f"\n{total} of {len(outcomes)} healthy runs raised a finding; {time.perf_counter() - begin:.0f} s.")


if __name__ == "__main__":
    main()
