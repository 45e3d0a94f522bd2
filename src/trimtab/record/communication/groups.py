"""Process groups as communications name them: a label equal on all members, their ranks, and sequence numbers.

PyTorch's name of a group alone does not tell groups apart: sibling groups that one call splits off may share it. So
the label also carries the group's first rank, and its description where it has one:
``TENSOR_MODEL_PARALLEL_GROUP/5@2`` is the group named 5 whose first rank is 2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from trimtab.record.communication.operators import NO_RANK
from trimtab.record.compiled_parts import Counter


class Group:
    """One process group, seen from this rank."""

    __slots__ = (
        "_collectives",
        "counter",
        "is_nccl",
        "label",
        "me",
        "pairs",
        "ranks",
        "sites",
        "size",
        "without_future",
    )

    def __init__(
        self,
        label: str,
        ranks: tuple[int, ...],
        size: int,
        me: int,
        is_nccl: bool,
        counter: Counter | None = None,
    ) -> None:
        self.label = label
        self.ranks = ranks
        """Global ranks in the group's order; empty where nobody knows them."""
        self.size = size
        self.me = me
        """This process's global rank."""
        self.is_nccl = is_nccl
        """Its device communications run over NCCL, which orders them by stream and has no tags."""
        self.counter = counter
        """What counts collectives, where compiled kernels do, too."""
        self._collectives = 0
        self.pairs: dict[tuple[int, int, int], int] = {}
        self.sites: dict[tuple[str, str, str, int, int, int], int] = {}
        """Numbers of the recorder's sites, by what tells this group's communications apart."""
        self.without_future: set[str] = set()
        """Operators whose works call nobody back."""

    @property
    def collectives(self) -> int:
        """How many were issued so far."""
        return self._collectives if self.counter is None else self.counter.count()

    def next_collective(self) -> int:
        """Sequence number of the next collective, whatever it does: all members issue them in the same order."""
        if self.counter is not None:
            return self.counter.take()
        number = self._collectives
        self._collectives = number + 1
        return number

    def next_message(self, src: int, dst: int, tag: int) -> int:
        """Sequence number of the next message from ``src`` to ``dst`` with that tag."""
        key = (src, dst, tag)
        number = self.pairs.get(key, 0)
        self.pairs[key] = number + 1
        return number

    def global_rank(self, rank: int) -> int:
        """Global rank of a rank in the group; ``NO_RANK`` where it is unknown."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else NO_RANK


class Groups:
    """The groups met so far. Process groups themselves are not kept alive."""

    def __init__(self, on_new: Callable[[Group], None], counter: Callable[[], Counter] | None = None) -> None:
        """``on_new`` is told of each group when it is first met. ``counter`` makes what counts its collectives, if
        compiled kernels are to do so, too."""
        self._counter = counter
        self._on_new = on_new
        self._by_object: dict[int, tuple[weakref.ref[Any], Group]] = {}
        self._by_label: dict[tuple[str, tuple[int, ...]], Group] = {}

    def known(self) -> list[Group]:
        """All of them. From any thread."""
        return list(self._by_label.values())

    def of(self, boxed: Any) -> Group:
        """The group of a process group as operators receive it."""
        group = ProcessGroup.unbox(boxed)
        known = self._by_object.get(id(group))
        if known is not None and known[0]() is group:
            return known[1]
        return self._meet(group)

    def _meet(self, group: Any) -> Group:
        ranks = _global_ranks(group)
        label = _label(group, ranks)
        # Sequence numbers outlive the object: a group that is destroyed and made again under its old name goes on
        # counting, on every member alike.
        found = self._by_label.get((label, ranks))
        if found is None:
            me = ranks[group.rank()] if ranks else group.rank()
            counter = None if self._counter is None else self._counter()
            found = Group(label, ranks, group.size(), me, group.name() == "nccl", counter)
            self._by_label[label, ranks] = found
            self._on_new(found)
        for key in [key for key, (reference, _) in self._by_object.items() if reference() is None]:
            del self._by_object[key]
        self._by_object[id(group)] = (weakref.ref(group), found)
        return found


def _global_ranks(group: Any) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # made by others than torch.distributed's own functions
        world = dist.is_initialized() and dist.get_world_size() == group.size()
        return tuple(range(group.size())) if world else ()


def _label(group: Any, ranks: tuple[int, ...]) -> str:
    description = getattr(group, "group_desc", "")
    named = group.group_name if description in ("", "undefined") else f"{description}/{group.group_name}"
    return f"{named}@{min(ranks)}" if ranks else named
