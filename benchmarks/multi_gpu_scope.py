"""Part 5 of multi_gpu.py: what looking at 100 taps costs a Megatron-Core job, under TP and under PP.

Statistics of 100 taps of a GPT of 1.3 B parameters, at every step and at every tenth; beside it a job with trimtab and
nobody there, and one without trimtab. Blocks of steps of one model, conditions in an order that rotates; the collector
is in another process. The budget is lifted, so that nothing pauses; at the end it is that of the default settings.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from multi_gpu_model import (
    BILLION,
    ENVIRONMENT,
    TINY,
    Layout,
    Sizes,
    Training,
    agreed,
    build,
    parallel,
    start,
)
from multi_gpu_part import Options, Report, part_or_rank, tell
from multi_gpu_scope_collector import Collecting, Seen

CONDITIONS = ("off", "idle", "every 10", "every 1")
BUDGET = "budget"
STEPS = 10
SETTLE = 2
DEFAULT_BUDGET = 0.01
BUDGET_STEPS = 20
MOST_ROUNDS = 12


class Attached:
    """This rank's session, which stays from block to block."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._session: Any = None
        self._budget = 0.0

    def be(self, attached: bool, budget: float = 1.0) -> None:
        """Attached with this budget, or not at all."""
        import trimtab

        if self._session is not None and (not attached or budget != self._budget):
            self._session.detach()
            self._session = None
        if attached and self._session is None:
            self._budget = budget
            self._session = trimtab.attach(
                record={"enabled": False, "dir": self._folder},
                scope={"look_seconds": 0.2, "budget": budget},
                engine={"name": "megatron"},
            )


class Wishes:
    """What this job asks of the collector's process, and hears of it: by files, steps going on meanwhile."""

    def __init__(self, folder: Path, cuda: bool) -> None:
        import torch.distributed as dist

        self.layout = ""
        self._folder = folder
        self._cuda = cuda
        self._speaks = dist.get_rank() == 0
        self._number = 0

    def make(self, condition: str, training: Training) -> None:
        """Train until the collector has done its part."""
        number = self._number = self._number + 1
        if self._speaks:
            beside = self._folder / f"beside-{number}"
            beside.write_text(json.dumps([self.layout, condition]))
            beside.rename(self._folder / f"want-{number}")
        while not agreed((self._folder / f"ready-{number}").exists(), self._cuda):
            training.step()


def block(condition: str, training: Training, wishes: Wishes, attached: Attached, cuda: bool) -> list[float]:
    """Seconds of each step."""
    if condition == "off":  # the collector goes before the ranks do
        wishes.make(condition, training)
        attached.be(False)
    else:
        attached.be(True)
        wishes.make(condition, training)
    return training.seconds(SETTLE, STEPS, cuda)


def worker(plan: dict[str, Any]) -> None:
    """One rank, all layouts."""
    import torch.distributed as dist

    cuda, deadline = plan["cuda"], time.monotonic() + plan["seconds"]
    start(cuda)
    wishes = Wishes(Path(plan["folder"]), cuda)
    chosen = [one for one in layouts(dist.get_world_size()) if one.name(dist.get_world_size()) in plan["names"]]
    out: dict[str, dict[str, list[list[float]]]] = {}
    for number, layout in enumerate(chosen):
        limit = time.monotonic() + max(deadline - time.monotonic(), 0.0) / (len(chosen) - number)
        wishes.layout = name = layout.name(dist.get_world_size())
        attached = Attached(str(Path(plan["folder"], name)))
        with parallel(layout) as script:
            training = build(script, layout, _size_of(layout, plan))
            for _ in range(SETTLE):
                training.step()
            out[name] = _rounds(training, wishes, attached, limit, cuda)
            tell(out)
            _with_the_budget(training, wishes, attached)
    tell(out)
    dist.destroy_process_group()


def _size_of(layout: Layout, plan: dict[str, Any]) -> Sizes:
    """Without pipeline stages one microbatch, so that steps are of one length about."""
    if plan["tiny"]:
        return TINY
    return BILLION if layout.pp > 1 else replace(BILLION, microbatches=1)


def _rounds(
    training: Training, wishes: Wishes, attached: Attached, limit: float, cuda: bool
) -> dict[str, list[list[float]]]:
    blocks: dict[str, list[list[float]]] = {name: [] for name in CONDITIONS}
    block(CONDITIONS[-1], training, wishes, attached, cuda)  # not counted: kernels are compiled
    longest = 0.0
    for turn in range(MOST_ROUNDS):
        began = time.monotonic()
        if turn and not agreed(began + longest < limit, cuda):
            break
        shift = turn % len(CONDITIONS)
        for condition in CONDITIONS[shift:] + CONDITIONS[:shift]:
            blocks[condition].append(block(condition, training, wishes, attached, cuda))
        longest = max(longest, time.monotonic() - began)
    return blocks


def _with_the_budget(training: Training, wishes: Wishes, attached: Attached) -> None:
    """As somebody has it who sets nothing."""
    wishes.make("off", training)
    attached.be(True, budget=DEFAULT_BUDGET)
    wishes.make(BUDGET, training)
    for _ in range(BUDGET_STEPS):
        training.step()
    wishes.make("off", training)
    attached.be(False)


def layouts(world: int) -> list[Layout]:
    """TP over all ranks, and PP over all."""
    return [Layout(tp=world), Layout(pp=world)] if world > 1 else [Layout()]


def rows_of(name: str, blocks: dict[str, list[list[float]]], seen: Seen) -> list[list[object]]:
    """A layout's lines of the table."""
    pooled = {c: [1e3 * step for block in each for step in block] for c, each in blocks.items()}
    means = {c: [statistics.mean(block) for block in each] for c, each in blocks.items()}
    rows: list[list[object]] = []
    for condition in CONDITIONS:
        ratios = sorted(100 * (one / off - 1) for one, off in zip(means[condition], means["off"], strict=True))
        change = 100 * (statistics.mean(pooled[condition]) / statistics.mean(pooled["off"]) - 1)
        own = seen.overhead.get(condition)
        rows.append(
            [
                name,
                condition,
                f"{statistics.median(pooled[condition]):.2f}",
                f"{max(pooled[condition]):.2f}",
                "" if condition == "off" else f"{change:+.2f}",
                "" if condition == "off" else f"{statistics.median(ratios):+.2f}",
                "" if condition == "off" else f"{ratios[0]:+.2f} to {ratios[-1]:+.2f}",
                "" if own is None or condition in ("off", "idle") else f"{100 * own:.2f}",
                len(means["off"]),
            ]
        )
    return rows


COLUMNS = ("layout", "condition", "step, median, ms", "longest step, ms", "over off, means, %")
COLUMNS += ("over off, median of rounds, %", "range, %", "by scope's own account, %", "rounds")


def note(report: Report, name: str, seen: Seen) -> None:
    """What there is to say beside the table."""
    for failure in seen.failures:
        report.fail(f"scope: {name}", failure)
    size = seen.bytes / max(sum(seen.frames.values()), 1)
    said = "; ".join(seen.paused[:6]) or "nothing paused"
    own = 100 * seen.overhead.get(BUDGET, 0.0)
    report.note(
        f"{name}: {seen.taps} taps; frames {seen.frames}, {size:.0f} bytes each, {seen.dropped} dropped. With the "
        f"default budget of {DEFAULT_BUDGET:.0%}, at every step: {said}; by scope's own account {own:.2f} %."
    )


def run(options: Options) -> Report:
    """The part."""
    report = Report("scope", options)
    names = [one.name(options.gpus) for one in layouts(options.gpus) if report.wants(one.name(options.gpus))]
    if not names:
        return report
    with report.attempt("scope"), tempfile.TemporaryDirectory(prefix="scope-") as place:
        for name in names:
            Path(place, name).mkdir()
        plan: dict[str, Any] = {"cuda": options.cuda, "tiny": options.tiny, "folder": place, "names": names}
        collecting = Collecting(Path(place))
        collecting.start()
        try:
            plan["seconds"] = report.left() - 10.0
            command, late = [__file__, "--worker", json.dumps(plan)], report.left() + 20.0
            ranks = report.job("scope", command, timeout=late, environment=ENVIRONMENT)
        finally:
            collecting.over.set()
            collecting.join(10.0)
        rows: list[list[object]] = []
        for name, seen in collecting.of.items():
            note(report, name, seen)
            blocks = ranks[0].get(name) if ranks[0] else None
            rows += rows_of(name, blocks, seen) if blocks else []
        report.table(f"What 100 taps cost, statistics, blocks of {STEPS} steps", COLUMNS, rows)
    return report


if __name__ == "__main__":
    part_or_rank(__doc__, run, worker)
