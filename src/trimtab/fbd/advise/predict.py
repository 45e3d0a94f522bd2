"""What each candidate would do: throughput, memory, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trimtab.fbd.advise import memory
from trimtab.fbd.advise.candidates import Candidate, Way, helper_forward
from trimtab.fbd.advise.flow import Flow, Stage, run
from trimtab.fbd.advise.memory import Place
from trimtab.fbd.advise.training import SAVED, Devices, Helpers, Training, exposure_at
from trimtab.fbd.sharing import ahead_of, helpers_of, partners_of

_HALF: Final = 2
"""Bytes of an element on the way."""
NOTICED: Final = 1e-3
"""Seconds until a trainer has noticed what came, or a helper that a backward is done. On an H200 over UCX both took 0.4
to 1.1 ms."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one candidate."""

    candidate: Candidate
    fits: bool
    reason: str
    """Why it does not fit, else empty."""
    step: float
    """Seconds of a step, without the optimizer and data parallel reductions, which are the same for all."""
    microbatches: int
    """That the step trains on."""
    devices: int
    """Training devices."""
    helpers: int
    trainer_bytes: float
    """At the peak, of the fullest trainer."""
    forward_bytes: float
    """At the peak, of a device that runs forwards only; 0: there is none."""
    shipped: float
    """Bytes a second that a forward device sends while it computes."""
    busy: float
    """Share of the step in which trainers compute."""

    @property
    def throughput(self) -> float:
        """Microbatches a second and training device."""
        return self.microbatches / self.step / self.devices if self.step > 0 else 0.0


def predict(training: Training, devices: Devices, candidate: Candidate, helpers: Helpers | None = None) -> Prediction:
    """The candidate's step, simulated; where it does not fit, with as much memory as it takes."""
    stages = list(_stages(training, devices, candidate, helpers))
    reason = next((why for _, why in stages if why), "")
    flow = Flow(
        tuple(stage for stage, _ in stages),
        training.microbatches * candidate.backwards,
        candidate.backwards,
        candidate.forwards,
        candidate.helped if candidate.disaggregated else 0.0,
        training.stage_transfer,
    )
    ran = run(flow)
    place = Place(candidate.pp, candidate.tp, _saved(training, candidate))
    forward_place = Place(candidate.pp, candidate.forward_tp, training.saved)
    slowest = max(stage.helper_forward for stage, _ in stages)
    volume = _volume(training, candidate) / candidate.forward_tp
    return Prediction(
        candidate,
        not reason,
        reason,
        ran.makespan,
        flow.microbatches,
        candidate.devices,
        candidate.forwards * candidate.forward_tp * candidate.pp if candidate.on_helpers else 0,
        memory.trainer_bytes(training, devices, place, max(ran.peak)),
        memory.helper_bytes(training, devices, forward_place) if candidate.disaggregated else 0.0,
        volume / slowest if candidate.disaggregated and slowest > 0 else 0.0,
        ran.busy_trainers,
    )


def bound(training: Training, devices: Devices, candidate: Candidate, helpers: Helpers | None = None) -> float:
    """Microbatches a second and training device that no order of work can exceed: of a pipeline that never runs dry, by
    its busiest trainer, forward device or link."""
    slowest = 0.0
    helped = candidate.helped if candidate.disaggregated else 0.0
    for stage, _ in _stages(training, devices, candidate, helpers):
        own = (1 - helped) * (stage.own_forward + stage.backward) + helped * stage.helped_backward
        slowest = max(slowest, own / candidate.backwards)
        if candidate.forwards:
            slowest = max(slowest, helped * max(stage.helper_forward, stage.ship) / candidate.forwards)
    return 1 / slowest / candidate.devices


def _saved(training: Training, candidate: Candidate) -> float:
    """What a microbatch leaves on a trainer."""
    return min(training.saved, SAVED["full"]) if candidate.way is Way.RECOMPUTE else training.saved


def _volume(training: Training, candidate: Candidate) -> float:
    """Bytes that the forward of one microbatch sends from all devices of a stage."""
    elements = training.hidden * training.tokens * _HALF
    if candidate.way is Way.SHIP:
        return training.saved * elements * training.layers / candidate.pp
    return float(elements)


def _stages(
    training: Training, devices: Devices, candidate: Candidate, helpers: Helpers | None
) -> Iterator[tuple[Stage, str]]:
    """Each stage, and why it does not fit."""
    place = Place(candidate.pp, candidate.tp, _saved(training, candidate))
    forward_place = Place(candidate.pp, candidate.forward_tp, training.saved)
    room = memory.room(training, devices, place)
    on = helpers if candidate.on_helpers else None
    forward_fits = not candidate.disaggregated or memory.helper_fits(training, devices, forward_place, on)
    microbatches = training.microbatches * candidate.backwards
    by: dict[int, int] = {}
    if candidate.disaggregated:
        by = helpers_of(microbatches, candidate.forwards, candidate.backwards, candidate.helped)
    partners = partners_of(by, candidate.backwards)
    for stage in range(candidate.pp):
        cap = candidate.pp - stage  # what 1F1B holds
        own = cap if len(by) < microbatches else 0
        ahead = 1
        if partners:
            wanted = ahead_of(cap - 1, candidate.forwards, candidate.backwards, partners)
            ahead = max(min(wanted, (room - own) // partners), 1)
        needed = own + partners * ahead
        reason = ""
        if room < needed:
            reason = f"stage {stage} would have room for the activations of {room} microbatches and needs {needed}"
        elif not forward_fits:
            reason = "the weights and one microbatch's activations do not fit into a forward device"
        yield _seconds(training, devices, candidate, helpers, stage, (cap, ahead)), reason


def _seconds(
    training: Training,
    devices: Devices,
    candidate: Candidate,
    helpers: Helpers | None,
    stage: int,
    holds: tuple[int, int],
) -> Stage:
    """``holds``: its cap, and how far helpers may be ahead."""
    parts = candidate.pp // training.pp
    of = stage // parts  # of the job's own stages
    scale = training.tp / candidate.tp / parts
    exposed = [
        exposure_at(table[of], training.tp, candidate.tp) / parts
        for table in (training.exposed_forward, training.exposed_backward)
    ]
    forward = training.forward[of] * scale + exposed[0]
    backward = training.backward[of] * scale + exposed[1]
    if candidate.way is Way.RECOMPUTE:
        backward += forward
    again = forward if candidate.way is Way.SEND_INPUT else 0.0
    on = helpers if candidate.on_helpers else None
    speed = 1.0 if on is None else on.speed
    elsewhere = helper_forward(training.forward[of], training.exposed_forward[of], training.tp, candidate.forward_tp)
    link = devices.bandwidth if on is None or not on.bandwidth else on.bandwidth
    both = link * min(candidate.forward_tp, candidate.tp)
    weights = devices.weight_bytes * training.weights / candidate.pp
    return Stage(
        own_forward=forward,
        helper_forward=elsewhere / speed,
        ship=_volume(training, candidate) / both,
        backward=backward,
        helped_backward=backward + again,
        cap=holds[0],
        ahead=holds[1],
        refresh=weights / both if candidate.disaggregated else 0.0,
        latency=NOTICED,
    )
