"""Forwards and backwards apart on GPUs: throughput for each device against ordinary training and the adviser.

    python benchmarks/fbd_gpu.py --out DIR
    python benchmarks/fbd_gpu.py --device cpu --tiny --out DIR

A *device* is a process that has a share of a GPU's multiprocessors, by MPS. It trains a few layers of a Llama of 8 B
parameters, with an embedding and a head in proportion. Tensor parallelism is emulated: a group of t devices that each
do a t-th of a microbatch is t devices that each do a microbatch of their own, and its exposed communication is kappa
forwards of something else in each forward and in each backward, layer by layer. Forwards on a forward device are at
TP 1 and wait for nothing. So F:B 1:3 is forwards at TP 1 with backwards at TP 3. Everything else is real: what was
saved, and the new weights, travel over UCX (CUDA IPC), and all that the host does is done.

The same processes run all cases of a piece, one after the other, so the GPU is shared by as many in each: those which
a case has no use for go on training in the ordinary way.

Pieces: ``kappa`` (four devices: F:B 1:2 and 1:3 against ordinary training), ``eleven`` (devices: 3:8), ``helpers`` (a
trainer and a forward-only device of 35 % of it, on a second GPU where there is one), ``exact`` (losses against those of
ordinary training).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fbd_gpu_parts import Case, Told
from mps import multi_process_service
from mps_shares import whole_shares
from multi_gpu_part import JobError, Options, Report, arguments_of_a_part, markdown, options_of, run_job
from pipeline_gpu_model import TINY, Sizes

from trimtab.fbd.advise.flow import Flow, Stage, run
from trimtab.fbd.advise.predict import NOTICED
from trimtab.fbd.sharing import ahead_of, helpers_of, partners_of

WORKER = str(Path(__file__).with_name("fbd_gpu_rank.py"))
KAPPAS = (0.0, 0.3, 0.7, 1.2)
SIZES = Sizes(layers=1, vocabulary=1024, microbatches=())
"""A head and an embedding of 1,024 words are to 1 layer what 32,768 are to 32."""
MICROBATCHES = 32
HELPED = 28
WORDS_BESIDE = 2048
NVLINK = 277e9
"""Bytes a second of UCX between two H200s, large messages one way (benchmarks/multi_gpu.md)."""
QUARTER, ELEVENTH = 25, 10
HELPER, TRAINER_BESIDE, HELPER_BESIDE = 35, 65, 23
"""Percent of a GPU's multiprocessors that are wanted; a helper's is 35 % of the trainer's."""
FOUR = (
    Case(backwards=4, kappas=KAPPAS),
    Case("ship", 1, 3, kappas=KAPPAS),
    Case("ship", 1, 3, 1 - 9 / 96, kappas=(0.7,)),
    Case("ship", 1, 3, 1 - 20 / 96, kappas=(0.0, 0.3)),
    Case("ship", 1, 3, 1 - 3 / 96, kappas=(1.2,), steps=1),
    Case("ship", 1, 2, kappas=KAPPAS),
    Case("ship", 1, 3, 1 - 20 / 288, kappas=(0.7,), microbatches=96, steps=1),
    Case("ship", 1, 3, 1 - 9 / 96, ahead=2, kappas=(0.7,), steps=1),
    Case("recompute", backwards=4, kappas=(0.0, 0.7), steps=1),
    Case("again", 1, 3, kappas=(0.0, 0.7), steps=1),
)
"""Shares that the simulation finds best at 0.7, at 0.3 and at 1.2."""
ELEVEN = (
    Case(backwards=11, kappas=(0.0, 0.7), steps=1),
    Case("ship", 3, 8, kappas=(0.7,), steps=1),
    Case("ship", 3, 8, 1 - 8 / 256, kappas=(0.7,), steps=1),
    Case("ship", 3, 8, 1 - 8 / 768, kappas=(0.7,), microbatches=96, steps=1),
)
HELPERS = (
    Case(fill="forwards"),
    Case("ship", 1, 1, 22 / 28),
    Case("ship", 1, 1),
    Case("ship", 1, 1, 22 / 28, link=NVLINK),
    Case("ship", 1, 1, link=NVLINK),
    Case("ship", 1, 1, 22 / 28, ahead=2, link=NVLINK, steps=1),
    Case("ship", 1, 1, ahead=2, link=NVLINK, steps=1),
    Case(fill="nothing", steps=1),
)
"""Of 28 microbatches."""
COLUMNS = (
    *("case", "ms a microbatch", "helper's speed", "forward", "backward", "gain", "predicted; off by"),
    *("helper GiB", "trainer GiB"),
)


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    sizes: Sizes
    microbatches: int
    four: tuple[Case, ...] = FOUR
    eleven: tuple[Case, ...] = ELEVEN


@dataclass(frozen=True)
class Base:
    """Ordinary training, as measured."""

    passes: Mapping[str, tuple[float, float]]
    """By kappa, seconds of forward and backward, with waits."""
    each: Mapping[float, float]
    """By kappa, seconds of a microbatch in a step."""
    shipped: float
    """Bytes."""
    weights: float
    """Bytes."""


def plan_of(options: Options) -> Plan:
    """By the options; tiny runs on two cores."""
    if not options.tiny:
        return Plan(SIZES, MICROBATCHES)
    sizes = SIZES if options.cuda else TINY
    small = tuple(replace(one, kappas=one.kappas[:1], steps=1, microbatches=0) for one in FOUR[:5])
    eleven = tuple(replace(one, steps=1, microbatches=0) for one in ELEVEN[:2]) if options.cuda else ()
    return Plan(sizes, 8, small, eleven)


def shares_of(report: Report, sizes: Sizes, environment: Mapping[str, str]) -> dict[int, int]:
    """What is taken in the place of each share: with some, cuBLAS computes products in part only."""
    wanted = (QUARTER, ELEVENTH, HELPER, TRAINER_BESIDE, HELPER_BESIDE)
    if not report.options.cuda:
        return {share: share for share in wanted}
    kept = sizes.hidden // sizes.heads * sizes.groups
    layers = {
        (sizes.hidden, sizes.hidden),
        (kept, sizes.hidden),
        (sizes.inner, sizes.hidden),
        (sizes.hidden, sizes.inner),
    }
    layers |= {(words, sizes.hidden) for words in (sizes.vocabulary, WORDS_BESIDE)}
    found = whole_shares(wanted, [(sizes.sequence, *layer) for layer in sorted(layers)], environment)
    report.note("shares with which products are whole: " + ", ".join(f"{a} % for {b} %" for b, a in found.items()))
    return found


def main() -> None:
    """Everything that is asked for."""
    arguments = arguments_of_a_part(__doc__ or "").parse_args()
    options = options_of(arguments)
    report = Report("fbd_gpu", options)
    plan = plan_of(options)
    with multi_process_service(options.cuda) as environment:
        shares = shares_of(report, plan.sizes, environment)
        pieces = {
            "kappa": lambda: sweep(report, plan, plan.four, [shares[QUARTER]] * 4, environment),
            "helpers": lambda: helpers(report, plan, shares, environment),
            "eleven": lambda: sweep(report, plan, plan.eleven, [shares[ELEVENTH]] * 11, environment),
            "exact": lambda: exact(report, plan, environment),
        }
        for name, piece in pieces.items():
            if report.wants(name):
                with report.attempt(name):
                    piece()
    for table in report.tables:
        sys.stdout.write(markdown(table) + "\n")
    sys.stdout.write("\n".join(f"- {note}" for note in report.notes) + "\n")


def run_cases(
    report: Report,
    plan: Plan,
    cases: Sequence[Case],
    gpus: Sequence[int],
    shares: Sequence[int],
    environment: Mapping[str, str],
    *,
    exact: bool = False,
) -> list[dict[str, Any]]:
    """All cases in one set of processes, each on a GPU of which it has a share; what each process measured: ``alone``,
    and ``cases``, of which some are missing if that failed."""
    options = report.options
    told = Told(options.device, plan.sizes, tuple(cases), plan.microbatches, tuple(gpus), exact=exact)
    try:
        return run_job(
            [WORKER, json.dumps(asdict(told))],
            options,
            ranks=len(gpus),
            timeout=report.left() + 30,
            environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **environment},
            per_rank=[{"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)} for share in shares],
        )
    except JobError as error:
        report.fail("a job", str(error))
        if not all(error.results):
            raise
        return error.results


def of_case(ranks: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """What its processes measured; nothing if they did not come to it."""
    if any(len(one["cases"]) <= number for one in ranks):
        return []
    return [one["cases"][number] for one in ranks]


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


def sweep(
    report: Report, plan: Plan, cases: Sequence[Case], shares: Sequence[int], environment: Mapping[str, str]
) -> None:
    """Cases of equal devices; the first is ordinary training."""
    if not cases:
        return
    ranks = run_cases(report, plan, cases, [0] * len(shares), shares, environment)
    base = base_of(plan, ranks)
    has = sorted({one["alone"].get("multiprocessors", 0) for one in ranks})
    report.note(
        f"{len(shares)} devices with {has} multiprocessors: while all do the same without waits, a forward takes "
        f"{_span(ranks, 'forward')} ms and a backward {_span(ranks, 'backward')} ms; a shipment has "
        f"{base.shipped / 2**20:.0f} MiB, the weights {base.weights / 2**20:.0f}"
    )
    rows: list[list[str]] = []
    passes: list[list[str]] = []
    memory: list[list[str]] = []
    for number, case in enumerate(cases):
        measured = of_case(ranks, number)
        if measured:
            rows.append([str(case), str(case.microbatches or plan.microbatches), *_cells(plan, base, case, measured)])
            passes += [[str(case), *row] for row in _pass_rows(case, measured)]
            memory.append([str(case), *_peaks(measured)])
    columns = ["case", "microbatches", *(f"kappa {one:g}" for one in cases[0].kappas)]
    title = f"{len(shares)} devices: step in ms; per device, ordinary = 1: measured (predicted; off by)"
    report.table(title, columns, rows)
    report.table(
        f"{len(shares)} devices: ms of passes on the device, with waits, fastest to slowest device",
        ["case", "kappa", "forward device", "training device: forward", "backward"],
        passes,
    )
    report.table(
        f"{len(shares)} devices: peak memory in GiB, of PyTorch's allocator",
        ["case", "forward device", "training device"],
        memory,
    )


def base_of(plan: Plan, ranks: Sequence[Mapping[str, Any]]) -> Base:
    """Of ordinary training, which was first."""
    measured = of_case(ranks, 0)
    each = {kappa: _mean(some) / plan.microbatches for kappa, some in step_seconds(measured).items()}
    mine = [one for one in measured if one["role"] == "ordinary"]
    passes = {
        name: (_mean([one["passes"][name][0] for one in mine]), _mean([one["passes"][name][1] for one in mine]))
        for name in mine[0]["passes"]
    }
    alone = ranks[0]["alone"]
    return Base(passes, each, alone["shipped"], alone["weights"])


def predicted(plan: Plan, base: Base, case: Case, kappa: float, rate: float, speed: float = 1.0) -> float:
    """Seconds of a step, by the adviser's simulation, from ordinary training's own times at that kappa.

    Args:
        rate: bytes a second of a forward device's link.
        speed: of a forward device's forward, with a trainer's as 1.
    """
    forward, backward = base.passes[f"{kappa:g}"]
    microbatches = (case.microbatches or plan.microbatches) * case.backwards
    by = helpers_of(microbatches, case.forwards, case.backwards, case.helped) if case.forwards else {}
    partners = partners_of(by, case.backwards)
    ahead = case.ahead or ahead_of(0, case.forwards, case.backwards, partners)
    twice = case.way in ("recompute", "again")
    alone = Stage(
        own_forward=forward,
        helper_forward=base.passes["0"][0] / speed,
        ship=base.shipped / rate if rate and case.way == "ship" else 0.0,
        backward=backward + (forward if case.way == "recompute" else 0.0),
        helped_backward=backward + (forward if twice else 0.0),
        cap=1,
        ahead=ahead,
        refresh=case.forwards * base.weights / rate if rate else 0.0,
        latency=NOTICED,
    )
    return run(Flow((alone,), microbatches, case.backwards, case.forwards, case.helped)).makespan


def _cells(plan: Plan, base: Base, case: Case, measured: Sequence[Mapping[str, Any]]) -> list[str]:
    mine = step_seconds(measured)
    rate = case.link or max(one["rate"] for one in measured)
    cells: list[str] = []
    for kappa in base.each:
        if kappa not in mine:
            cells.append("")
            continue
        seconds = _mean(mine[kappa])
        if case.way == "ordinary":
            cells.append(f"{seconds * 1e3:.0f} ms")
            continue
        done = case.backwards * (case.microbatches or plan.microbatches) / case.world  # by each device
        expected = done * base.each[kappa] / predicted(plan, base, case, kappa, rate)
        gain = done * base.each[kappa] / seconds
        cells.append(f"{seconds * 1e3:.0f} ms, {gain:.3f} ({expected:.3f}; {gain / expected - 1:+.1%})")
    return cells


def _pass_rows(case: Case, measured: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows: list[list[str]] = []
    for kappa in case.kappas:
        found = {
            (role == "forward", place): [one["passes"][f"{kappa:g}"][place] for one in measured if one["role"] == role]
            for role in ("forward", "backward" if case.forwards else "ordinary")
            for place in (0, 1)
        }
        rows.append([f"{kappa:g}", *(_least_to_most(found[key]) for key in ((True, 0), (False, 0), (False, 1)))])
    return rows


def _least_to_most(seconds: Sequence[float]) -> str:
    if not any(seconds):
        return ""
    return f"{min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}"


def _span(ranks: Sequence[Mapping[str, Any]], name: str) -> str:
    return _least_to_most([one["alone"][name] for one in ranks])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _peaks(measured: Sequence[Mapping[str, Any]]) -> list[str]:
    """GiB of the fullest forward device, and of the fullest that trains."""
    forward = [one["peak"] / 2**30 for one in measured if one["role"] == "forward"]
    trains = [one["peak"] / 2**30 for one in measured if one["ends"]]
    return [f"{max(forward):.1f}" if forward else "", f"{max(trains):.1f}"]


# ------------------------------------------------------------------------------------------------------------- helpers


def helpers(report: Report, plan: Plan, whole: Mapping[int, int], environment: Mapping[str, str]) -> None:
    """A trainer alone, then with a forward-only helper: on one GPU they share it in that proportion; on two each has
    one, of which the helper may use 35 %. On one, ordinary training has the helper run forwards beside it, too: both
    would be slower beside each other than alone. A link as between two GPUs is emulated there. ``here``: shares of the
    two on one GPU."""
    options = report.options
    apart = options.cuda and options.gpus > 1
    gpus = [0, 1] if apart else [0, 0]
    shares = [100, whole[HELPER]] if apart else [whole[TRAINER_BESIDE], whole[HELPER_BESIDE]]
    layers = 4 if options.cuda and not options.tiny else plan.sizes.layers
    plan = replace(plan, sizes=replace(plan.sizes, layers=layers, vocabulary=WORDS_BESIDE), microbatches=HELPED)
    if options.tiny:
        plan = replace(plan, microbatches=7)
    cases: tuple[Case, ...] = HELPERS
    if apart:
        cases = (Case(fill="nothing"), *(replace(one, link=0.0) for one in HELPERS[3:-1]))
    if options.tiny:
        cases = tuple(replace(one, steps=1, link=one.link and 1e9) for one in cases)
    ranks = run_cases(report, plan, cases, gpus, shares, environment)
    base = base_of(plan, ranks)
    rows: list[list[str]] = []
    for number, case in enumerate(cases):
        measured = of_case(ranks, number)
        if not measured:
            continue
        seconds = _mean(step_seconds(measured)[0.0]) / plan.microbatches
        gain = base.each[0.0] / seconds
        if not case.forwards:
            cells = (*_times(measured, 0), f"{gain:.3f}", "", *_peaks(measured))
            rows.append([str(case), f"{seconds * 1e3:.2f}", *cells])
            continue
        forward = next(one for one in measured if one["role"] == "forward")
        speed = base.passes["0"][0] / forward["passes"]["0"][0]
        step = predicted(plan, base, case, 0.0, case.link or forward["rate"], speed)
        expected = base.each[0.0] * plan.microbatches / step
        said = f"{expected:.3f}; {gain / expected - 1:+.1%}"
        cells = (*_times(measured, speed), f"{gain:.3f}", said, *_peaks(measured))
        rows.append([str(case), f"{seconds * 1e3:.2f}", *cells])
    where = "on a GPU each" if apart else "on one GPU"
    report.table(
        f"A trainer and a forward-only helper, {where}, MPS {shares[0]} % and {shares[1]} %",
        COLUMNS,
        rows,
    )


def _times(measured: Sequence[Mapping[str, Any]], speed: float) -> list[str]:
    """The helper's speed, and ms of passes: the helper's forward (or the trainer's), the trainer's backward."""
    forwards = [one["passes"]["0"][0] for one in measured if one["passes"] and one["passes"]["0"][0]]
    backwards = [one["passes"]["0"][1] for one in measured if one["passes"] and one["passes"]["0"][1]]
    return [f"{speed:.2f}" if speed else "", f"{max(forwards) * 1e3:.1f}", f"{max(backwards) * 1e3:.1f}"]


def exact(report: Report, plan: Plan, environment: Mapping[str, str]) -> None:
    """Losses of the last of some steps with forwards apart, and those of ordinary training on one device: of the same
    microbatches, by deterministic kernels."""
    options = report.options
    plan = replace(plan, sizes=replace(plan.sizes, layers=2), microbatches=4)
    cases = (
        Case(fill="nothing"),
        Case("ship", 1, 1),
        Case("again", 1, 1),
        Case("ship", 1, 1, 0.5),
    )
    gpus = [0, 1] if options.cuda and options.gpus > 1 else [0, 0]
    ranks = run_cases(report, plan, cases, gpus, [50, 50], environment, exact=True)
    found = [(case, measured[0]["losses"]) for n, case in enumerate(cases) if (measured := of_case(ranks, n))]
    rows = [[str(case), " ".join(f"{x:.6f}" for x in each), _difference(each, found[0][1])] for case, each in found]
    report.table("Losses of the last step's microbatches, and their greatest difference", ["case", "losses", ""], rows)


def _difference(losses: Sequence[float], expected: Sequence[float]) -> str:
    if len(losses) != len(expected):
        return "?"
    return f"{max(abs(a - b) for a, b in zip(losses, expected, strict=True)):g}"


if __name__ == "__main__":
    main()
