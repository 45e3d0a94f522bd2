"""Simulated schedules: every order and policy under the same disturbances, links they bear, and windows they leave.

    python benchmarks/pipeline_simulated.py [ratios] [c-max] [windows] [speed]

Times are simulated, so that neither the machine nor its load matters but for ``speed``. F = B = W = 1 a stage; a
message occupies its link for 0.05 F. Slow stages and links are the middle ones, as in `trimtab simulate`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from trimtab.pipeline.costs import Costs
from trimtab.pipeline.orders import ORDERS, default_chunks, make_plan
from trimtab.pipeline.plan import Plan
from trimtab.pipeline.policies import POLICIES, make_policy
from trimtab.pipeline.simulate import Result, parse, simulate
from trimtab.pipeline.simulate.portfolio import measured, replan, replanner
from trimtab.pipeline.simulate.study import c_max

TRANSFER = 0.05
CONDITIONS = {
    "plain": "",
    "slow stage x1.5": "slow-stage=1.5",
    "link c=.5": "link=0.5",
    "link c=1": "link=1.0",
    "jitter 20 %": "jitter=0.2",
    "5 % tail x3": "tail=0.05x3",
    "transient link c=4": "transient=link:4,0.25-0.5",
}
SEEDS = range(5)
"""Of the random conditions the mean over these is shown."""
SIZES = ((8, 32), (4, 8), (4, 32))


@dataclass(frozen=True)
class Case:
    """An order under a policy, at a cap: what the plan needs, and ``spare`` microbatches; None: without one."""

    order: str
    policy: str
    chunks: int
    spare: float | None = 0.0
    blocking: bool = False
    replan: bool = False
    """Follows a plan made anew for what lasts: slow stages and links."""

    def __str__(self) -> str:
        name = self.order + (f" v{self.chunks}" if ORDERS[self.order].fixed_chunks is None else "")
        name += ", blocking sends" if self.blocking else ""
        if self.policy == "static":
            return name
        cap = "no cap" if self.spare is None else f"+{self.spare:g}" if self.spare else "same memory"
        return f"{name}, {self.policy}{' re-planned' if self.replan else ''}, {cap}"

    def cap(self, plan: Plan) -> float | None:
        """The most a stage may hold."""
        return None if self.spare is None else plan.peak() + self.spare


def cases() -> Iterator[Case]:
    """Rows of the table."""
    yield Case("1f1b", "static", 1, blocking=True)
    for order in ORDERS:
        for chunks in (2, 4) if order in ("interleaved", "bfc", "dfc") else (default_chunks(order),):
            yield Case(order, "static", chunks)
    for order in ("interleaved", "zb-v", "dualpipe-v"):
        for policy in ("hint", "auto"):
            for spare in (0.0, 0.5, 2.0):
                yield Case(order, policy, 2, spare)
    for spare in (0.0, 0.5, 2.0):
        yield Case("zb-v", "auto", 2, spare, replan=True)
    for order in ("1f1b", "zb-h1"):
        for policy in ("hint", "auto"):
            yield Case(order, policy, 1, 0.0)
    for spare in (0.0, 0.5, 2.0, 3.5, None):
        yield Case("zb-v", "greedy", 2, spare)


@cache
def planned(order: str, stages: int, chunks: int, microbatches: int) -> tuple[Plan, Costs]:
    """A plan, and costs that it was made for."""
    probe = make_plan("interleaved" if ORDERS[order].fixed_chunks is None else order, (stages, chunks, microbatches))
    costs = Costs.uniform(probe.shape, transfer=TRANSFER)
    return make_plan(order, (stages, chunks, microbatches), costs), costs


def run(case: Case, stages: int, microbatches: int, disturb: str = "", seed: int = 0) -> Result:
    """One simulation."""
    plan, costs = planned(case.order, stages, case.chunks, microbatches)
    disturbance = parse([disturb] if disturb else [], stages)
    cap = case.cap(plan)
    if case.replan:
        plan = replanned(case, stages, microbatches, "" if disturb.startswith(("jitter", "tail", "trans")) else disturb)
    return simulate(plan, make_policy(case.policy), costs, disturbance, cap, seed, blocking=case.blocking)


@cache
def replanned(case: Case, stages: int, microbatches: int, lasting: str) -> Plan:
    """The plan of a case, made anew for what lasts."""
    plan, costs = planned(case.order, stages, case.chunks, microbatches)
    costs, links = measured(costs, parse([lasting] if lasting else [], stages), plan.shape)
    return replan(plan, costs, case.cap(plan), links, make_policy(case.policy)).plan


def ratios(sizes: Sequence[tuple[int, int]]) -> None:
    """Makespan over the bound."""
    for stages, microbatches in sizes:
        print(f"\n### P={stages}, m={microbatches}\n")
        print("| " + " | ".join(("", *CONDITIONS, "peak")) + " |")
        print("|" + "---|" * (len(CONDITIONS) + 2))
        for case in cases():
            cells, peak = [], 0.0
            for disturb in CONDITIONS.values():
                drawn = disturb.startswith(("jitter", "tail"))
                results = [run(case, stages, microbatches, disturb, seed) for seed in (SEEDS if drawn else (0,))]
                cells.append(f"{statistics.mean(result.ratio for result in results):.3f}")
                peak = max(peak, *(max(result.peak_activation) for result in results))
            print(f"| {case} | " + " | ".join(cells) + f" | {peak:g} |", flush=True)


def largest_transfers(sizes: Sequence[tuple[int, int]]) -> None:
    """c_max, each case compared with itself without transfer time, and at the iteration time of interleaved."""
    for stages, microbatches in sizes:
        print(f"\n### c_max: P={stages}, m={microbatches}\n")
        print("| | cap | c_max (F) | over interleaved v2 | at interleaved's time (F) | over interleaved v2 |")
        print("|---|---|---|---|---|---|")
        cap = planned("interleaved", stages, 2, microbatches)[0].peak()
        limit = 0.0
        base = 0.0
        for case in c_max_cases(stages, microbatches, cap):
            plan, costs = planned(case.order, stages, case.chunks, microbatches)
            policy = make_policy(case.policy)
            source = replanner(plan, case.cap(plan), policy) if case.replan else plan
            found = c_max(source, policy, costs, case.cap(plan))
            limit = limit or 1.05 * simulate(plan, policy, replace(costs, transfer=0.0), cap=case.cap(plan)).makespan
            same_time = largest_within(limit, case, source, costs, case.cap(plan))
            base = base or found
            print(
                f"| {case} | {case.cap(plan):g} | {found:.3f} | {found / base:.2f} | {same_time:.3f} | "
                f"{same_time / base:.2f} |",
                flush=True,
            )


def c_max_cases(stages: int, microbatches: int, cap: float) -> Iterator[Case]:
    """Rows of the table; interleaved first."""

    def spare(order: str, chunks: int = 2) -> float:
        return cap - planned(order, stages, chunks, microbatches)[0].peak()

    for order in ("interleaved", "1f1b", "bfc", "zb-v", "dualpipe-v"):
        yield Case(order, "static", default_chunks(order))
    for policy in ("hint", "auto"):
        yield Case("zb-v", policy, 2, 0.0)
        yield Case("zb-v", policy, 2, spare("zb-v"))
    yield Case("zb-v", "greedy", 2, spare("zb-v"))
    yield Case("zb-v", "auto", 2, 0.0, replan=True)
    yield Case("zb-v", "auto", 2, spare("zb-v"), replan=True)


def largest_within(
    limit: float, case: Case, source: Plan | Callable[[Costs], Plan], costs: Costs, cap: float | None
) -> float:
    """The largest transfer time with which an iteration ends in time, to 1 %."""
    low, high = 0.0, 1.0
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        moved = replace(costs, transfer=middle)
        plan = source if isinstance(source, Plan) else source(moved)
        fits = simulate(plan, make_policy(case.policy), moved, cap=cap).makespan <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def windows(shapes: Sequence[tuple[int, int, int]]) -> None:
    """Windows of breadth-first orders against interleaved ones."""
    print("\n### Windows: bfc over interleaved, static\n")
    print("| P | V | m | iteration | PP mean | DP mean | peak |\n|" + "---|" * 7)
    for stages, chunks, microbatches in shapes:
        base = run(Case("interleaved", "static", chunks), stages, microbatches)
        wide = run(Case("bfc", "static", chunks), stages, microbatches)
        print(
            f"| {stages} | {chunks} | {microbatches} | {wide.makespan / base.makespan:.3f} | "
            f"{wide.windows.pp / base.windows.pp:.2f} | {wide.windows.dp / base.windows.dp:.2f} | "
            f"{max(wide.peak_activation):g} / {max(base.peak_activation):g} |",
            flush=True,
        )


def speed() -> None:
    """Actions simulated a second of CPU time, the best of five."""
    print("\n### Speed\n\n| policy | actions | actions a second |\n|---|---|---|")
    plan, costs = planned("interleaved", 8, 4, 128)
    for policy in POLICIES:
        best = 0.0
        for _ in range(5):
            begin = time.process_time()
            result = simulate(plan, make_policy(policy), costs, cap=plan.peak() + 1)
            best = max(best, result.actions / (time.process_time() - begin))
        print(f"| {policy} | {result.actions} | {best:,.0f} |", flush=True)


def main() -> None:
    """Print what was asked for; all without arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["ratios", "c-max", "windows", "speed", []], default=[])
    parts = parser.parse_args().parts or ["ratios", "c-max", "windows", "speed"]
    if "ratios" in parts:
        ratios(SIZES)
    if "c-max" in parts:
        largest_transfers(SIZES)
    if "windows" in parts:
        windows([(p, v, m) for p in (4, 8) for v in (2, 4, 8) for m in (p, 2 * p, 4 * p, 8 * p)])
    if "speed" in parts:
        speed()


if __name__ == "__main__":
    main()
