"""The transport's buffers on a stage: kept while a microbatch needs them, and given back once nobody reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from trimtab.pipeline.actions import Action

if TYPE_CHECKING:
    from trimtab.transport.interface import Message

_count: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore


class Buffers:
    """Of the messages whose tensors a stage's actions have taken.

    Autograd keeps an input until its backward, and a gradient until the weights have theirs. A module may keep a
    tensor longer, which is its right; then its buffer is left to it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], list[tuple[Message, int]]] = {}

    def keep(self, action: Action, message: Message) -> None:
        """An action begins with this message; nobody else has its tensors yet."""
        self._kept.setdefault((action.chunk, action.microbatch), []).append((message, _uses(message)))

    def give_back(self, action: Action) -> None:
        """The microbatch is done with in this chunk."""
        for message, uses in self._kept.pop((action.chunk, action.microbatch), ()):
            if _uses(message) <= uses:
                message.release()


def _uses(message: Message) -> int:
    """How many hold a message's tensors, or others with their storages."""
    return sum(sys.getrefcount(t) + _count(t.untyped_storage()._cdata) for t in message.tensors)  # pyright: ignore
