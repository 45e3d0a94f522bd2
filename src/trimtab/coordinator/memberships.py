"""Which virtual rank belongs to which communication group, and where its bit lies: the same on every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=False)
class Memberships:
    """Groups in ascending order, each with its members: ``groups[g]`` are the virtual ranks of group g."""

    groups: tuple[tuple[int, ...], ...]
    host: Mapping[int, int]
    """Process of each virtual rank."""

    def __post_init__(self) -> None:
        for number, members in enumerate(self.groups):
            if not members or len(set(members)) != len(members):
                raise ValueError(f"group {number}: its members are to be some virtual ranks, each once")
            homeless = [rank for rank in members if rank not in self.host]
            if homeless:
                raise ValueError(f"group {number}: no process has virtual rank {homeless[0]}")

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Place of each group's first bit."""
        found = [0]
        for members in self.groups:
            found.append(found[-1] + len(members))
        return tuple(found)

    @property
    def bits(self) -> int:
        """Of the whole vector: a bit for each member of each group."""
        return self.begins[-1]

    def bit(self, group: int, rank: int) -> int:
        """Where it lies. ValueError for a virtual rank that is no member."""
        members = self.groups[group]
        if rank not in members:
            raise ValueError(f"virtual rank {rank} is no member of group {group}, which has {_listed(members)}")
        return self.begins[group] + members.index(rank)

    def ready(self, bits: Sequence[int]) -> list[int]:
        """Groups of which every member's bit is set, in ascending order."""
        return [group for group in range(len(self.groups)) if all(bits[self.begins[group] : self.begins[group + 1]])]


def _listed(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:8]))
    return shown if len(members) <= 8 else f"{shown}, ... ({len(members)} in all)"
