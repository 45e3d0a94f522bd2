"""Forwards and backwards apart on GPUs: throughput for each device against ordinary training and the adviser.

    python benchmarks/fbd_gpu.py --out DIR
    python benchmarks/fbd_gpu.py --device cpu --tiny --out DIR

A *device* is a process that has a quarter of a GPU's multiprocessors, by MPS. It trains a few layers of a Llama of 8 B
parameters, with an embedding and a head in proportion. Tensor parallelism is emulated: a group of t devices that each
do a t-th of a microbatch is t devices that each do a microbatch of their own, and its exposed communication is a busy
wait of kappa forwards in each forward and in each backward, layer by layer. Forwards on a forward device are at TP 1
and wait for nothing. So F:B 1:3 is forwards at TP 1 with backwards at TP 3. Everything else is real: what was saved,
and the new weights, travel over UCX (CUDA IPC), and all that the host does is done.

Pieces: ``kappa`` (F:B 1:2 and 1:3 against ordinary training), ``helpers`` (forward-only devices at 35 %), ``exact``
(losses against those of ordinary training). Several GPUs share the cases of ``kappa``, each beside its own ordinary
training; ``helpers`` has the helper on the second one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fbd_gpu_rank import Case, Told
from mps import multi_process_service
from multi_gpu_part import Options, Report, arguments_of_a_part, markdown, options_of, run_job
from pipeline_gpu_model import TINY, Sizes

from trimtab.fbd.advise.candidates import Candidate, Way
from trimtab.fbd.advise.predict import predict
from trimtab.fbd.advise.training import Devices, Helpers, Training

WORKER = str(Path(__file__).with_name("fbd_gpu_rank.py"))
KAPPAS = (0.0, 0.3, 0.7, 1.2)
DEVICES = 4
SHARE = 25
SIZES = Sizes(layers=2, vocabulary=2048, microbatches=())
"""A head and an embedding of 2,048 words are to 2 layers what 32,768 are to 32."""
ORDINARY = Case("ordinary", backwards=DEVICES)
CASES = (
    Case("ship", 1, 3),
    Case("ship", 1, 3, helped=15 / 16),
    Case("ship", 1, 2),
    Case("recompute", backwards=DEVICES),
    Case("ship", 1, 3, helped=27 / 32),
    Case("again", 1, 3),
)
"""Shares of the forwards that keep 1:3 busy at kappa 0.7 and at 0.3, for a backward of two forwards."""
TWICE = ("recompute", "again")
"""Ways that run forwards twice."""
WAYS = {"ordinary": Way.ORDINARY, "recompute": Way.RECOMPUTE, "ship": Way.SHIP, "again": Way.SEND_INPUT}
NAMES = {
    "ordinary": "ordinary",
    "recompute": "ordinary, full recompute",
    "ship": "FBD, ship",
    "again": "FBD, recompute",
}


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    sizes: Sizes
    microbatches: int
    steps: int
    kappas: tuple[float, ...]
    timeout: float
    """Seconds of a case."""


def plan_of(options: Options) -> Plan:
    """By the options; tiny runs on two cores."""
    if options.tiny:
        sizes = SIZES if options.cuda else TINY
        return Plan(sizes, 4, 1, (0.0, 0.7), 90.0)
    return Plan(SIZES, 32, 2, KAPPAS, 90.0)


def main() -> None:
    """Everything that is asked for."""
    arguments = arguments_of_a_part(__doc__ or "").parse_args()
    options = options_of(arguments)
    report = Report("fbd_gpu", options)
    plan = plan_of(options)
    with multi_process_service(options.cuda) as environment:
        if report.wants("kappa"):
            with report.attempt("kappa"):
                sweep(report, plan, environment)
        if report.wants("helpers"):
            with report.attempt("helpers"):
                helpers(report, plan, environment)
        if report.wants("exact"):
            with report.attempt("exact"):
                exact(report, plan, environment)
    for table in report.tables:
        sys.stdout.write(markdown(table) + "\n")
    sys.stdout.write("\n".join(f"- {note}" for note in report.notes) + "\n")


def run_case(
    options: Options,
    plan: Plan,
    case: Case,
    gpus: Sequence[int],
    shares: Sequence[int],
    environment: Mapping[str, str],
    forward: float = 0.0,
    *,
    exact: bool = False,
) -> list[dict[str, Any]]:
    """Its processes, each on a GPU of which it has a share; what they measured."""
    kappas = plan.kappas[::2] if case.way in TWICE else plan.kappas
    told = Told(options.device, plan.sizes, case, kappas, plan.steps, plan.microbatches, "ucx", tuple(gpus), forward)
    told = replace(told, exact=exact)
    per_rank = [{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)} for share in shares]
    return run_job(
        [WORKER, json.dumps(asdict(told))],
        options,
        ranks=case.world,
        timeout=plan.timeout,
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment},
        per_rank=per_rank,
    )


def step_seconds(ranks: Sequence[Mapping[str, Any]]) -> dict[float, list[float]]:
    """Of each kappa, how long steps took: from the end of the one before on the last training device to its own."""
    ends = [one["ends"] for one in ranks if one["ends"]]
    found: dict[float, list[float]] = {}
    last = max(row[0][1] for row in ends)
    for number, (kappa, _) in enumerate(ends[0][1:], 1):
        end = max(row[number][1] for row in ends)
        found.setdefault(kappa, []).append(end - last)
        last = end
    return found


# --------------------------------------------------------------------------------------------------------------- kappa


def sweep(report: Report, plan: Plan, environment: Mapping[str, str]) -> None:
    """The cases, dealt out to the GPUs; ordinary training on each of them first."""
    gpus = min(report.options.gpus, 2) if report.options.cuda else 1
    with ThreadPoolExecutor(gpus) as pool:
        parts = [pool.submit(_sweep_on, report, plan, environment, gpu, CASES[gpu::gpus]) for gpu in range(gpus)]
        found = [one.result() for one in parts]
    rows: list[list[str]] = []
    memory: list[list[str]] = []
    for gpu, results in enumerate(found):
        ordinary = results.get(ORDINARY)
        if ordinary is None:
            continue
        unit, back = ordinary[0]["forward"], ordinary[0]["backward"]
        report.note(
            f"GPU {gpu}: forward {unit * 1e3:.2f} ms, backward {back * 1e3:.2f} ms ({back / unit:.2f} forwards) of a "
            f"microbatch while all four devices do the same; {plan.microbatches} microbatches of each training device "
            f"in a step, {plan.steps} steps; a shipment has {ordinary[0]['shipped'] / 2**20:.0f} MiB"
        )
        for case, ranks in results.items():
            rows.append([f"GPU {gpu}", _name(case), *_cells(plan, ordinary, case, ranks)])
            memory.append([f"GPU {gpu}", _name(case), *_peaks(ranks)])
    columns = ["", "case", *(f"kappa {one:g}" for one in plan.kappas)]
    report.table("Step in ms; per device, ordinary = 1: measured (predicted; off by)", columns, rows)
    report.table(
        "Peak memory in GiB, of PyTorch's allocator",
        ["", "case", "forward device", "training device"],
        memory,
    )


def _sweep_on(
    report: Report, plan: Plan, environment: Mapping[str, str], gpu: int, cases: Sequence[Case]
) -> dict[Case, list[dict[str, Any]]]:
    options = replace(report.options, out=report.options.out / f"gpu{gpu}")
    found: dict[Case, list[dict[str, Any]]] = {}
    forward = 0.0
    for case in (ORDINARY, *cases):
        if not report.wants("kappa"):
            break
        with report.attempt(f"GPU {gpu}, {case}"):
            gpus, shares = [gpu] * case.world, [SHARE] * case.world
            found[case] = run_case(options, _in_time(report, plan), case, gpus, shares, environment, forward)
            forward = forward or sum(one["forward"] for one in found[case]) / case.world
    return found


def _in_time(report: Report, plan: Plan) -> Plan:
    """No case takes much longer than there is time."""
    return replace(plan, timeout=min(plan.timeout, report.left() + 30))


def _name(case: Case) -> str:
    share = "" if case.helped == 1 else f", {case.helped:.0%} of the forwards"
    return NAMES[case.way] + (f" {case.forwards}:{case.backwards}{share}" if case.forwards else "")


def _cells(
    plan: Plan, ordinary: Sequence[Mapping[str, Any]], case: Case, ranks: Sequence[Mapping[str, Any]]
) -> list[str]:
    base, mine = step_seconds(ordinary), step_seconds(ranks)
    cells: list[str] = []
    for kappa in plan.kappas:
        if kappa not in mine:
            cells.append("")
            continue
        seconds = _mean(mine[kappa])
        if case == ORDINARY:
            predicted = predicted_step(plan, ordinary, kappa)
            cells.append(f"{seconds * 1e3:.0f} ms ({predicted * 1e3:.0f}; {seconds / predicted - 1:+.1%})")
            continue
        each = case.backwards / case.world  # microbatches of a device, for each of a training device
        gain = each * _mean(base[kappa]) / seconds
        expected = predicted_gain(plan, ordinary, kappa, case)
        cells.append(f"{seconds * 1e3:.0f} ms, {gain:.3f} ({expected:.3f}; {gain / expected - 1:+.1%})")
    return cells


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _peaks(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    peaks = {
        role: max((one["peak"] / 2**30 for one in ranks if (one["role"] == "forward") == role), default=0.0)
        for role in (True, False)
    }
    return [f"{peaks[True]:.1f}" if peaks[True] else "", f"{peaks[False]:.1f}"]


def training_of(plan: Plan, measured: Sequence[Mapping[str, Any]], kappa: float, tp: int) -> Training:
    """What the adviser is told: times of a device's own part of a microbatch at TP ``tp``, which is that of one of
    ``tp`` sequences."""
    forward, backward = (_mean([one[name] for one in measured]) for name in ("forward", "backward"))
    exposed = kappa * forward if tp > 1 else 0.0
    sizes = plan.sizes
    each = 2 * sizes.hidden * sizes.sequence * sizes.layers
    return Training(
        (forward,), (backward,), (exposed,), (exposed,), tp, plan.microbatches, sizes.layers, sizes.hidden,
        sizes.sequence, tp, sizes.vocabulary, saved=measured[0]["shipped"] / each,
    )  # fmt: skip


def predicted_step(plan: Plan, ordinary: Sequence[Mapping[str, Any]], kappa: float) -> float:
    """Seconds, of ordinary training."""
    training = training_of(plan, ordinary, kappa, 2)
    return predict(training, Devices(memory=1e12), Candidate(Way.ORDINARY, 1, 2, 2)).step


def predicted_gain(plan: Plan, ordinary: Sequence[Mapping[str, Any]], kappa: float, case: Case) -> float:
    """Throughput for each device with ordinary training as 1, as ``trimtab fbd advise`` has it."""
    tp = case.backwards if case.forwards else 2
    training = training_of(plan, ordinary, kappa, tp)
    devices = Devices(memory=1e12, bandwidth=400e9)
    now = predict(training, devices, Candidate(Way.ORDINARY, 1, tp, tp))
    split = Candidate(WAYS[case.way], 1, tp, 1 if case.forwards else tp, 1 if case.forwards else 0, 1, case.helped)
    return predict(training, devices, split).throughput / now.throughput


# ------------------------------------------------------------------------------------------------------------- helpers


def helpers(report: Report, plan: Plan, environment: Mapping[str, str]) -> None:
    """A trainer alone, then with a forward-only helper: on one GPU they share it in that proportion; on two each has
    one, of which the helper may use 35 %."""
    options = replace(report.options, out=report.options.out / "helpers")
    apart = options.cuda and options.gpus > 1
    gpus, shares = ([0, 1], [100, 35]) if apart else ([0, 0], [74, 26])
    plan = replace(plan, kappas=(0.0,), steps=2 * plan.steps, microbatches=28 if not options.tiny else 7)
    if options.cuda and not options.tiny:
        plan = replace(plan, sizes=replace(plan.sizes, layers=4))
    alone = run_case(options, plan, Case(), gpus[:1], shares[:1], environment)
    base = _mean(step_seconds(alone)[0.0])
    rows = [["trainer alone", f"{base * 1e3:.0f}", "1.000", "", "", f"{alone[0]['peak'] / 2**30:.1f}"]]
    for case in (Case("ship", 1, 1, helped=6 / 7), Case("ship", 1, 1)):
        if not report.wants("helpers"):
            break
        with report.attempt(f"helpers, {case}"):
            timely = _in_time(report, plan)
            ranks = run_case(options, timely, case, gpus, shares, environment, alone[0]["forward"])
            seconds = _mean(step_seconds(ranks)[0.0])
            speed = alone[0]["forward"] / next(one["forward"] for one in ranks if one["role"] == "forward")
            expected = _helped_gain(plan, alone, case, speed)
            forward, trainer = _peaks(ranks)
            gain = base / seconds
            cells = (f"{gain:.3f}", f"{expected:.3f}; {gain / expected - 1:+.1%}", forward, trainer)
            rows.append([f"{_name(case)}, helper at {speed:.2f}", f"{seconds * 1e3:.0f}", *cells])
    where = "on a GPU each, joined by NVLink" if apart else "on one GPU"
    title = f"A trainer and a forward-only helper, {where}, MPS {shares[0]} % and {shares[1]} %"
    report.table(title, ["case", "step, ms", "gain", "predicted; off by", "helper GiB", "trainer GiB"], rows)


def exact(report: Report, plan: Plan, environment: Mapping[str, str]) -> None:
    """Losses of the last of some steps with forwards apart, and those of ordinary training on one device: of the same
    microbatches, by deterministic kernels."""
    options = report.options
    plan = replace(plan, kappas=(0.0,), steps=2, microbatches=4)
    gpus = [0, 1] if options.cuda and options.gpus > 1 else [0, 0]
    sizes = {"": plan.sizes} | ({", 8192 tokens": replace(plan.sizes, sequence=8192)} if options.cuda else {})
    cases = {
        "ordinary": (Case(), gpus[:1]),
        "ship, one GPU": (Case("ship", 1, 1), gpus[:1] * 2),
        "ship, two GPUs": (Case("ship", 1, 1), gpus),
        "recompute, two GPUs": (Case("again", 1, 1), gpus),
        "ship, half of the forwards": (Case("ship", 1, 1, helped=0.5), gpus),
    }
    found: dict[str, list[float]] = {}

    def losses(name: str, case: Case, on: list[int], size: Sizes) -> None:
        with report.attempt(f"exact, {name}"):
            own = replace(options, out=options.out / ("exact-" + "".join(c if c.isalnum() else "-" for c in name)))
            timely = replace(_in_time(report, plan), sizes=size)
            ranks = run_case(own, timely, case, on, [50] * case.world, environment, exact=True)
            found[name] = ranks[0]["losses"]

    with ThreadPoolExecutor(len(cases) * len(sizes)) as pool:
        for size, of in sizes.items():
            for name, (case, on) in cases.items():
                pool.submit(losses, name + size, case, on, of)
    rows = [
        [name, " ".join(f"{loss:.6f}" for loss in each), _difference(each, found.get("ordinary" + _size(name), []))]
        for name, each in sorted(found.items())
    ]
    report.table("Losses of the last step's microbatches, and their greatest difference", ["case", "losses", ""], rows)


def _size(name: str) -> str:
    return ", 8192 tokens" if name.endswith("tokens") else ""


def _difference(losses: Sequence[float], expected: Sequence[float]) -> str:
    if len(losses) != len(expected):
        return "?"
    return f"{max(abs(a - b) for a, b in zip(losses, expected, strict=True)):g}"


def _helped_gain(plan: Plan, alone: Sequence[Mapping[str, Any]], case: Case, speed: float) -> float:
    training = training_of(plan, alone, 0.0, 1)
    devices, helping = Devices(memory=1e12, bandwidth=200e9), Helpers(1, speed, memory=1e12)
    split = Candidate(WAYS[case.way], 1, 1, 1, 1, 1, case.helped, on_helpers=True)
    now = predict(training, devices, Candidate(Way.ORDINARY, 1, 1, 1))
    return predict(training, devices, split, helping).throughput / now.throughput


if __name__ == "__main__":
    main()
