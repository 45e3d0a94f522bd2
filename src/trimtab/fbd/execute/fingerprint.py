"""A number that tells batches apart, by which both sides see that they have the same one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Final

import torch

_FACTOR: Final = 2654435761
"""Knuth's multiplier; with odd weights any single change shows."""
_PLACES: Final = 31
"""Its powers, of tensors in a batch."""
_LOW: Final = (1 << 35) - 1


def layout_of(batch: Sequence[torch.Tensor]) -> str:
    """How many tensors, and a CRC-32 of their types, shapes and strides."""
    about = ";".join(f"{one.dtype} {tuple(one.shape)} {one.stride()}" for one in batch)
    return f"{len(batch)}:{zlib.crc32(about.encode()):08x}"


def fingerprint(batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """A hash of the bytes of a batch, as one int64, the same whatever devices its tensors lie on: on the CPU if all of
    them do, else on the device of the others, and then nobody has waited for that."""
    host = 0
    elsewhere: torch.Tensor | None = None
    for number, one in enumerate(batch):
        place = _wrapped(pow(_PLACES, number))
        host += number * place
        if not one.numel():
            continue
        found = _hash(one)
        if one.device.type == "cpu":
            host += int(found) * place
        else:
            elsewhere = found * place if elsewhere is None else elsewhere + found * place
    known = _wrapped(host)
    return torch.tensor([known]) if elsewhere is None else elsewhere + known


def _wrapped(number: int) -> int:
    """As int64 has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _hash(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of all words, each times an odd weight of its own; int64 wraps around."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    rest = -plain.numel() % 8
    if rest:
        plain = torch.cat([plain, plain.new_zeros(rest)])
    words = plain.view(torch.int64)
    weights = torch.arange(words.numel(), device=words.device) * (2 * _FACTOR) + 1
    # High bits reach low ones (a shift without its sign, so that no two words become one): two words that differ in the
    # highest bit alone, such as a number and its negative, could otherwise change places.
    return ((words ^ ((words >> 29) & _LOW)) * weights).sum().reshape(1)
