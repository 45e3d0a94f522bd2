"""Numbers that look random and follow from a key and a position alone, so that no rank has to ask another.

Philox 4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in whole-number
operations of torch, which give the same bits on every device. What is drawn for an element depends on the index of
the element in the whole tensor: replicas get the same, shards the part that belongs to them, a second pass the same
once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch

_MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_CHUNK: Final = 1 << 20
"""Elements at a time, so that what is in between stays small."""


def words(key: int, index: torch.Tensor, step: int, microbatch: int, purpose: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two independent 32-bit words (as int64, >= 0) for each of the int64 ``index``, which are >= 0.

    ``key`` has 64 bits; ``purpose`` (below 256) tells apart what is drawn for one element at one moment.
    """
    counter = (
        index & _MASK,
        (index >> 32) & _MASK,
        torch.full_like(index, step & _MASK),
        torch.full_like(index, ((microbatch & 0xFFFFFF) << 8) | purpose),
    )
    found = philox(counter, (key & _MASK, (key >> 32) & _MASK))
    return found[0], found[1]


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four words that belong to a counter of four words; words are int64 from 0 to 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product has 64 bits; as int64 it wraps, and its bits are right all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((p0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = p1 & _MASK, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(key: int, index: torch.Tensor, step: int, microbatch: int, purpose: int) -> torch.Tensor:
    """float64 in [0, 1), of the shape of ``index``."""
    return _in_chunks(index, lambda part: words(key, part, step, microbatch, purpose)[0].double() * 2.0**-32)


def normal(key: int, index: torch.Tensor, step: int, microbatch: int, purpose: int) -> torch.Tensor:
    """float64 with mean 0 and standard deviation 1 (Box and Muller), of the shape of ``index``.

    Devices round logarithm and cosine differently in the last of 53 bits, which is gone in what is rounded to float32.
    """

    def draw(part: torch.Tensor) -> torch.Tensor:
        first, second = words(key, part, step, microbatch, purpose)
        radius = torch.sqrt(-2.0 * torch.log((first.double() + 1.0) * 2.0**-32))
        return radius * torch.cos(second.double() * (2.0 * math.pi * 2.0**-32))

    return _in_chunks(index, draw)


def one_of(count: int, key: int, index: torch.Tensor, step: int, microbatch: int, purpose: int) -> torch.Tensor:
    """int64 from 0 to ``count - 1``, of the shape of ``index``."""

    def draw(part: torch.Tensor) -> torch.Tensor:
        return (words(key, part, step, microbatch, purpose)[0] * count) >> 32

    return _in_chunks(index, draw, torch.int64)


def below(share: float, key: int, index: torch.Tensor, step: int, microbatch: int, purpose: int) -> torch.Tensor:
    """bool, true for that share of the elements, of the shape of ``index``."""
    limit = round(share * 2.0**32)

    def draw(part: torch.Tensor) -> torch.Tensor:
        return words(key, part, step, microbatch, purpose)[0] < limit

    return _in_chunks(index, draw, torch.bool)


def _in_chunks(
    index: torch.Tensor, draw: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    flat = index.reshape(-1)
    if flat.numel() <= _CHUNK:
        return draw(flat).reshape(index.shape)
    found = torch.empty(flat.shape, dtype=dtype, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        found[start : start + _CHUNK] = draw(flat[start : start + _CHUNK])
    return found.reshape(index.shape)
