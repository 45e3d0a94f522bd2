"""A short name of a batch, by which both sides see that they have the same one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch


def fingerprint(batch: Sequence[torch.Tensor]) -> str:
    """How many tensors, and a CRC-32 of their types, layouts and bytes. Waits for the device where they lie on one: a
    batch of tokens is small."""
    found = 0
    for one in batch:
        about = f"{one.dtype} {tuple(one.shape)} {one.stride()}"
        found = zlib.crc32(about.encode(), found)
        plain = one.detach().cpu().contiguous().reshape(-1)
        if plain.numel():
            found = zlib.crc32(plain.view(torch.uint8).numpy().tobytes(), found)
    return f"{len(batch)}:{found:08x}"
