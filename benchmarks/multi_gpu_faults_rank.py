"""One rank of ``multi_gpu_faults.py``: scenarios, each a recorded run with a fault and some profiled steps after it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multi_gpu_model import SMALLER, TINY, Layout, Training, agreed, build, parallel, start, together
from multi_gpu_part import tell

ONSET = 54
"""Behind the steps from which watch learns what is usual: 2 of warm-up and, with two ranks, 48."""
STEPS = 70
PROFILED = 6
SETTLE = 3
STALL_MS = 20.0
HIDDEN_MS = 10.0
"""The host is some 16 ms ahead where it stops for so long."""


@dataclass(frozen=True)
class Scenario:
    """A fault on the last rank, and what is to be said of it."""

    name: str
    fault: str = ""
    """As ``faults.inject`` has it, ``{rank}`` for the last rank."""
    kind: str = ""
    """Of the finding that is due; empty: none is."""
    hidden_stall: bool = False
    mps: bool = False


SCENARIOS = (
    Scenario("collective", "slow_link:ranks=0+{rank},ms=5", "slow_link"),
    Scenario("healthy"),
    Scenario("x1.3", "slow_compute:rank={rank},factor=1.3", "slow_rank"),
    Scenario("stall", f"host_stall:rank={{rank}},ms={STALL_MS:g}", "host_stall"),
    Scenario("hidden-stall", hidden_stall=True),
    Scenario("x1.1", "slow_compute:rank={rank},factor=1.1", "slow_rank"),
    Scenario("mps", kind="slow_rank", mps=True),
)
"""In the order in which they run: what was never measured comes first. The one with MPS is a job of its own."""


class Stall:
    """Stops the host at the last forward of a step, when its device still has the microbatches before it to do."""

    def __init__(self, microbatches: int, cuda: bool) -> None:
        self.active = False
        self.times = 0
        self.hidden = 0
        self._microbatches = microbatches
        self._cuda = cuda

    def __call__(self, number: int) -> None:
        """A forward begins."""
        if not self.active or number % self._microbatches != self._microbatches - 1:
            return
        import torch

        event = torch.cuda.Event() if self._cuda else None
        if event is not None:
            event.record()
        time.sleep(HIDDEN_MS / 1e3)
        self.times += 1
        self.hidden += event is not None and not event.query()


def worker(plan: dict[str, Any]) -> None:
    """One rank, all scenarios of a job."""
    import torch.distributed as dist

    cuda, deadline = plan["cuda"], time.monotonic() + plan["seconds"]
    start(cuda)
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = TINY if plan["tiny"] else SMALLER
    stall = Stall(sizes.microbatches, cuda)
    out: dict[str, Any] = {"matmul_ms": _matmul_ms(cuda), "scenarios": {}}
    with parallel(Layout()) as script:
        training = build(script, Layout(), sizes, stall, overlap=False)
        for _ in range(SETTLE):
            training.step()
        longest = 0.0
        for scenario in (one for one in SCENARIOS if one.name in plan["names"]):
            began = time.monotonic()
            if not agreed(began + longest < deadline, cuda):
                break
            folder = Path(plan["folder"], scenario.name)
            stalls = stall if scenario.hidden_stall and rank == world - 1 else None
            found = _recorded(training, scenario, folder, world, stalls, cuda)
            found["profiled_ms"] = _profiled(training, scenario, folder, world, stalls, cuda)
            if stalls is not None:
                found["stalls"], found["hidden"] = stall.times, stall.hidden
            out["scenarios"][scenario.name] = found
            tell(out)
            longest = max(longest, time.monotonic() - began)
    tell(out)
    dist.destroy_process_group()


def _recorded(
    training: Training, scenario: Scenario, folder: Path, world: int, stall: Stall | None, cuda: bool
) -> dict[str, Any]:
    """The run that is recorded and watched."""
    import trimtab

    fault = f"{scenario.fault},steps={ONSET}-".format(rank=world - 1) if scenario.fault else "none"
    record, live = {"dir": str(folder / "own")}, {"look_seconds": 0.2}
    session = trimtab.attach(record=record, live=live, engine={"name": "megatron"}, faults={"inject": [fault]})
    onset = 0 if scenario.mps else ONSET
    onset_ns, times = 0, []
    for step in range(STEPS):
        if step == onset:
            onset_ns = time.time_ns()
        if stall is not None:
            stall.active = step >= ONSET
        began = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - began)
    if stall is not None:
        stall.active = False
    together(cuda)
    session.detach()
    before, after = (1e3 * statistics.median(part) for part in (times[2:ONSET], times[ONSET:]))
    return {"onset": onset, "onset_ns": onset_ns, "before_ms": before, "after_ms": after}


def _profiled(
    training: Training, scenario: Scenario, folder: Path, world: int, stall: Stall | None, cuda: bool
) -> float:
    """Steps under torch.profiler, at fault from the first on; milliseconds of one."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    import trimtab

    session = None
    if scenario.fault:
        off = {"enabled": False}
        faults = {"inject": [scenario.fault.format(rank=world - 1)]}
        session = trimtab.attach(record=off, scope=off, live=off, engine={"name": "megatron"}, faults=faults)
    if stall is not None:
        stall.active = True
    for _ in range(SETTLE):
        training.step()
    place = folder / "profile"
    place.mkdir(parents=True, exist_ok=True)
    file = str(place / f"rank{torch.distributed.get_rank()}.json")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    plan = schedule(wait=0, warmup=1, active=PROFILED, repeat=1)
    times: list[float] = []
    with profile(
        activities=activities, schedule=plan, on_trace_ready=lambda done: done.export_chrome_trace(file)
    ) as profiler:
        for _ in range(PROFILED + 1):
            began = time.perf_counter()
            training.step()
            times.append(time.perf_counter() - began)
            profiler.step()
    if stall is not None:
        stall.active = False
    if session is not None:
        session.detach()
    together(cuda)
    return 1e3 * statistics.median(times[1:-1])  # the last one writes the file


def _matmul_ms(cuda: bool) -> float:
    """A yardstick of this rank's device, by its own events."""
    if not cuda:
        return 0.0
    import torch

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    times: list[float] = []
    for _ in range(30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.mm(x, x)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
