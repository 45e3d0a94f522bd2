"""What counters say of a finding: sentences of evidence, only where the difference is plain.

A counter is compared over the finding's steps with the peers' median, or, where everybody is concerned, with the
other steps. What is equal everywhere explains nothing and is not cited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.events import NAME_GPU, NAME_HOST
from trimtab.scan.arrays import Ints
from trimtab.scan.candidates import Candidate, Context
from trimtab.scan.causes.kernels import describe_kernels
from trimtab.scan.counters import Counters, Readings, spread
from trimtab.scan.model import FindingKind, Pattern

LEAST_SAMPLES = 3
"""Of the rank in the finding's steps; fewer say nothing."""
LEAST_DIFFERENCE = 0.03
"""Of a clock or a limit, as a share."""
LEAST_THROTTLED = 0.25
"""Share of samples with a throttle reason, beyond the peers' share."""
LEAST_WARMER = 5.0
"""Degrees."""
CROWDED = 1.2
"""Tasks that want to run for each CPU of the host."""
LEAST_WAIT = 0.05
"""Share of the time that a process wanted to run and could not, beyond the peers' share."""
TIMES = 3.0
"""A count is plainly more than the peers' from this factor on."""
MOST_PEERS = 32
NO_REASONS = ("gpu_idle", "applications_clocks_setting")
"""Throttle reasons that are somebody's wish and no trouble."""


def cite(context: Context, candidate: Candidate, hosts: Sequence[str]) -> list[str]:
    """Evidence from kernels and counters for ``candidate``; ``hosts`` names the host of each dense rank."""
    return describe_kernels(context, candidate) + _counted(context, candidate, hosts)


def _counted(context: Context, candidate: Candidate, hosts: Sequence[str]) -> list[str]:
    first, last = candidate.first, candidate.last
    if candidate.kind == FindingKind.GLOBAL_SLOWDOWN:
        return _gpu_lines(_all_against_other_steps(context, candidate))
    if candidate.kind == FindingKind.SLOW_LINK:
        return [line for rank in candidate.ranks for line in _error_lines(context, int(rank), candidate)]
    if candidate.pattern == Pattern.ROTATING:
        return []
    rank = int(candidate.ranks[0])
    if candidate.kind in (FindingKind.SLOW_RANK, FindingKind.SLOW_STAGE):
        lines = _gpu_lines(_gpus(context, candidate.ranks, first, last))
        on_host = len(candidate.ranks) == 1 and context.table.synchronous_device[rank]
        return lines + (_host_lines(context, rank, first, last, hosts) if on_host else [])
    if candidate.kind in (FindingKind.HOST_STALL, FindingKind.DATA_LOADING) and len(candidate.ranks) == 1:
        return _host_lines(context, rank, first, last, hosts)
    return []


def clocked_down(context: Context, ranks: Ints, first: int, last: int, ratio: float) -> bool:
    """Whether a lower clock of the GPUs of the (dense) ``ranks`` explains half of their being slow by ``ratio``, or
    more."""
    compared = _gpus(context, ranks, first, last)
    if not compared.lower("sm_clock_mhz"):
        return False
    slower = compared.usual("sm_clock_mhz") / compared.mine.median("sm_clock_mhz")
    return math.log(slower) >= 0.5 * math.log(ratio)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Readings of one rank, and those that they are held against."""

    mine: Readings
    others: tuple[Readings, ...]
    where: str
    """Where the others are, as words."""

    def usual(self, name: str, of: Callable[[Readings, str], float] = Readings.median) -> float:
        """Median over the others; NaN where none has it."""
        return _median(of(readings, name) for readings in self.others)

    def enough(self, name: str) -> bool:
        """Whether there are samples to compare."""
        return len(self.mine.values(name)) >= LEAST_SAMPLES and math.isfinite(self.usual(name))

    def lower(self, name: str) -> bool:
        """Plainly below the others: in the median, and in three samples of four."""
        if not self.enough(name):
            return False
        usual = self.usual(name)
        mine = self.mine.values(name)
        return bool(0 < np.median(mine) < (1 - LEAST_DIFFERENCE) * usual and np.quantile(mine, 0.75) < usual)

    def reasons(self) -> dict[str, float]:
        """Throttle reasons that hold for plainly more of the samples than elsewhere, and for what share."""
        if len(self.mine.samples) < LEAST_SAMPLES:
            return {}
        there = [readings.throttled() for readings in self.others if readings.samples]
        found = {
            reason: share
            for reason, share in self.mine.throttled().items()
            if there
            and reason not in NO_REASONS
            and share >= LEAST_THROTTLED + _median(shares.get(reason, 0.0) for shares in there)
        }
        if len(found) > 1:
            found.pop("hw_slowdown", None)  # the bit above thermal slowdown and power brake
        return found


def _gpus(context: Context, ranks: Ints, first: int, last: int) -> _Compared:
    """The GPU of one rank against its peers', those of several against all others'; without peers against its own
    other steps, or else the other ranks'."""
    counters, peers = context.counters, context.measures.peers
    mine = _joined(counters.of(NAME_GPU, rank, first, last).busy() for rank in spread(ranks, MOST_PEERS))
    one = int(ranks[0])
    alone = bool(peers.alone[one])
    if alone and (first, last) != (0, counters.steps - 1):
        return _Compared(mine, (_outside(counters, one, first, last),), "in its other steps")
    among_peers = len(ranks) == 1 and not alone
    same = np.flatnonzero(peers.group == peers.group[one]) if among_peers else np.arange(context.table.ranks)
    others = spread(np.setdiff1d(same, ranks), MOST_PEERS)
    readings = tuple(counters.of(NAME_GPU, other, first, last).busy() for other in others)
    return _Compared(mine, readings, "on its peers" if among_peers else "on the other ranks")


def _outside(counters: Counters, rank: int, first: int, last: int) -> Readings:
    """Of a rank's GPU in the other steps."""
    return _joined(
        counters.of(NAME_GPU, rank, *steps).busy() for steps in ((0, first - 1), (last + 1, counters.steps - 1))
    )


def _all_against_other_steps(context: Context, candidate: Candidate) -> _Compared:
    """The GPUs of all ranks in the candidate's steps, against the same ones in the other steps."""
    counters, first, last = context.counters, candidate.first, candidate.last
    ranks = spread(candidate.ranks, MOST_PEERS)
    within = _joined(counters.of(NAME_GPU, rank, first, last).busy() for rank in ranks)
    outside = _joined(_outside(counters, rank, first, last) for rank in ranks)
    return _Compared(within, (outside,), "in the other steps")


def _joined(parts: Iterable[Readings]) -> Readings:
    return Readings(tuple(sample for part in parts for sample in part.samples))


def _gpu_lines(compared: _Compared) -> list[str]:
    mine = compared.mine
    lower, reasons = compared.lower("sm_clock_mhz"), compared.reasons()
    lines: list[str] = []
    if lower or reasons:
        parts: list[str] = []
        if compared.enough("sm_clock_mhz"):
            parts.append(_against(compared, "sm_clock_mhz", "SM clock", " MHz") + f" {compared.where}")
        if reasons:
            shares = ", ".join(f"{reason} in {share:.0%} of samples" for reason, share in reasons.items())
            parts.append(f"throttled: {shares}")
        if mine.median("temperature_c") >= compared.usual("temperature_c") + LEAST_WARMER:
            parts.append(_against(compared, "temperature_c", "temperature", " °C"))
        if compared.lower("power_limit_w"):
            parts.append(_against(compared, "power_limit_w", "power limit", " W"))
        if compared.lower("sm_clock_set_mhz"):
            parts.append(_against(compared, "sm_clock_set_mhz", "applications clock set to", " MHz"))
        lines.append("; ".join(parts))
    if compared.lower("memory_clock_mhz"):
        lines.append(_against(compared, "memory_clock_mhz", "memory clock", " MHz") + f" {compared.where}")
    broken = mine.growth("ecc_uncorrected_total")
    if broken > 0:
        lines.append(f"{broken:,.0f} uncorrected ECC errors of its GPU")
    return lines


def _against(compared: _Compared, name: str, words: str, unit: str) -> str:
    return f"{words} {compared.mine.median(name):,.0f}{unit} against {compared.usual(name):,.0f}"


_ERRORS = {
    "nvlink_crc_errors_total": "NVLink CRC errors",
    "nvlink_replays_total": "NVLink replays",
    "nvlink_recoveries_total": "NVLink recoveries",
    "pcie_replays_total": "PCIe replays",
    "ecc_corrected_total": "corrected ECC errors",
    "ecc_uncorrected_total": "uncorrected ECC errors",
}


def _error_lines(context: Context, rank: int, candidate: Candidate) -> list[str]:
    """Errors that the GPU at an end of a link counted, against the ranks that are not part of it."""
    counters, first, last = context.counters, candidate.first, candidate.last
    apart = np.setdiff1d(np.arange(context.table.ranks), candidate.ranks)
    compared = _Compared(
        counters.of(NAME_GPU, rank, first, last),
        tuple(counters.of(NAME_GPU, other, first, last) for other in spread(apart, MOST_PEERS)),
        "elsewhere",
    )
    name = int(context.table.ids[rank])
    found: list[str] = []
    for counter, words in _ERRORS.items():
        grown, usual = compared.mine.growth(counter), compared.usual(counter, Readings.growth)
        if grown > 0 and not grown < TIMES * usual:
            found.append(f"{grown:,.0f} {words}" + (f" ({usual:,.0f} elsewhere)" if math.isfinite(usual) else ""))
    lines = [f"the GPU of rank {name} counted {', '.join(found)}"] if found else []
    if compared.lower("pcie_width") or compared.lower("pcie_generation"):
        generation, width = (compared.mine.median(c) for c in ("pcie_generation", "pcie_width"))
        usual = f"{compared.usual('pcie_generation'):.0f} x{compared.usual('pcie_width'):.0f}"
        lines.append(
            f"the PCIe link of rank {name} runs at generation {generation:.0f} x{width:.0f}, others at {usual}"
        )
    return lines


def _host_lines(context: Context, rank: int, first: int, last: int, hosts: Sequence[str]) -> list[str]:
    """What kept a rank's host from its work, against the other ranks; for the host itself, other hosts."""
    counters = context.counters
    mine = counters.of(NAME_HOST, rank, first, last)
    if len(mine.samples) < LEAST_SAMPLES:
        return []
    ranks = np.arange(context.table.ranks)
    away = ranks[[host != hosts[rank] for host in hosts]]

    def against(others: Sequence[int], where: str) -> _Compared:
        readings = (counters.of(NAME_HOST, other, first, last) for other in spread(others, MOST_PEERS))
        return _Compared(mine, tuple(one for one in readings if one.samples), where)

    machine = against(away.tolist(), "on other hosts")
    process = against(ranks[ranks != rank].tolist(), "on the other ranks")
    return [*_machine_lines(machine), *_process_lines(process)]


def _machine_lines(compared: _Compared) -> list[str]:
    lines: list[str] = []
    load, cpus = compared.mine.median("load_1m"), compared.mine.median("cpus")
    usual = _median(one.median("load_1m") / one.median("cpus") for one in compared.others if one.median("cpus") > 0)
    if cpus > 0 and load >= CROWDED * cpus and not load / cpus < CROWDED * usual:
        versus = f" ({usual:.1f} for each CPU {compared.where})" if math.isfinite(usual) else ""
        lines.append(f"host load {load:,.0f} on {cpus:,.0f} CPUs{versus}")
    return lines + _rate_line(compared, "swapped_in_pages", 100.0, "pages swapped in a second")


def _process_lines(compared: _Compared) -> list[str]:
    lines: list[str] = []
    cpus, usual = compared.mine.median("cpus_available"), compared.usual("cpus_available")
    if cpus < 0.75 * usual:
        lines.append(f"{cpus:g} CPUs available to it against {usual:g} {compared.where}")
    waits = {
        "main_thread_wait_share": "its main thread waited for a CPU",
        "cgroup_throttled_share": "the CPU quota of its cgroup held it back",
    }
    for name, words in waits.items():
        share, usual = compared.mine.median(name), compared.usual(name)
        if share >= LEAST_WAIT and not share < usual + LEAST_WAIT:
            versus = f" ({usual:.0%} {compared.where})" if math.isfinite(usual) else ""
            lines.append(f"{words} {share:.0%} of the time{versus}")
    lines += _rate_line(compared, "involuntary_switches", 100.0, "involuntary context switches a second")
    return lines + _rate_line(compared, "major_faults", 10.0, "major page faults a second")


def _rate_line(compared: _Compared, name: str, least: float, words: str) -> list[str]:
    """A rate of at least ``least`` a second that is plainly above the others'; without others, as it is."""
    rate, usual = compared.mine.rate(name), compared.usual(name, Readings.rate)
    if not rate >= least or rate < TIMES * usual:
        return []
    return [f"{rate:,.0f} {words}" + (f" ({usual:,.0f} {compared.where})" if math.isfinite(usual) else "")]


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.median(known)) if known else float("nan")
