"""What travels between forward and backward ranks besides activations, gradients and weights: what the loss function
returned, for callers of the schedule on backward ranks, and states of random generators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from trimtab.engines.megatron_pipeline.handover import count, packed, unpacked
from trimtab.fbd.execute.mail import Mail
from trimtab.transport.interface import Label
from trimtab.transport.labels import MOST_PARTS, MOST_TENSORS

_RESULT: Final = 16
_STATES: Final = 17
"""Chunks of labels, of those that are an engine's."""


def send_result(mail: Mail, to: int, step: int, microbatch: int, result: tuple[Any, torch.Tensor]) -> None:
    """What the loss function returned of a microbatch, and how many tokens it was of. ValueError where something of it
    cannot travel."""
    returned, tokens = result
    said, *tensors = packed([returned], tokens, tokens.device)
    parts = [[said], *(tensors[at : at + MOST_TENSORS] for at in range(0, len(tensors), MOST_TENSORS))]
    if len(parts) > MOST_PARTS:
        raise ValueError(f"the loss function returned {len(tensors)} tensors, which are too many to hand on")
    for number, part in enumerate(parts):
        mail.send(to, Label(False, _RESULT, microbatch, step, number), part)


def receive_result(mail: Mail, source: int, step: int, microbatch: int) -> tuple[Any, torch.Tensor]:
    """The other end of :func:`send_result`."""
    (said,) = list(mail.message(source, Label(False, _RESULT, microbatch, step)).tensors)
    tensors: list[torch.Tensor] = []
    for number in range(1, 1 - -count(said) // MOST_TENSORS):
        tensors += mail.message(source, Label(False, _RESULT, microbatch, step, number)).tensors
    (returned,), tokens = unpacked(said, tensors)
    return returned, tokens


def has_result(mail: Mail, source: int, step: int, microbatch: int) -> bool:
    """Whether all of it has come."""
    first = Label(False, _RESULT, microbatch, step)
    return mail.has(source, first) and mail.has(source, first._replace(part=1))


def send_states(mail: Mail, to: int, step: int, states: Sequence[torch.Tensor]) -> None:
    """States of random generators."""
    for number, one in enumerate(states):
        mail.send(to, Label(False, _STATES, len(states), step, number), [one])


def receive_states(mail: Mail, source: int, step: int, number: int) -> list[torch.Tensor]:
    """``number`` of them. TransportError where the other side has another number of generators."""
    messages = [mail.message(source, Label(False, _STATES, number, step, part)) for part in range(number)]
    return [one for message in messages for one in message.tensors]
