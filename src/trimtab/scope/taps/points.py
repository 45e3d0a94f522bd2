"""Points: taps that can be connected, on this rank. Engines make them; the job's switchboard connects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap

Receive = Callable[[torch.Tensor, Moment], torch.Tensor | None]
"""Gets a tensor when it is there; a tensor in return takes its place."""
Disconnect = Callable[[], None]


class Point(Protocol):
    """A tensor that passes by: an activation or its gradient."""

    tap: Tap

    def connect(self, receive: Receive) -> Disconnect:
        """From now on ``receive`` gets it. On the training thread, between steps."""
        ...


class StatePoint(Protocol):
    """A tensor that stays: a parameter, its accumulated gradient, or a part of the optimizer's state."""

    tap: Tap

    def tensor(self) -> torch.Tensor | None:
        """The storage itself; None where there is none yet. On the training thread, between steps."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionInput:
    """What core attention was given: q (b, hq, s, d) and k (b, hk, s, d) after rotary, with this rank's heads only."""

    q: torch.Tensor
    k: torch.Tensor
    scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    """Keys to the left and to the right that a query sees; -1: all."""
    softcap: float | None = None
    mask: torch.Tensor | None = None
    """True: not seen. Broadcasts to (b, hq, s_q, s_k). What ``causal`` and ``window`` hide stays hidden."""
    packed: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cumulative lengths of the sequences packed into q and into k (b is 1 then)."""
    context: tuple[int, int, str] | None = None
    """Under context parallelism: rank, size, and how the sequence is cut (``zigzag`` or ``contiguous``)."""
    group: Any = None
    """That of context parallelism, of torch.distributed."""
    head_offset: int = 0
    """Number of the first query head in the whole model."""
    v: torch.Tensor | None = None
    """Values (b, hk, s, d of a value)."""
    bias: torch.Tensor | None = None
    """Added to the scaled scores; broadcasts to (b, hq, s_q, s_k). Minus infinity: not seen."""


class AttentionPoint(Protocol):
    """A core attention."""

    tap: Tap

    def connect(self, receive: Callable[[AttentionInput, Moment], None]) -> Disconnect:
        """From now on ``receive`` gets what it is given."""
        ...


@dataclass(frozen=True, slots=True)
class ModelPoints:
    """What one model chunk offers on this rank."""

    points: Sequence[Point] = ()
    attention: Sequence[AttentionPoint] = ()
    state: Sequence[StatePoint] = field(default=())
    """Looked at again when the optimizer has made its first step."""
