"""What is under way over UCX, and with whom; and the tags by which tensors are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from trimtab.transport.interface import Label
from trimtab.transport.labels import MOST_TENSORS
from trimtab.transport.pool import Buffer
from trimtab.transport.sending import Sending
from trimtab.transport.wire import Header

TENSOR_BIT: Final = 1 << 63
"""Set in the tag of a tensor, not in that of a header, which is the sender's rank."""
SEQ_MASK: Final = (1 << 44) - 1
_SOURCE_SHIFT: Final = 48
_PLACE_BITS: Final = 4
assert MOST_TENSORS <= 1 << _PLACE_BITS, "the place of a tensor in its message has four bits of the tag"


def first_tag(source: int, seq: int) -> int:
    """The tag of the first tensor of a sender's message; those of the others follow."""
    return TENSOR_BIT | source << _SOURCE_SHIFT | seq << _PLACE_BITS


@dataclass(slots=True, eq=False)
class Send:
    """A message to be sent, or one under way."""

    to: int
    label: Label
    tensors: tuple[torch.Tensor, ...]
    ready: Callable[[], bool] | None
    due: float
    sending: Sending = field(default_factory=Sending)
    began: float = 0.0
    size: int = 0
    header: bytes = b""
    requests: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Small:
    """A header that stands alone, under way."""

    to: int
    data: bytes
    request: int


@dataclass(slots=True, eq=False)
class Receive:
    """A message whose header has come."""

    source: int
    header: Header
    buffers: list[Buffer]
    tensors: tuple[torch.Tensor, ...]
    requests: list[int]


@dataclass(slots=True)
class Peer:
    """Another rank."""

    rank: int
    token: int
    seq: int = 0
    heard: float = 0.0
    spoke: float = 0.0
    left: bool = False
