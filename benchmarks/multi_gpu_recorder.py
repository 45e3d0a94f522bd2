"""Part 1 of multi_gpu.py: do losses stay what they are with trimtab, and what does recording cost?

A GPT of 1.3 B parameters in bf16, stock Megatron-Core, in each layout that the GPUs allow. ``losses``: the model is
built anew from one seed for each condition and trained for some steps; losses are compared bit for bit, those without
trimtab also among each other. ``overhead``: blocks of steps of one model, trimtab attached before a block and detached
after it, conditions in an order that rotates from round to round.
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
    free,
    parallel,
    start,
)
from multi_gpu_part import Options, Report, part_or_rank, tell

CONDITIONS = ("off", "step", "layer", "op")
LOSS_STEPS = 6
SETTLE = 2
STEPS = 5
MOST_ROUNDS = 12
SHARE_OF_LOSSES = 0.35
"""Of the part's time."""
GOALS = {"step": 0.1, "layer": 0.5, "op": 1.3}


def layouts(world: int) -> list[Layout]:
    """Those worth measuring on so many ranks, the ones with the most events first."""
    wanted = [Layout(tp=2, pp=2, vpp=2)] if world >= 4 else []
    wanted += [Layout(pp=2, vpp=2), Layout(tp=2), Layout(), Layout(pp=2)]
    return [layout for layout in wanted if layout.fits(world)]


def size_of(layout: Layout, plan: dict[str, Any]) -> Sizes:
    """A replica without pipeline stages takes one microbatch, so that steps are of one length about."""
    if plan["tiny"]:
        return TINY
    return replace(BILLION, microbatches=1) if layout == Layout() else BILLION


def attached(condition: str, folder: str) -> Any:
    """A session; None where nothing is attached."""
    if condition == "off":
        return None
    import trimtab

    return trimtab.attach(record={"dir": folder, "granularity": condition}, engine={"name": "megatron"})


def losses(script: Any, layout: Layout, sizes: Sizes, condition: str, folder: str) -> list[str]:
    """Of the first steps, exactly, on the last stage; trimtab is there before the model, as in ``trimtab run``."""
    session = attached(condition, folder)
    try:
        training = build(script, layout, sizes)
        found = [training.step() for _ in range(LOSS_STEPS)]
    finally:
        if session is not None:
            session.detach()
    del training
    free(script)
    return [float(loss).hex() for loss in found if loss is not None]


def block(condition: str, training: Training, cuda: bool, folder: str) -> list[float]:
    """Seconds of each step; every step ends with the loss or the norm of the gradients on the host."""
    session = attached(condition, folder)
    try:
        return training.seconds(SETTLE, STEPS, cuda)
    finally:
        if session is not None:
            session.detach()


def worker(plan: dict[str, Any]) -> None:
    """One rank, all layouts."""
    import torch.distributed as dist

    cuda, deadline = plan["cuda"], time.monotonic() + plan["seconds"]
    start(cuda)
    chosen = [one for one in layouts(dist.get_world_size()) if one.name(dist.get_world_size()) in plan["names"]]
    out: dict[str, Any] = {"losses": {}, "blocks": {}, "parameters": size_of(Layout(), plan).parameters, "peak_gb": {}}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, layout in enumerate(chosen):
            name = layout.name(dist.get_world_size())
            with parallel(layout) as script:
                if plan["losses"]:
                    limit = begun + plan["seconds"] * plan["share"] * (number + 1) / len(chosen)
                    out["losses"][name] = {}
                    for condition in ("off", "off again", "layer", "op", "step"):
                        if agreed(time.monotonic() < limit, cuda):
                            place = str(Path(folder, f"{number}-{condition}".replace(" ", "-")))
                            found = losses(script, layout, size_of(layout, plan), condition.split()[0], place)
                            out["losses"][name][condition] = found
            tell(out)
        for number, layout in enumerate(chosen if plan["overhead"] else []):
            name = layout.name(dist.get_world_size())
            limit = time.monotonic() + max(deadline - time.monotonic(), 0.0) / (len(chosen) - number)
            if not agreed(time.monotonic() < deadline, cuda):
                break
            with parallel(layout) as script:
                out["blocks"][name] = _rounds(build(script, layout, size_of(layout, plan)), cuda, limit, folder)
                if cuda:
                    out["peak_gb"][name] = script.torch.cuda.max_memory_allocated() / 1e9
                    script.torch.cuda.reset_peak_memory_stats()
            tell(out)
    dist.destroy_process_group()


def _rounds(training: Training, cuda: bool, limit: float, folder: str) -> dict[str, list[list[float]]]:
    for _ in range(SETTLE):
        training.step()
    blocks: dict[str, list[list[float]]] = {name: [] for name in CONDITIONS}
    block(CONDITIONS[-1], training, cuda, str(Path(folder, "first")))  # not counted: imports, first marks
    longest = 0.0
    for turn in range(MOST_ROUNDS):
        began = time.monotonic()
        if turn and not agreed(began + longest < limit, cuda):
            break
        shift = turn % len(CONDITIONS)
        for condition in CONDITIONS[shift:] + CONDITIONS[:shift]:
            blocks[condition].append(block(condition, training, cuda, str(Path(folder, "timed"))))
        longest = max(longest, time.monotonic() - began)
    return blocks


def losses_table(report: Report, ranks: list[dict[str, Any]]) -> None:
    """Which losses are the same, bit for bit, as those of the first run without trimtab."""
    rows: list[list[object]] = []
    for name, conditions in ranks[-1]["losses"].items():
        first = conditions.get("off", [])
        for condition, found in conditions.items():
            if condition == "off":
                continue
            same = sum(one == other for one, other in zip(first, found, strict=False))
            pairs = [(float.fromhex(one), float.fromhex(other)) for one, other in zip(first, found, strict=False)]
            apart = max((abs(one - other) for one, other in pairs), default=float("nan"))
            last = f"{pairs[-1][0]:.6f}" if pairs else "-"
            rows.append([name, condition, f"{same} of {len(first)}", f"{apart:.1e}", last])
    columns = ["layout", "against the first run without", "losses bitwise equal", "largest difference", "last loss"]
    report.table(f"Losses of {LOSS_STEPS} steps, with trimtab and without", columns, rows)


def overhead_table(report: Report, ranks: list[dict[str, Any]]) -> None:
    """Medians of all steps, and of the rounds' ratios."""
    rows: list[list[object]] = []
    for name, blocks in ranks[0]["blocks"].items():
        rounds = len(blocks["off"])
        pooled = {c: statistics.median([step for block in each for step in block]) for c, each in blocks.items()}
        means = {c: [statistics.mean(block) for block in each] for c, each in blocks.items()}
        peak = max(rank["peak_gb"].get(name, 0.0) for rank in ranks)
        rows.append([name, "off", f"{1e3 * pooled['off']:.2f}", "", "", "", rounds, f"{peak:.0f}"])
        for condition in CONDITIONS[1:]:
            ratios = sorted(100 * (one / off - 1) for one, off in zip(means[condition], means["off"], strict=True))
            change = 100 * (pooled[condition] / pooled["off"] - 1)
            spread = f"{ratios[0]:+.2f} to {ratios[-1]:+.2f}"
            median = f"{statistics.median(ratios):+.2f}"
            rows.append(
                [name, condition, f"{1e3 * pooled[condition]:.2f}", f"{change:+.2f}", median, spread, rounds, ""]
            )
    columns = ["layout", "condition", "step, median, ms", "over off, medians of all steps, %"]
    columns += ["over off, median of rounds, %", "range, %", "rounds", "peak GB of a rank"]
    report.table(f"What recording costs, blocks of {STEPS} steps", columns, rows)


def run(options: Options) -> Report:
    """The part."""
    report = Report("recorder", options)
    wants = {piece: report.wants(piece) for piece in ("losses", "overhead")}
    if not any(wants.values()):
        return report
    share = SHARE_OF_LOSSES if wants["overhead"] else 1.0
    plan = {**wants, "cuda": options.cuda, "tiny": options.tiny, "seconds": report.left() - 5.0, "share": share}
    names = [layout.name(options.gpus) for layout in layouts(options.gpus)]
    plan["names"] = [name for name in names if name in options.only] or names
    with report.attempt("recorder"):
        command, late = [__file__, "--worker", json.dumps(plan)], report.left() + 20.0
        ranks = report.job("recorder", command, timeout=late, environment=ENVIRONMENT)
        if not all(ranks):
            return report
        report.note(f"{ranks[0]['parameters'] / 1e9:.2f} B parameters. Goals: {GOALS}, in %.")
        if wants["losses"]:
            losses_table(report, ranks)
        if wants["overhead"]:
            overhead_table(report, ranks)
    return report


if __name__ == "__main__":
    part_or_rank(__doc__, run, worker)
