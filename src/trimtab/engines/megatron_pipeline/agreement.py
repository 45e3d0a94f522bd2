"""What all ranks of a model have to agree on before its first iteration: one that could not would leave the others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from trimtab.transport.opening import group_exchange


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank says, or what several do together."""

    problem: str = ""
    """Why this rank cannot; of several, that of the first."""
    rank: int = 0
    """Whose problem it is."""
    share: float = 1.0
    """Of its parameters, whose gradients can be computed apart; of several, the least."""
    settings: tuple[str, ...] = ()
    """What must be equal everywhere; of several, those that differ."""

    def joined(self, other: Said) -> Said:
        """Both together; in any order, however often."""
        first = min((one for one in (self, other) if one.problem), key=lambda one: one.rank, default=self)
        settings = tuple(sorted({*self.settings, *other.settings}))[:2]
        return Said(first.problem, first.rank, min(self.share, other.share), settings)


def agree(said: Said, groups: Iterable[Any]) -> Said:
    """What all ranks say that the groups, one after the other, connect: collective, and the same on all of them.

    :raises ValueError: one has a problem, or they were not started with the same settings.
    """
    for group in groups:
        if group is None or dist.get_world_size(group) < 2:
            continue
        answers = group_exchange(group)(json.dumps(asdict(said)).encode())
        for answer in answers:
            values = json.loads(answer)
            said = said.joined(Said(**{**values, "settings": tuple(values["settings"])}))
    if said.problem:
        raise ValueError(said.problem)
    if len(said.settings) > 1:
        raise ValueError(f"ranks differ in their settings: {' and '.join(said.settings)}")
    return said


def first_of(groups: Iterable[Any]) -> bool:
    """Whether this rank is the one that tells what all of them have found."""
    return all(group is None or dist.get_rank(group) == 0 for group in groups)
