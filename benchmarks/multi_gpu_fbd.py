"""Part 4 of ``benchmarks/multi_gpu.py``: forwards and backwards apart where tensor parallelism is real.

    python benchmarks/multi_gpu_fbd.py --out DIR

Pieces: ``kappa``, the communication of a tensor parallel Llama layer over NCCL that no compute hides, and what the
adviser makes of it; ``megatron``, stock Megatron-Core at that tensor parallel degree, ordinary and with forwards apart,
which have a share of the same GPUs by MPS; ``helpers``, a trainer with the whole of a GPU and a forward-only helper
with 35 % of another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fbd_gpu import helpers, multi_process_service, plan_of, shares_of
from multi_gpu_part import Report, arguments_of_a_part, markdown, options_of, run_job
from pipeline_gpu_model import TINY, Sizes

from trimtab.fbd.advise.candidates import Candidate, Way
from trimtab.fbd.advise.predict import bound, predict
from trimtab.fbd.advise.training import Devices, Training

WORKER = str(Path(__file__).with_name("multi_gpu_fbd_rank.py"))
SIZES = {
    "8B, 4096 tokens": Sizes(layers=4, microbatches=()),
    "70B, 4096 tokens": Sizes(layers=2, hidden=8192, inner=28672, heads=64, groups=8, microbatches=()),
}
"""Layers of Llamas of that size."""
MICROBATCHES = 32
WARM_UP = 2
"""Steps of Megatron-Core that do not count."""
COLUMNS = (
    *("layers", "F alone, ms", "F, ms", "kappa", "B alone, ms", "B, ms", "exposed, of a forward"),
    *(f"ship gains, {MICROBATCHES} microbatches", "at most"),
)


def main() -> None:
    """Everything that is asked for."""
    parser = arguments_of_a_part(__doc__ or "")
    parser.add_argument("--cases", default="", help="of megatron, comma-separated")
    arguments = parser.parse_args()
    options = options_of(arguments)
    report = Report("fbd", options)
    if report.wants("kappa"):
        kappa(report)
    if report.wants("megatron"):
        with report.attempt("megatron"), multi_process_service(options.cuda) as environment:
            megatron(report, environment, [one for one in arguments.cases.split(",") if one])
    if report.wants("helpers"):
        with report.attempt("helpers"), multi_process_service(options.cuda) as environment:
            plan = plan_of(options)
            helpers(report, plan, shares_of(report, plan.sizes, environment), environment)
    for table in report.tables:
        sys.stdout.write(markdown(table) + "\n")
    sys.stdout.write("\n".join(f"- {note}" for note in report.notes) + "\n")


def kappa(report: Report) -> None:
    """Measured at each size; what shipping would gain there."""
    options = report.options
    rows: list[list[str]] = []
    for name, sizes in (SIZES if not options.tiny else {"tiny": replace(TINY, microbatches=())}).items():
        if not report.wants("kappa"):
            break
        with report.attempt(f"kappa, {name}"):
            told = {"scenario": "kappa", "sizes": asdict(sizes), "rounds": 10}
            found = run_job([WORKER, _told(report, told)], options, timeout=60)
            rows.append([f"{name}, TP {options.gpus}", *_row(found, sizes, options.gpus)])
    report.table("Exposed tensor parallel communication, and what the adviser makes of it", COLUMNS, rows)


def megatron(report: Report, environment: dict[str, str], cases: Sequence[str] = ()) -> None:
    """Ordinary training has the GPUs for itself; forwards apart share each of them with backwards."""
    degree = report.options.gpus
    rows: list[list[str]] = []
    base = 0.0
    for name, forward_tp, share in (
        ("ordinary", 0, 0),
        ("forwards at TP 1", 1, 30),
        ("as many, at the same TP", degree, 30),
    ):
        if cases and name not in cases:
            continue
        if not report.wants("megatron"):
            break
        with report.attempt(f"megatron, {name}"):
            found = _megatron(report, environment, forward_tp, share)
            trains = [one for one in found if one["role"] == "backward"]
            begins = [max(each) for each in zip(*(one["begins"] for one in trains), strict=True)]
            step = (begins[-1] - begins[WARM_UP]) / (len(begins) - 1 - WARM_UP)
            base = base or step
            peaks = [
                max((one["peak"] / 2**30 for one in found if (one["role"] == "backward") == back), default=0.0)
                for back in (False, True)
            ]
            losses = next(one["losses"] for one in trains if one["losses"])
            shares = f"{100 - share} % and {share} %" if share else "100 %"
            rows.append(
                [
                    name,
                    shares,
                    f"{step * 1e3:.0f}",
                    f"{base / step:.3f}",
                    *(f"{one:.1f}" for one in peaks),
                    f"{losses[-1]:.5f}",
                ]
            )
    columns = ("case", "of a GPU, backward and forward", "step, ms", "gain", "forward GiB", "training GiB", "last loss")
    report.table(f"Stock Megatron-Core at TP {degree}, with forwards on the same {degree} GPUs", columns, rows)


def _megatron(report: Report, environment: dict[str, str], forward_tp: int, share: int) -> list[dict[str, Any]]:
    options, degree = report.options, report.options.gpus
    size = (
        ("--hidden-size", 4096, "--heads", 32, "--seq-length", 4096, "--global-batch-size", 24, "--bf16")
        if options.cuda
        else ("--hidden-size", 64, "--heads", 4, "--seq-length", 32, "--global-batch-size", 4)
    )
    arguments = ["--tp", degree, "--num-layers", 4 if options.cuda else 2, "--micro-batch-size", 1, *size]
    arguments += ["--steps", WARM_UP + (4 if not options.tiny else 2), "--log-interval", 100]
    if forward_tp:
        arguments += ["--forward-tp", forward_tp, "--forwards", degree // forward_tp, "--backwards", 1]
    told = {"scenario": "megatron", "vocabulary": 4096, "arguments": arguments, "apart": bool(forward_tp)}
    per_rank = [{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 - share)} for _ in range(degree)]
    if forward_tp:
        per_rank += [{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)} for _ in range(degree)]
    return run_job(
        [WORKER, _told(report, told)],
        options,
        ranks=len(per_rank),
        timeout=75,
        environment=dict(environment),
        per_rank=per_rank,
    )


def _told(report: Report, what: dict[str, Any]) -> str:
    return json.dumps({**what, "device": report.options.device, "gpus": report.options.gpus})


def _row(found: list[dict[str, Any]], sizes: Sizes, degree: int) -> list[str]:
    mean = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    alone, back = mean["forward alone"], mean["backward alone"]
    exposed = [max(mean[name] - mean[f"{name} alone"], 0.0) for name in ("forward", "backward")]
    figures = ((alone,), (back,), (exposed[0],), (exposed[1],))
    training = Training(*figures, degree, MICROBATCHES, sizes.layers, sizes.hidden, sizes.sequence)
    devices = Devices(memory=1e12, bandwidth=200e9)
    ordinary = Candidate(Way.ORDINARY, 1, degree, degree)
    ships = [Candidate(Way.SHIP, 1, degree, 1, f, b) for f in range(1, 9) for b in range(1, 9)]
    now = predict(training, devices, ordinary).throughput
    gain = max(predict(training, devices, one).throughput for one in ships) / now
    most = max(bound(training, devices, one) for one in ships) / bound(training, devices, ordinary)
    times = [alone, mean["forward"], back, mean["backward"]]
    ms = [f"{one * 1e3:.2f}" for one in times]
    return [*ms[:2], f"{exposed[0] / alone:.2f}", *ms[2:], f"{exposed[1] / alone:.2f}", f"{gain:.3f}", f"{most:.3f}"]


if __name__ == "__main__":
    main()
