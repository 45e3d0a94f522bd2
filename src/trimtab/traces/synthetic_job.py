"""What a synthetic job is: its layout, durations, noise, clocks and faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from trimtab.topology import Topology

DeviceKind = Literal["emulated", "cuda", "cpu"]
GranularityName = Literal["step", "layer", "op"]


class FaultKind(StrEnum):
    """What can go wrong in a synthetic job; the names are those of fault injection in real ones."""

    NONE = "none"
    SLOW_COMPUTE = "slow_compute"
    """All compute of ``ranks`` takes ``factor`` times as long."""
    SLOW_CLOCK = "slow_clock"
    """As ``slow_compute``, because the GPUs of ``ranks`` run hot and at a lower clock, which the counters show."""
    SLOW_STAGE = "slow_stage"
    """Forward and backward of pipeline stage ``stage`` take ``factor`` times as long on all its ranks."""
    LONG_SEQUENCE = "long_sequence"
    """Every ``every``-th microbatch of the data parallel replica ``dp`` takes ``factor`` times as long."""
    SLOW_LINK = "slow_link"
    """Messages between the two ranks ``link``, and collectives of both, are complete ``ms`` later."""
    HOST_STALL = "host_stall"
    """The host of ``ranks`` sleeps ``ms`` once a step, in the launch of the first forward."""
    GC_PAUSE = "gc_pause"
    """As ``host_stall``, but it is a pause of the garbage collector and recorded as such."""
    SLOW_DATA = "slow_data"
    """Each read of the data iterator takes ``ms`` more on ``ranks`` (of a first or last stage)."""
    GLOBAL_SLOWDOWN = "global_slowdown"
    """All compute of all ranks takes ``factor`` times as long."""
    HIDDEN_STALL = "hidden_stall"
    """The host of ``ranks`` sleeps up to ``ms`` once a step, never longer than its device has queued work."""


@dataclass(frozen=True, slots=True)
class SyntheticFault:
    """One fault; which fields matter is said at :class:`FaultKind`."""

    kind: str
    ranks: tuple[int, ...] = ()
    stage: int | None = None
    dp: int | None = None
    link: tuple[int, int] | None = None
    factor: float = 1.5
    ms: float = 30.0
    steps: tuple[int, int | None] = (0, None)
    """First and last step concerned (None: until the end)."""
    every: int = 1
    """Every this many steps from the first on (``long_sequence``: every this many microbatches)."""
    rotate: bool = False
    """In each step concerned only one of ``ranks``, in turn."""

    def __str__(self) -> str:
        first, last = self.steps
        parts = [f"ranks={'+'.join(map(str, self.ranks))}"] if self.ranks else []
        parts += [f"stage={self.stage}"] if self.stage is not None else []
        parts += [f"dp={self.dp}"] if self.dp is not None else []
        parts += [f"ranks={self.link[0]}+{self.link[1]}"] if self.link else []
        timed = self.kind in (FaultKind.SLOW_LINK, FaultKind.HOST_STALL, FaultKind.GC_PAUSE, FaultKind.SLOW_DATA)
        parts.append(f"ms={self.ms:g}" if timed or self.kind == FaultKind.HIDDEN_STALL else f"factor={self.factor:g}")
        parts.append(f"steps={first}-{'' if last is None else last}")
        parts += [f"every={self.every}"] if self.every != 1 else []
        return f"{self.kind}:{','.join(parts)}"


@dataclass(frozen=True, slots=True)
class Link:
    """A message of ``n`` bytes takes ``latency_us`` + ``n`` / ``gb_per_s``."""

    latency_us: float = 15.0
    gb_per_s: float = 100.0

    def nanoseconds(self, nbytes: float) -> float:
        """Time of one message."""
        return self.latency_us * 1e3 + nbytes / self.gb_per_s


@dataclass(frozen=True, slots=True)
class SyntheticJob:
    """A job to simulate. Durations in milliseconds where the name says so."""

    topology: Topology = field(default_factory=Topology)
    steps: int = 12
    microbatches: int = 4
    """Per step and data parallel replica; with ``vpp`` > 1 a multiple of ``pp``."""
    layers: int = 4
    """Of the whole model, a multiple of ``pp * vpp``."""

    layer_forward_ms: float = 8.0
    backward_ratio: float = 2.0
    embedding_ms: float = 0.0
    output_ms: float = 0.0
    """Forward of the output layer on the last stage (0: none)."""
    optimizer_ms: float = 10.0
    data_ms: float = 0.5
    gc_ms: float = 0.2
    """Of the garbage collection that every rank makes between steps (0: none)."""
    gap_ms: float = 0.5
    """Host work between two steps (logging, schedules)."""
    launch_us: float = 20.0
    """Host time to launch a layer (``cuda``: also a communication)."""
    stage_weights: tuple[float, ...] = ()
    """Multiplies forward and backward of each pipeline stage; empty: all 1."""

    tp_link: Link = Link(10.0, 200.0)
    cp_link: Link = Link(10.0, 200.0)
    ep_link: Link = Link(15.0, 100.0)
    dp_link: Link = Link(20.0, 50.0)
    pp_link: Link = Link(15.0, 25.0)
    activation_bytes: int = 4 << 20
    """Of one microbatch between two layers."""
    layer_gradient_bytes: int = 24 << 20
    distributed_optimizer: bool = False
    """Reduce-scatter of gradients and all-gather of parameters in place of an all-reduce."""
    dp_overlap: bool = False
    """Gradient reduction starts with the last microbatch's backward of each chunk, beside the compute."""
    receive_ahead: bool = False
    """Receives are posted early and waited for; otherwise they block in place."""

    device: DeviceKind = "emulated"
    """``cuda``: the host runs ahead until the end of the step; ``emulated``: until the next communication;
    ``cpu``: never."""
    granularity: GranularityName = "layer"

    op_noise: float = 0.02
    """Standard deviation of the logarithm of each operation's duration."""
    rank_step_noise: float = 0.01
    """The same of a factor that all compute of one rank in one step shares."""
    transfer_noise: float = 0.05
    tail_share: float = 0.0
    """Share of compute operations that take ``tail_factor`` times as long."""
    tail_factor: float = 3.0
    clock_noise_us: float = 2.0
    """Spread of a communication's end between its members (half normal)."""
    clock_offset_ms: float = 5.0
    """Standard deviation of the hosts' clock offsets."""
    clock_drift_ppm: float = 20.0
    """Standard deviation of the hosts' clock drifts."""
    ranks_per_host: int = 8
    counter_seconds: float = 0.0
    """Counters of each rank's GPU and host are sampled this often (0: not at all)."""

    faults: tuple[SyntheticFault, ...] = ()
    seed: int = 0
    run_id: str = "synthetic"
    start_unix_ns: int = 1_750_000_000_000_000_000

    def __post_init__(self) -> None:
        _check(self)


def _check(job: SyntheticJob) -> None:
    topology = job.topology
    chunks = topology.pp * topology.vpp
    for name in ("steps", "microbatches", "layers", "ranks_per_host"):
        if getattr(job, name) < 1:
            raise ValueError(f"synthetic job: {name}={getattr(job, name)}, but at least 1 is needed")
    if job.layers % chunks:
        raise ValueError(f"synthetic job: layers={job.layers} cannot be spread evenly over pp * vpp = {chunks} chunks")
    if topology.vpp > 1 and topology.pp == 1:
        raise ValueError("synthetic job: vpp > 1 needs pp > 1")
    if topology.vpp > 1 and job.microbatches % topology.pp:
        raise ValueError(f"synthetic job: with vpp > 1, microbatches={job.microbatches} must be a multiple of pp")
    if topology.ep > 1 and (topology.dp * topology.cp) % topology.ep:
        raise ValueError(f"synthetic job: ep={topology.ep} does not divide dp * cp = {topology.dp * topology.cp}")
    if job.stage_weights and len(job.stage_weights) != topology.pp:
        raise ValueError(f"synthetic job: {len(job.stage_weights)} stage_weights for pp={topology.pp} stages")
    for fault in job.faults:
        _check_fault(job, fault)


def _check_fault(job: SyntheticJob, fault: SyntheticFault) -> None:
    kinds = [kind.value for kind in FaultKind]
    if fault.kind not in kinds:
        raise ValueError(f"synthetic fault: no kind {fault.kind!r}, choose from {', '.join(kinds)}")
    needs = {
        FaultKind.SLOW_STAGE: ("stage", fault.stage, job.topology.pp),
        FaultKind.LONG_SEQUENCE: ("dp", fault.dp, job.topology.dp),
    }
    if fault.kind in needs:
        name, value, size = needs[FaultKind(fault.kind)]
        if value is None or not 0 <= value < size:
            raise ValueError(f"synthetic fault {fault}: needs {name} between 0 and {size - 1}")
    if fault.kind == FaultKind.SLOW_LINK and (fault.link is None or fault.link[0] == fault.link[1]):
        raise ValueError(f"synthetic fault {fault}: needs link=(rank, another rank)")
    by_rank = ("slow_compute", "slow_clock", "host_stall", "gc_pause", "slow_data", "hidden_stall")
    if fault.kind in by_rank and not fault.ranks:
        raise ValueError(f"synthetic fault {fault}: needs ranks")
    for rank in (*fault.ranks, *(fault.link or ())):
        if not 0 <= rank < job.topology.world_size:
            raise ValueError(f"synthetic fault {fault}: rank {rank} is not in a world of {job.topology.world_size}")
        stage = job.topology.coordinates(rank).pp
        if fault.kind == FaultKind.SLOW_DATA and stage not in (0, job.topology.pp - 1):
            raise ValueError(f"synthetic fault {fault}: rank {rank} is on stage {stage}, which reads no data")
    if fault.kind == FaultKind.HIDDEN_STALL and job.device == "cpu":
        raise ValueError(f"synthetic fault {fault}: on a CPU nothing is queued that could hide it")
    if fault.every < 1 or fault.factor <= 0 or fault.ms < 0:
        raise ValueError(f"synthetic fault {fault}: every >= 1, factor > 0 and ms >= 0 are needed")
