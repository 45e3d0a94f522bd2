"""How the vectors of all processes are combined."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch.distributed as dist


class Exchange(Protocol):
    """Combines vectors of bits, of equal length on every process."""

    def combine(self, bits: Sequence[int]) -> list[int]:
        """OR over all processes. Blocks until all have called it; RuntimeError where one is gone."""
        ...


class GroupExchange:
    """Over a process group of the host (gloo): an all-reduce with MAX of one byte a bit."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float = 60.0) -> None:
        """``group``: of all processes, and used for nothing else; None: the default one; ``timeout``: seconds until one
        that does not come is taken to be gone."""
        import torch.distributed as dist

        self._group: Any = dist.group.WORLD if group is None else group
        self._timeout = timedelta(seconds=timeout)
        self._options: Any = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.MAX

    def combine(self, bits: Sequence[int]) -> list[int]:
        """See :class:`Exchange`."""
        import torch

        vector = torch.tensor(list(bits), dtype=torch.uint8)
        # the group's own method: what torch.distributed takes to be the world may change hands among threads
        self._group.allreduce([vector], self._options).wait(self._timeout)
        return vector.tolist()


def exchange_among(group: dist.ProcessGroup, timeout: float = 60.0) -> GroupExchange:
    """Over a group of its own of the members of ``group``, who all call this in the same order."""
    import torch.distributed as dist

    members = dist.get_process_group_ranks(group)
    limit = timedelta(seconds=timeout)
    own: Any = dist.new_group(members, limit, "gloo", use_local_synchronization=True)
    return GroupExchange(own, timeout)
