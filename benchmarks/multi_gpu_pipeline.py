"""Pipelines on several GPUs: links, and orders of three implementations; a part of benchmarks/multi_gpu.py.

``python benchmarks/multi_gpu_pipeline.py --out DIR`` has three pieces (``--only``):

- ``links``: UCX over NVLink against NCCL's send and receive, 64 KiB to 256 MiB (multi_gpu_pipeline_links.py);
- ``plain``: the same Llama-like stages run by Megatron-Core's 1F1B and interleaved schedules, torch's ZBV and ours, at
  equal memory, calm and disturbed (multi_gpu_pipeline_rank.py);
- ``stock``: a GPT of Megatron-Core with its own schedules and with ours in their place (multi_gpu_pipeline_stock.py).

``--device cpu --tiny`` is for trying it out.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multi_gpu_part import Options, Report, arguments_of_a_part, options_of, run_job, tell
from multi_gpu_pipeline_cases import Case
from multi_gpu_pipeline_disturb import CALM, CONDITIONS, LINK, TAIL
from multi_gpu_pipeline_links import BETWEEN, run_links, spelled
from multi_gpu_pipeline_rank import Told, run_stage, told_of
from multi_gpu_pipeline_stock import Stock, cases_of_stock, run_stock
from pipeline_gpu_model import TINY, Sizes

PIECES = ("links", "plain", "stock")
SHARES = {"links": 0.15, "plain": 0.6, "stock": 0.25}
"""Of the part's time."""
START_SECONDS = 45.0
"""That processes may take to begin and to end."""
LAYERS = 4
"""A stage's."""


def main() -> None:
    """The part, or with ``--worker`` one of its processes."""
    parser = arguments_of_a_part(__doc__ or "")
    parser.add_argument("--worker", choices=PIECES)
    parser.add_argument("--told", type=Path)
    parser.add_argument("--conditions", default="", help="comma-separated, of piece plain")
    parser.add_argument("--cases", default="", help="only cases with one of these in their names, comma-separated")
    arguments = parser.parse_args()
    if arguments.worker:
        tell(_worker(arguments.worker, arguments.told.read_text()))
        return
    options = options_of(arguments)
    report = Report("pipeline", options)
    pieces = [piece for piece in PIECES if not options.only or piece in options.only]
    for number, piece in enumerate(pieces):
        if not report.wants(piece):
            continue
        rest = pieces[number:]
        seconds = report.left() * SHARES[piece] / sum(SHARES[one] for one in rest)
        with report.attempt(piece):
            if piece == "links":
                links(report, options, seconds)
            elif piece == "plain":
                plain(report, options, seconds, _listed(arguments.conditions), _listed(arguments.cases))
            else:
                stock(report, options, seconds, _listed(arguments.cases))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _worker(piece: str, told: str) -> Any:
    if piece == "plain":
        return run_stage(told_of(told))
    if piece == "stock":
        return run_stock(Stock.of(told))
    return run_links(**json.loads(told))


def _job(options: Options, piece: str, told: object, folder: Path, seconds: float, ranks: int = 0) -> list[Any]:
    file = folder / "told.json"
    file.write_text(json.dumps(told))
    command = [__file__, "--worker", piece, "--told", str(file)]
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return run_job(command, options, ranks=ranks, timeout=seconds + START_SECONDS, environment=environment)


def _partial(folder: Path) -> Any:
    """What was measured before a job had to be ended."""
    file = folder / "measured.json"
    return json.loads(file.read_text()) if file.exists() else None


# -------------------------------------------------------------------------------------------------------------- links


def links(report: Report, options: Options, seconds: float) -> None:
    """UCX against NCCL; on a CPU against gloo."""
    sizes = BETWEEN[:3] if options.tiny else BETWEEN
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        told = {"device": options.device, "sizes": list(sizes), "seconds": max(seconds - 20.0, 4.0)}
        found = _job(options, "links", told, Path(folder), seconds, ranks=2)[0]
    columns = ["one way", *(spelled(size) for size in sizes)]
    for name, measured in found["times"].items():
        rows = [[way, *(_speed(size, times.get(str(size))) for size in sizes)] for way, times in measured.items()]
        report.table(f"Links: {name}", columns, rows)
    for text in found["notes"]:
        report.note(text)
    for what, text in found["failures"].items():
        report.fail(f"links: {what}", text)


def _speed(size: int, seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.0f} us, {size / seconds / 1e9:.1f} GB/s"


# -------------------------------------------------------------------------------------------------------------- plain


def cases_of(stages: int) -> tuple[Case, ...]:
    """1F1B and ZB-V take as many microbatches' activations as there are stages, interleaved half a stage more a stage
    but one; what deviates gets one or the other."""
    same, more = str(stages), f"{stages + (stages - 1) / 2:g}"
    return (
        Case("megatron", "1f1b"),
        Case("megatron", "interleaved"),
        Case("torch", "zb-v"),
        Case("ucx", "1f1b", "static"),
        Case("ucx", "zb-v", "static"),
        Case("ucx", "zb-v", "hint", same),
        Case("ucx", "zb-v", "auto", same),
        Case("ucx", "zb-v", "auto", more),
        Case("nccl", "zb-v", "auto", same),
    )


def plain(report: Report, options: Options, seconds: float, conditions: Sequence[str], wanted: Sequence[str]) -> None:
    """Three implementations; a case in which the job had to be ended is left out of a second one."""
    cases = cases_of(options.gpus)
    if wanted:
        cases = tuple(case for case in cases if any(word in str(case) for word in wanted))
    sizes = TINY if options.tiny else Sizes(layers=LAYERS, microbatches=(max(8, 4 * options.gpus),))
    chosen = tuple(conditions) or ((CALM, TAIL, LINK) if options.tiny else CONDITIONS)
    rounds = 2 if options.tiny else 20
    deadline = time.monotonic() + seconds
    while cases:
        left = deadline - time.monotonic()
        with tempfile.TemporaryDirectory(prefix="plain-") as folder:
            told = Told(sizes, options.device, cases, chosen, rounds, left - START_SECONDS / 3, folder)
            try:
                found = _job(options, "plain", asdict(told), Path(folder), left)[0]
            except RuntimeError as error:
                where = _running(Path(folder))
                report.fail(f"plain, while it ran {where or 'nothing yet'}", str(error))
                found = _partial(Path(folder))
        if found is not None and found["rounds"]:
            _plain_tables(report, found, sizes)
            return
        bad = next((case for case in cases if where.startswith(f"{case}, ")), None)
        if bad is None or deadline - time.monotonic() < START_SECONDS / 2:
            return
        whole = where.endswith("made")  # then what opened its transport failed, which others of its kind need, too
        cases = tuple(case for case in cases if case != bad and not (whole and case.by == bad.by))


def _running(folder: Path) -> str:
    """What a job that was ended was about."""
    file = folder / "running"
    return file.read_text() if file.exists() else ""


def _plain_tables(report: Report, found: Mapping[str, Any], sizes: Sizes) -> None:
    rounds, unit = found["rounds"], found["unit"]
    names = list(found["facts"])
    first = names[0]
    conditions = [name for name, cases in found["conditions"].items() if cases[first]["seconds"]]
    middle = {
        name: {c: statistics.median(found["conditions"][name][c]["seconds"]) for c in names} for name in conditions
    }
    title = f"m = {sizes.microbatches[0]}, {rounds} rounds"
    rows = [
        [c, *(f"{1e3 * middle[n][c]:.1f} ({middle[n][c] / middle[n][first] - 1:+.1%})" for n in conditions)]
        for c in names
    ]
    report.table(f"Iteration, ms, median (over {first}), {title}", ["case", *conditions], rows)
    rows = [[c, *(_spread(found["conditions"][n][c]["seconds"]) for n in conditions)] for c in names]
    report.table(f"Lowest to highest, ms, {title}", ["case", *conditions], rows)
    facts, calm = found["facts"], found["conditions"][conditions[0]]
    rows = [
        [
            c,
            " ".join(f"{value / 2**30:.1f}" for value in facts[c]["peak"]),
            f"{1e6 * statistics.median(calm[c]['overhead']):.0f}" if any(calm[c]["overhead"]) else "",
            _idle(calm[c]),
            compared(facts[first], facts[c]),
        ]
        for c in names
    ]
    columns = [
        "case",
        "peak by stage, GiB",
        "host, us an action",
        "idle, calm",
        f"losses and gradients against {first}",
    ]
    report.table("Memory, host time and gradients", columns, rows)
    columns = ["case", "clock, MHz", "F, B, W (BW) of a microbatch on the busiest stage, ms"]
    report.table("On the device, calm", columns, [[c, *_device(calm[c])] for c in names])
    report.note(
        f"plain: half a stage takes {1e3 * unit['forward']:.2f} ms forward and {1e3 * unit['backward']:.2f} ms "
        f"backward alone; a stage has {sizes.layers} layers of hidden size {sizes.hidden}, sequence {sizes.sequence}"
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}"


def _idle(series: Mapping[str, Sequence[float]]) -> str:
    """Share of the iteration in which the busiest stage's device had nothing to do."""
    if not any(series["load"]):
        return ""
    return f"{1 - statistics.median(series['load']) / statistics.median(series['seconds']):.1%}"


def _device(series: Mapping[str, Sequence[Any]]) -> tuple[str, str]:
    """The clock, and what kinds of actions take."""
    kinds = sorted({kind for works in series["works"] for kind in works}, key=("F", "B", "W", "BW").index)
    middle = {k: statistics.median(works.get(k, 0.0) for works in series["works"]) for k in kinds}
    return f"{statistics.median(series['clock']):.0f}", ", ".join(f"{k} {1e3 * t:.2f}" for k, t in middle.items())


def compared(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Whether bits agree, else by how much norms and losses differ."""
    if first["gradients"] == other["gradients"] and first["losses"] == other["losses"]:
        return "equal bits"
    if set(first["norms"]) != set(other["norms"]) or len(first["losses"]) != len(other["losses"]):
        return "not all are there"
    norms = max(abs(other["norms"][name] / norm - 1) for name, norm in first["norms"].items())
    losses = max(abs(b / a - 1) for a, b in zip(first["losses"], other["losses"], strict=True))
    return f"norms within {norms:.1e}, losses within {losses:.1e}"


# -------------------------------------------------------------------------------------------------------------- stock


def stock(report: Report, options: Options, seconds: float, wanted: Sequence[str]) -> None:
    """Megatron-Core's GPT."""
    cases = [c for c in cases_of_stock(options.gpus) if not wanted or any(word in c.name for word in wanted)]
    found: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    while cases and (not found or deadline - time.monotonic() > 0):
        left = max(deadline - time.monotonic(), 0.0)
        with tempfile.TemporaryDirectory(prefix="stock-") as folder:
            told = Stock(options.device, options.tiny, tuple(cases), left - START_SECONDS / 3, folder)
            try:
                found |= _job(options, "stock", asdict(told), Path(folder), left)[0]
                break
            except RuntimeError as error:
                where = _running(Path(folder))
                report.fail(f"stock, while it ran {where or 'nothing yet'}", str(error))
                found |= _partial(Path(folder)) or {}
        cases = [case for case in cases if case.name not in (*found, where)]
    if not found:
        return
    first = next(iter(found.values()))
    base = statistics.median(first["seconds"])
    rows = [
        [
            name,
            f"{1e3 * statistics.median(case['seconds']):.1f}",
            _spread(case["seconds"]),
            f"{statistics.median(case['seconds']) / base - 1:+.1%}",
            " ".join(f"{value / 2**30:.1f}" for value in case["peak"]),
            "equal"
            if case["losses"] == first["losses"]
            else f"within {_furthest(first['losses'], case['losses']):.1e}",
        ]
        for name, case in found.items()
    ]
    columns = ["schedule", "ms, median", "range", "over the first", "peak by stage, GiB", "losses"]
    report.table("Stock GPT: forward and backward", columns, rows)


def _furthest(first: Sequence[float], other: Sequence[float]) -> float:
    return max((abs(b / a - 1) for a, b in zip(first, other, strict=False)), default=float("nan"))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
