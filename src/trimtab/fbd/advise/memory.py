"""Bytes that a device of a stage needs, and how many microbatches' activations fit beside the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trimtab.fbd.advise.training import Devices, Helpers, Training

_HALF: Final = 2
"""Bytes of an element of an activation: bf16 or fp16."""
_SINGLE: Final = 4


@dataclass(frozen=True, slots=True)
class Place:
    """What a device holds: one stage of ``stages``, divided over ``tp`` devices."""

    stages: int
    tp: int
    saved: float
    """Elements of the hidden size a token and layer that a forward leaves here."""


def saved_bytes(training: Training, place: Place) -> float:
    """Bytes that the forward of one microbatch leaves on a device; with sequence parallelism all of it is divided."""
    return place.saved * training.hidden * training.tokens * _HALF * training.layers / place.stages / place.tp


def logits_bytes(training: Training, place: Place) -> float:
    """Bytes of the loss's softmax in float32 on a device of the last stage."""
    return float(_SINGLE * training.vocabulary * training.tokens) / place.tp


def trainer_state(training: Training, devices: Devices, place: Place) -> float:
    """Weights, gradients and the optimizer's state on a device."""
    each = devices.weight_bytes + devices.gradient_bytes + devices.optimizer_bytes
    return each * training.weights / (place.stages * place.tp)


def helper_bytes(training: Training, devices: Devices, place: Place) -> float:
    """A device that runs forwards only: weights, beside which new ones come, and what three forwards leave: two are on
    their way while the third runs."""
    weights = devices.weight_bytes * training.weights / (place.stages * place.tp)
    return 2 * weights + 3 * saved_bytes(training, place) + logits_bytes(training, place)


def room(training: Training, devices: Devices, place: Place) -> int:
    """How many microbatches a training device can hold the activations of."""
    left = devices.memory - devices.reserve - trainer_state(training, devices, place) - logits_bytes(training, place)
    return max(0, int(left / saved_bytes(training, place)))


def trainer_bytes(training: Training, devices: Devices, place: Place, held: int) -> float:
    """At the peak, with so many microbatches held."""
    return (
        devices.reserve
        + trainer_state(training, devices, place)
        + logits_bytes(training, place)
        + held * saved_bytes(training, place)
    )


def helper_fits(training: Training, devices: Devices, place: Place, helpers: Helpers | None) -> bool:
    """Has a forward device, a helper or one like the others, room for its weights and what it is about to send?"""
    memory = devices.memory if helpers is None else helpers.memory
    reserve = min(devices.reserve, memory / 8)
    return helper_bytes(training, devices, place) + reserve <= memory
