"""Which elements of a tensor are disturbed: all, a mask, or a few by their coordinates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb import philox
from trimtab.scope.perturb.place import Place, heads_in, tokens_in
from trimtab.scope.perturbation import Perturbation, beyond, digest

NOISE = 0
CHOICE = 1
BITS = 2
"""Purposes: bits of the n-th chosen one are drawn for ``BITS + n``."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some elements of a rank's tensor; at most one of ``mask`` and ``coordinates`` is there, none means all."""

    mask: torch.Tensor | None = None
    """bool, broadcasts to the tensor's shape."""
    coordinates: tuple[torch.Tensor, ...] | None = None
    """int64, one for each dimension, as in ``tensor[coordinates]``."""
    index: torch.Tensor | None = None
    """With ``coordinates``: int64, their indices in the flattened whole tensor."""


def key_of(perturbation: Perturbation, tap: str) -> int:
    """64 bits that all ranks have alike for one tensor."""
    return int.from_bytes(digest("key", perturbation.seed, tap)[:8], "little")


def choose(perturbation: Perturbation, tap: Tap, place: Place, moment: Moment, device: torch.device) -> Part:
    """The elements of a rank's tensor that are disturbed at a moment.

    ValueError where the tensor has no such part. A stuck element is the same at every moment.
    """
    wanted: dict[str, Any] | None = perturbation.parameters.get("part")
    if not wanted:
        return Part()
    at = Moment(0, 0) if perturbation.kind == "stuck" else moment
    if "indices" in wanted:
        return _few(wanted["indices"], place, device)
    if "elements" in wanted:
        return _few(drawn(perturbation, tap.name, int(wanted["elements"]), place.size, at), place, device)
    mask = _slices(wanted, tap, place, device)
    if "fraction" in wanted:
        key, share = key_of(perturbation, tap.name), float(wanted["fraction"])
        chosen = philox.below(share, key, place.index(device), at.step, at.microbatch, CHOICE)
        mask = chosen if mask is None else mask & chosen
    return Part(mask=mask)


def drawn(perturbation: Perturbation, tap: str, count: int, size: int, moment: Moment) -> list[int]:
    """So many different indices of a whole tensor of ``size`` elements, in order."""
    seed = digest("elements", perturbation.seed, tap, moment.step, moment.microbatch)
    return sorted(random.Random(seed).sample(range(size), min(count, size)))


def _few(indices: Sequence[int], place: Place, device: torch.device) -> Part:
    found, coordinates = place.here(indices)
    columns = list(zip(*coordinates, strict=True)) if coordinates else [()] * len(place.whole)
    tensors = tuple(torch.tensor(column, dtype=torch.int64, device=device) for column in columns)
    return Part(coordinates=tensors, index=torch.tensor(found, dtype=torch.int64, device=device))


def _slices(wanted: dict[str, Any], tap: Tap, place: Place, device: torch.device) -> torch.Tensor | None:
    """Tokens, heads and channels, in numbers of the whole tensor."""
    mask: torch.Tensor | None = None
    shape = place.shape
    for name, numbers in wanted.items():
        if name == "fraction":
            continue
        numbered: torch.Tensor | None = None
        total = 0
        if name == "tokens":
            dimension = tokens_in(tap, shape)
        elif name == "heads":
            dimension, each = heads_in(tap, shape) or (None, 1)
            if dimension is not None:
                assert tap.heads is not None
                total = tap.heads[2]
                numbered = tap.heads[0] + torch.arange(shape[dimension], device=device) // each
        else:
            dimension = len(shape) - 1 if shape else None
        if dimension is None:
            raise ValueError(f"{tap.name} has no dimension of {name}")
        if name != "tokens" and (problem := beyond(name[:-1], [min(numbers)], total or place.whole[dimension])):
            raise ValueError(f"{tap.name}: {problem}")  # tokens may be there the next time
        positions = place.positions(dimension, device) if numbered is None else numbered
        here = torch.isin(positions, torch.tensor(numbers, dtype=torch.int64, device=device))
        here = here.reshape([-1] + [1] * (len(shape) - 1 - dimension))
        mask = here if mask is None else mask & here
    return mask
