"""The settings and their defaults: one tree of frozen dataclasses, a section each."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal

MOST_WINDOW_STEPS = 1000
"""A profiler keeps every event of a window in memory."""
_SHORTEST_CONTROL_SECONDS = 0.1
_MOST_MESSAGE_KB = 65_536
Granularity = Literal["step", "layer", "op"]


def rank_ranges(text: str) -> tuple[range, ...] | None:
    """Ranks from ``0``, ``0,8-15`` or ``all`` (None); ValueError says what was expected."""
    if text.strip() == "all":
        return None
    ranges: list[range] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not (first.isdecimal() and (not dash or last.isdecimal())):
            raise ValueError("expected ranks such as 0, or 0,8-15, or all")
        ranges.append(range(int(first), int(last if dash else first) + 1))
    return tuple(ranges)


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """Windows of torch.profiler on chosen ranks: every operator and kernel of some steps, beside the spans."""

    steps: int = 0
    """Steps of a window; 0: none but those asked for while the job runs (``trimtab window``)."""
    start: int = 10
    """First step of the first window, as the recorder counts steps (from 0, since the process began)."""
    every: int = 0
    """A window begins again at every this many steps; 0: there is one."""
    ranks: str = "0"
    """Ranks that open it: ``0``, ``0,8-15`` or ``all``."""
    record_shapes: bool = False
    """The operators' shapes, too."""
    with_stack: bool = False
    """Python's stack, too; this several times the price."""
    request_seconds: float = 5.0
    """How often a rank looks whether a window is asked for (``trimtab window``); 0: never."""

    def __post_init__(self) -> None:
        if self.steps > MOST_WINDOW_STEPS:
            raise ValueError(f"must be at most {MOST_WINDOW_STEPS}")
        rank_ranges(self.ranks)


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What each rank records, and where."""

    enabled: bool = True
    dir: str = "trimtab-run"
    """Directory of the run's files; shared or local to each node. ``{host}`` in it stands for the host's name."""
    run_id: str = ""
    """Name of the run, equal on all ranks; empty: from the launcher."""
    granularity: Granularity = "layer"
    """``step``: steps and communication; ``layer``: layers, too; ``op``: also the parts of a layer."""
    every_steps: int = 1
    """Sampling: start recording at every this many steps ..."""
    for_steps: int = 1
    """... and record this many of them."""
    ring_events: int = 32_768
    """Events held in memory between the training thread and the writer; more are dropped and counted."""
    flush_seconds: float = 1.0
    """The writer wakes at least this often."""
    rotate_mb: int = 64
    """A new file begins when this size is reached (or an eighth of ``disk_mb``, if that is less) ..."""
    rotate_minutes: float = 30.0
    """... or this age; 0: at no age."""
    disk_mb: int = 1024
    """What a rank's files may take, over all attempts of the run; 0: as much as they like. Where there is more, the
    oldest detail goes first and its summary stays; then profiler windows, then the oldest summaries."""
    keep_free_mb: int = 512
    """Where less is free on the file system (a small one: less than 5 %), files go as if ``disk_mb`` were reached."""
    counter_seconds: float = 1.0
    """Counters of the GPU and the host are sampled this often, at most every 0.1 s; 0: not at all."""
    native: bool = True
    """Intercept communication by compiled kernels, which cost a third of those in Python. Where they have not been
    compiled for this environment yet, the first rank of each node does so in the background, for the runs after."""
    window: WindowConfig = field(default_factory=WindowConfig)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How trimtab attaches to the training framework."""

    name: Literal["auto", "megatron", "torch"] = "auto"
    cpu_shim: bool = False
    """Let stock Megatron-Core run without CUDA; for tests and the demo only."""


@dataclass(frozen=True, slots=True)
class EmulatePipelineConfig:
    """Emulated stages of a pipeline: its actions and messages take these times. A list has one value, or one for each
    stage; a value is the time of the stage, or the times of its chunks, ``10/12``."""

    forward_ms: tuple[str, ...] = ()
    """Forward of a microbatch; empty: stages are not emulated."""
    backward_ms: tuple[str, ...] = ()
    """Backward for the inputs; empty: as forward."""
    wgrad_ms: tuple[str, ...] = ()
    """Backward for the weights; empty: as backward."""
    link_gb_s: float = 0.0
    """Bandwidth of each link between two stages, in each direction; 0: no limit."""
    latency_ms: float = 0.0
    """Of a message, after it has left its link."""


@dataclass(frozen=True, slots=True)
class EmulateConfig:
    """Emulated devices: real arithmetic, padded to these durations in milliseconds (0: not padded)."""

    enabled: bool = False
    layer_forward_ms: float = 8.0
    """Forward of one transformer layer; its backward takes ``backward_ratio`` times as long."""
    backward_ratio: float = 2.0
    embedding_ms: float = 1.0
    output_ms: float = 1.0
    """Forward of the output layer (final norm, logits)."""
    optimizer_ms: float = 10.0
    pipeline: EmulatePipelineConfig = field(default_factory=EmulatePipelineConfig)


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """Faults to inject, for tests and drills; none unless asked for."""

    inject: tuple[str, ...] = ()
    """Each ``kind:key=value,...``, for example ``slow_compute:rank=3,factor=1.5,steps=5-``."""


@dataclass(frozen=True, slots=True)
class ScanConfig:
    """When scan calls something a finding."""

    warmup_steps: int = 1
    """Steps at the start that are not judged, where at least three others remain."""
    min_share: float = 0.01
    """A finding costs at least this share of the step time, at the lower bound."""
    stage_share: float = 0.05
    """A stage that has more to do becomes a finding from this share on."""
    confidence: float = 0.99
    """Of the lower bound, before the correction for the number of ranks and operations looked at."""


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """The channel between the ranks and whoever watches or steers them. The secret is no setting: it is in the
    environment (``TRIMTAB_CONTROL_SECRET``) or in a file that only its owner may read."""

    transport: Literal["auto", "tcp", "directory"] = "auto"
    """``tcp``; ``directory``: a shared directory, where no port may be opened; ``auto``: the hub offers both, and ranks
    that cannot reach its port use the directory."""
    bind: str = "127.0.0.1"
    """Where the hub listens, as host or host:port; the default is this host only. ``0.0.0.0`` is every network."""
    address: str = ""
    """Where ranks find the hub, as host:port; empty: in the file that the hub writes into the run directory."""
    secret_file: str = ""
    """File of the secret, for its owner only (chmod 600); empty: in the run directory, where the hub makes it."""
    directory: str = ""
    """The shared directory; empty: ``trimtab-control`` in the run directory."""
    poll_seconds: float = 2.0
    """How often the shared directory is looked at; at least 0.1."""
    heartbeat_seconds: float = 5.0
    """A connection on which nothing was said for so long says that it is there; after three and a half times this it is
    given up. At least 0.1, and the same on both sides."""
    message_kb: int = 1024
    """Longest message."""
    connections: int = 16_384
    """That the hub takes at the same time."""

    def __post_init__(self) -> None:
        if min(self.poll_seconds, self.heartbeat_seconds) < _SHORTEST_CONTROL_SECONDS:
            raise ValueError(f"must be at least {_SHORTEST_CONTROL_SECONDS:g}")
        if not 1 <= self.message_kb <= _MOST_MESSAGE_KB or self.connections < 1:
            raise ValueError(f"must be 1 or more (control.message_kb at most {_MOST_MESSAGE_KB})")


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """What ranks say of themselves while they run, to a hub that is there; without one nothing is sent."""

    enabled: bool = True
    """Look for a hub, and tell it of each step."""
    every: int = 1
    """Steps of a summary, at least; what has ended since the writer's last round is told together."""
    heartbeat_seconds: float = 5.0
    """How often a rank says what it is doing, whether it gets on or not; at least 0.1."""
    look_seconds: float = 5.0
    """How often a rank looks for the hub's file in the run directory; at least 0.1."""

    def __post_init__(self) -> None:
        if min(self.heartbeat_seconds, self.look_seconds) < _SHORTEST_CONTROL_SECONDS:
            raise ValueError(f"must be at least {_SHORTEST_CONTROL_SECONDS:g}")


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """In which order each pipeline stage runs its microbatches; ``off`` leaves the framework's own schedule."""

    policy: Literal["off", "static", "hint", "greedy", "auto"] = "off"
    """``static``: the order as planned; ``hint``: it, with bounded deviation where an input is late; ``greedy``: what
    is ready, oldest backward first; ``auto``: ``hint``, leaning depth-first as memory gets tight and breadth-first as
    links saturate."""
    order: str = "auto"
    """The planned order: gpipe, 1f1b, interleaved, bfc, dfc, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v; ``auto``:
    by the model's chunks; or a .csv file of torch.distributed.pipelining."""
    placement: Literal["loop", "v"] = "loop"
    """How the model's chunks lie over the stages; ``v`` needs an even number of chunks a stage."""
    split: bool = True
    """Compute the gradients of weights apart from those of inputs, as filler."""
    memory_cap: str = ""
    """What activations may take on a stage: microbatches (``4.5``) or bytes (``12GB``); empty: what the order needs,
    and one microbatch more."""
    theta: float = 0.5
    """Wait for the next planned action if its input is expected within this share of the alternative's duration."""
    lookahead: int = 6
    """How far ahead in the plan an alternative is looked for."""
    reductions: Literal["planned", "agreed"] = "planned"
    """In which order data parallel replicas that decide for themselves reduce the gradients of their chunks: that in
    which the plan completes them, or as each is complete on all replicas, which these agree on while they run."""
    timeout_seconds: float = 600.0
    """A stage that hears nothing it waits for in this time raises an error."""
    decisions: str = ""
    """Directory for what each stage decided, one file a rank; empty: not kept."""
    replay: str = ""
    """Directory of decisions to repeat exactly."""

    def __post_init__(self) -> None:
        if self.theta < 0 or self.lookahead < 1:
            raise ValueError("pipeline.theta must be at least 0 and pipeline.lookahead at least 1")
        if self.timeout_seconds <= 0:
            raise ValueError("pipeline.timeout_seconds must be positive")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """How activations and their gradients travel between pipeline stages."""

    kind: Literal["auto", "ucx", "torch"] = "auto"
    """``ucx``: needs UCX on the system, in the environment or as the wheel libucx; ``torch``: torch.distributed;
    ``auto``: ucx where it can be loaded."""
    ucx_library: str = ""
    """Path of libucp.so; empty: looked for."""
    credits: int = 4
    """Messages on their way that a receiver has buffers for, for each peer, direction and chunk; at least 1."""

    def __post_init__(self) -> None:
        if self.credits < 1:
            raise ValueError("transport.credits must be at least 1")


@dataclass(frozen=True, slots=True)
class ScopeConfig:
    """Looking into the model while it trains, and disturbing it; nothing is hooked until somebody asks for it."""

    enabled: bool = True
    """Look for a hub, and do what its collector asks."""
    look_seconds: float = 1.0
    """How often a rank looks for the hub's file in the run directory; at least 0.1."""
    budget: float = 0.01
    """Share of the training time that subscriptions may take; above it they pause."""
    allow_perturb: bool = False
    """Let whoever holds the secret disturb the training."""
    compiled_taps: bool = False
    """Place taps into what torch.compile compiles; without them only what runs eagerly can be seen."""
    serve: str = ""
    """``host:port`` (port 0: any): rank 0 starts ``trimtab scope serve`` beside the job; empty: it does not."""
    lease_seconds: float = 30.0
    """Subscriptions pause when the collector has been away for so long."""
    subscriptions: int = 64
    """Most at the same time."""
    frame_mb: int = 8
    """Most that a rank sends of one step."""
    ring_mb: int = 16
    """Pinned memory for what is on its way from the device."""

    def __post_init__(self) -> None:
        if min(self.look_seconds, self.lease_seconds) < _SHORTEST_CONTROL_SECONDS:
            raise ValueError(f"must be at least {_SHORTEST_CONTROL_SECONDS:g}")
        if not 0 < self.budget <= 1:
            raise ValueError("scope.budget must be a share above 0 and at most 1")
        if min(self.subscriptions, self.frame_mb, self.ring_mb) < 1:
            raise ValueError("must be 1 or more")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree."""

    record: RecordConfig = field(default_factory=RecordConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    scan: ScanConfig = field(default_factory=ScanConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    live: LiveConfig = field(default_factory=LiveConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    scope: ScopeConfig = field(default_factory=ScopeConfig)


assert all(is_dataclass(getattr(Config(), part.name)) for part in fields(Config))
