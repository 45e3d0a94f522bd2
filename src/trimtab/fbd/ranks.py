"""Virtual ranks: forward and backward instances of every stage, and the processes that they live in.

A *cell* is what shares partners: ``forwards`` forward instances and ``backwards`` backward instances of each pipeline
stage. An instance of a stage is one copy of its weights, divided over a tensor parallel group. Backward instances are
what ordinary training calls data parallel replicas; forward instances hold weights only.

Each role is numbered as frameworks number their ranks: tensor parallel coordinate fastest, then the instance, then the
stage. So the backward ranks alone are an ordinary job, with its own groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import gcd
from typing import NamedTuple


class Role(StrEnum):
    """What a virtual rank does."""

    FORWARD = "forward"
    BACKWARD = "backward"


class VirtualRank(NamedTuple):
    """One of them."""

    role: Role
    stage: int
    instance: int
    """Over all cells."""
    tp: int

    def __str__(self) -> str:
        return f"{self.role} rank of stage {self.stage}, instance {self.instance}, tensor parallel {self.tp}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of what. Raises ValueError, in one line, for what cannot be."""

    stages: int
    forwards: int = 1
    """Forward instances of each stage and cell."""
    backwards: int = 1
    forward_tp: int = 1
    backward_tp: int = 1
    cells: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "forwards", "backwards", "forward_tp", "backward_tp", "cells"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.backward_tp % self.forward_tp:
            raise ValueError(
                f"forwards at TP {self.forward_tp} and backwards at TP {self.backward_tp}: the former has to divide "
                "the latter, as each forward rank sends to whole backward ranks"
            )

    def tp(self, role: Role) -> int:
        """Tensor parallel degree."""
        return self.forward_tp if role is Role.FORWARD else self.backward_tp

    def instances(self, role: Role) -> int:
        """Of each stage, over all cells."""
        return self.cells * (self.forwards if role is Role.FORWARD else self.backwards)

    def count(self, role: Role) -> int:
        """Virtual ranks of a role."""
        return self.stages * self.instances(role) * self.tp(role)

    def number(self, rank: VirtualRank) -> int:
        """In its role's own numbering."""
        instances = self.instances(rank.role)
        return rank.tp + self.tp(rank.role) * (rank.instance + instances * rank.stage)

    def rank(self, role: Role, number: int) -> VirtualRank:
        """The other way round. ValueError for a number that there is not."""
        if not 0 <= number < self.count(role):
            raise ValueError(f"there are {self.count(role)} {role} ranks, and {number} is none of them")
        rest, tp = divmod(number, self.tp(role))
        stage, instance = divmod(rest, self.instances(role))
        return VirtualRank(role, stage, instance, tp)

    def ranks(self, role: Role) -> Iterator[VirtualRank]:
        """All of a role, in order of their numbers."""
        return (self.rank(role, number) for number in range(self.count(role)))

    # --- groups, as numbers of a role

    def data_groups(self) -> list[tuple[int, ...]]:
        """Backward ranks that reduce gradients: of a stage, the same part of the weights."""
        return [
            tuple(
                self.number(VirtualRank(Role.BACKWARD, stage, one, tp)) for one in range(self.instances(Role.BACKWARD))
            )
            for stage in range(self.stages)
            for tp in range(self.backward_tp)
        ]

    def weight_groups(self) -> list[tuple[VirtualRank, tuple[VirtualRank, ...]]]:
        """Who gives whom new weights: of each stage, the backward ranks of instance 0 to the forward ranks that have
        the same part of them, or a larger one."""
        wide = self.backward_tp // self.forward_tp
        return [
            (
                VirtualRank(Role.BACKWARD, stage, 0, tp),
                tuple(VirtualRank(Role.FORWARD, stage, one, tp // wide) for one in range(self.instances(Role.FORWARD))),
            )
            for stage in range(self.stages)
            for tp in range(self.backward_tp)
        ]

    # --- who does what

    def instance_of(self, role: Role, cell: int, microbatch: int) -> int:
        """Which instance has a microbatch of a cell: they take turns."""
        each = self.forwards if role is Role.FORWARD else self.backwards
        return cell * each + microbatch % each

    def microbatches(self, role: Role, instance: int, of_cell: int) -> range:
        """Those of an instance, of the ``of_cell`` microbatches that its cell has in a step."""
        each = self.forwards if role is Role.FORWARD else self.backwards
        if of_cell % self.backwards:
            raise ValueError(
                f"{of_cell} microbatches of a cell are to be the same number for each of its {self.backwards} backward "
                "instances"
            )
        return range(instance % each, of_cell, each)

    def partners(self, rank: VirtualRank) -> list[VirtualRank]:
        """Backward ranks that a forward rank sends to, or forward ranks that a backward rank hears from."""
        mine, theirs = (self.forwards, self.backwards)
        other = Role.BACKWARD
        if rank.role is Role.BACKWARD:
            mine, theirs, other = theirs, mine, Role.FORWARD
        cell, place = divmod(rank.instance, mine)
        step = gcd(self.forwards, self.backwards)
        instances = [cell * theirs + one for one in range(theirs) if one % step == place % step]
        wide = self.backward_tp // self.forward_tp
        parts = (
            range(rank.tp * wide, (rank.tp + 1) * wide)
            if other is Role.BACKWARD
            else range(rank.tp // wide, rank.tp // wide + 1)
        )
        return [VirtualRank(other, rank.stage, one, tp) for one in instances for tp in parts]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which process each virtual rank lives in.

    Backward ranks have a process each, first in the world, in their own order: to the framework they are the job.
    Forward ranks follow, ``together`` of an instance's stages or neighbours in one process, as threads.
    """

    layout: Layout
    together: int = 1
    """Forward ranks of a process."""

    def __post_init__(self) -> None:
        count = self.layout.count(Role.FORWARD)
        if self.together < 1 or count % self.together:
            raise ValueError(f"{count} forward ranks cannot be divided into processes of {self.together}")

    @property
    def world(self) -> int:
        """Processes."""
        return self.layout.count(Role.BACKWARD) + self.layout.count(Role.FORWARD) // self.together

    @property
    def forwards(self) -> range:
        """Processes that run forwards only: those that training can go on without."""
        return range(self.layout.count(Role.BACKWARD), self.world)

    def process(self, rank: VirtualRank) -> int:
        """Of a virtual rank."""
        number = self.layout.number(rank)
        return number if rank.role is Role.BACKWARD else self.layout.count(Role.BACKWARD) + number // self.together

    def hosted(self, process: int) -> tuple[VirtualRank, ...]:
        """Virtual ranks of a process. ValueError for one that there is not."""
        if not 0 <= process < self.world:
            raise ValueError(f"the layout takes {self.world} processes, and {process} is none of them")
        backwards = self.layout.count(Role.BACKWARD)
        if process < backwards:
            return (self.layout.rank(Role.BACKWARD, process),)
        begin = (process - backwards) * self.together
        return tuple(self.layout.rank(Role.FORWARD, begin + one) for one in range(self.together))

    def fits(self, world: int) -> None:
        """ValueError where a job of ``world`` processes cannot be laid out so."""
        if world != self.world:
            raise ValueError(
                f"{self.layout.count(Role.BACKWARD)} backward ranks and {self.layout.count(Role.FORWARD)} forward "
                f"ranks ({self.together} a process) take {self.world} processes; the job has {world}"
            )
