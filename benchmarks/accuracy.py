"""Accuracy: precision, recall and rank error of scan over injected faults.

    python benchmarks/accuracy.py --seeds 8 --jobs 2

Synthetic TP2 x PP2 x DP2 jobs, 4 microbatches, at every combination of noise (0, 2, 6 % for each operation; 0, 1, 3 %
for each rank and step), steps (10, 40, 160), effect (1.05 to 2) and number of faults at once (1 to 3); kinds and places
are drawn at random, no two faults on one rank or stage. An effect of x means that the rank (or stage, or microbatch, or
link) takes x - 1 times the step's computation of a rank longer, whatever the kind. What a fault truly costs is the step
time of the same job without noise, with all its faults and without this one. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trimtab.config import ScanConfig
from trimtab.scan import analyze
from trimtab.topology import Topology
from trimtab.traces.synthetic import SyntheticFault, SyntheticJob, generate

LAYOUT = Topology(tp=2, pp=2, dp=2)
MICROBATCHES = 4
OPERATION_NOISE = (0.0, 0.02, 0.06)
RANK_STEP_NOISE = (0.0, 0.01, 0.03)
STEPS = (10, 40, 160)
EFFECTS = (1.05, 1.08, 1.15, 1.3, 2.0)
FAULTS_AT_ONCE = (1, 2, 3)
COMPUTE_MS = MICROBATCHES * 2 * 8.0 * 3 + 10.0
"""A rank's computation in a step of this job: two layers forward and backward for each microbatch, the optimizer."""
LIMIT = ScanConfig().min_share
STAGE_LIMIT = ScanConfig().stage_share


@dataclass(frozen=True)
class Injected:
    """A fault and how scan should name it."""

    fault: SyntheticFault
    kind: str
    ranks: tuple[int, ...]
    cost: float = 0.0
    """Share of the step time."""

    @property
    def counts(self) -> bool:
        """It costs so much that a finding is due by definition."""
        return self.cost > (STAGE_LIMIT if self.kind == "slow_stage" else LIMIT)


Draw = Callable[[float, random.Random], Injected]


def _slow_rank(effect: float, chance: random.Random) -> Injected:
    rank = chance.randrange(LAYOUT.world_size)
    return Injected(SyntheticFault("slow_compute", ranks=(rank,), factor=effect), "slow_rank", (rank,))


def _stage(effect: float, chance: random.Random) -> Injected:
    stage = chance.randrange(LAYOUT.pp)
    ranks = tuple(rank for rank in range(LAYOUT.world_size) if LAYOUT.coordinates(rank).pp == stage)
    return Injected(SyntheticFault("slow_stage", stage=stage, factor=effect), "slow_stage", ranks)


def _sequences(effect: float, chance: random.Random) -> Injected:
    dp, every = chance.randrange(LAYOUT.dp), 2
    ranks = tuple(rank for rank in range(LAYOUT.world_size) if LAYOUT.coordinates(rank).dp == dp)
    factor = 1 + every * (effect - 1)  # every other microbatch: the same work on average
    return Injected(SyntheticFault("long_sequence", dp=dp, factor=factor, every=every), "workload_imbalance", ranks)


def _link(effect: float, chance: random.Random) -> Injected:
    first = chance.randrange(4)
    ms = (effect - 1) * COMPUTE_MS / (2 * MICROBATCHES)  # a message each way for every microbatch
    return Injected(SyntheticFault("slow_link", link=(first, first + 4), ms=ms), "slow_link", (first, first + 4))


def _on_host(fault: str, kind: str, each: int, first: int, count: int) -> Draw:
    def draw(effect: float, chance: random.Random) -> Injected:
        rank = first + chance.randrange(count)
        ms = (effect - 1) * COMPUTE_MS / each
        return Injected(SyntheticFault(fault, ranks=(rank,), ms=ms), kind, (rank,))

    return draw


DRAWS: tuple[Draw, ...] = (
    _slow_rank,
    _stage,
    _sequences,
    _link,
    _on_host("host_stall", "host_stall", 1, 0, 8),
    _on_host("gc_pause", "garbage_collection", 1, 0, 8),
    _on_host("slow_data", "data_loading", MICROBATCHES, 0, 8),
)


@dataclass(frozen=True)
class Cell:
    """What a run is made of."""

    operation: float
    rank_step: float
    steps: int
    effect: float
    at_once: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What scan made of a run."""

    cell: Cell
    due: tuple[str, ...]
    """Kinds of the injected faults that cost enough."""
    found: tuple[str, ...]
    """Those of them that were named, kind and ranks."""
    true_findings: int
    wrong_rank: int
    """Findings of an injected kind with other ranks."""
    false_findings: int
    costs: tuple[tuple[float, bool], ...]
    """Of all injected: share of the step, found."""


def job(cell: Cell, faults: Iterable[Injected], *, noisy: bool) -> SyntheticJob:
    """The job of a cell."""
    return SyntheticJob(
        LAYOUT,
        steps=cell.steps if noisy else 5,
        microbatches=MICROBATCHES,
        op_noise=cell.operation if noisy else 0.0,
        rank_step_noise=cell.rank_step if noisy else 0.0,
        transfer_noise=0.05 if noisy else 0.0,
        faults=tuple(one.fault for one in faults),
        seed=cell.seed,
    )


def step_time(cell: Cell, faults: Sequence[Injected]) -> float:
    """Seconds a step of the job without noise."""
    events = generate(job(cell, faults, noisy=False)).events
    marks = events.filter((events["kind"] == "host") & (events["name"] == "step"))
    return float((marks["end"] - marks["start"]).mean()) / 1e9  # type: ignore[operator, arg-type]


def draw(cell: Cell) -> list[Injected]:
    """Faults of a cell that share no rank, with what each costs."""
    chance = random.Random(repr(cell))
    chosen: list[Injected] = []
    while len(chosen) < cell.at_once:
        one = chance.choice(DRAWS)(cell.effect, chance)
        if not any(set(one.ranks) & set(other.ranks) for other in chosen):
            chosen.append(one)
        elif not set(range(LAYOUT.world_size)) - {rank for other in chosen for rank in other.ranks}:
            chosen.clear()  # nobody is left for another one
    whole = step_time(cell, chosen)
    return [
        Injected(one.fault, one.kind, one.ranks, 1 - step_time(cell, [o for o in chosen if o is not one]) / whole)
        for one in chosen
    ]


def run(cell: Cell) -> Outcome:
    """Scan one job and compare with the truth."""
    injected = draw(cell)
    findings = [
        (f.kind.value, tuple(sorted(f.ranks)))
        for f in analyze(generate(job(cell, injected, noisy=True))).report.findings
    ]
    truth = {(one.kind, tuple(sorted(one.ranks))) for one in injected}
    kinds = {one.kind for one in injected}
    named = [(one, (one.kind, tuple(sorted(one.ranks))) in findings) for one in injected]
    return Outcome(
        cell,
        due=tuple(one.kind for one in injected if one.counts),
        found=tuple(one.kind for one, yes in named if one.counts and yes),
        true_findings=sum(finding in truth for finding in findings),
        wrong_rank=sum(finding not in truth and finding[0] in kinds for finding in findings),
        false_findings=sum(finding not in truth and finding[0] not in kinds for finding in findings),
        costs=tuple((one.cost, yes) for one, yes in named),
    )


def table(title: str, key: Callable[[Outcome], object], outcomes: Sequence[Outcome]) -> None:
    """One row for each value of ``key``."""
    print(
        f"\n| {title} | runs | faults that count | recall | findings | precision | wrong rank | smallest always found |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for value in sorted({key(one) for one in outcomes}, key=lambda v: (str(type(v)), v)):  # type: ignore[arg-type, return-value]
        mine = [one for one in outcomes if key(one) == value]
        due, found = sum(len(one.due) for one in mine), sum(len(one.found) for one in mine)
        right = sum(one.true_findings for one in mine)
        wrong, false = sum(one.wrong_rank for one in mine), sum(one.false_findings for one in mine)
        findings = right + wrong + false
        missed = max((cost for one in mine for cost, yes in one.costs if not yes), default=0.0)
        print(
            f"| {value} | {len(mine)} | {due} | {_share(found, due)} | {findings} | {_share(right, findings)} | "
            f"{_share(wrong, findings)} | above {missed:.1%} of the step |"
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def kinds(outcomes: Sequence[Outcome]) -> None:
    """Recall of each kind, by effect."""
    print("\n| kind | " + " | ".join(f"x{effect:g}" for effect in EFFECTS) + " |")
    print("|---|" + "---|" * len(EFFECTS))
    names = sorted({kind for one in outcomes for kind in one.due})
    for name in names:
        cells = []
        for effect in EFFECTS:
            mine = [one for one in outcomes if one.cell.effect == effect]
            due, found = (
                Counter(k for one in mine for k in one.due)[name],
                Counter(k for one in mine for k in one.found)[name],
            )
            cells.append(f"{found}/{due}")
        print(f"| {name} | {' | '.join(cells)} |")


def _layout(one: Outcome) -> str:
    del one
    return "TP2 x PP2 x DP2"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8, help="of each combination; a quarter of it at 160 steps")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    cells = [
        Cell(*combination, seed)
        for combination in itertools.product(OPERATION_NOISE, RANK_STEP_NOISE, STEPS, EFFECTS, FAULTS_AT_ONCE)
        for seed in range(arguments.seeds if combination[2] < STEPS[-1] else max(1, arguments.seeds // 4))
    ]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        outcomes = pool.map(run, cells, chunksize=8)
    print(f"{len(outcomes)} runs, {time.perf_counter() - begin:.0f} s")
    table("layout", _layout, outcomes)
    table("effect", lambda one: one.cell.effect, outcomes)
    table(
        "noise (operation / rank and step)",
        lambda one: f"{one.cell.operation:.0%} / {one.cell.rank_step:.0%}",
        outcomes,
    )
    table("steps", lambda one: one.cell.steps, outcomes)
    table("faults at once", lambda one: one.cell.at_once, outcomes)
    kinds(outcomes)


if __name__ == "__main__":
    main()
