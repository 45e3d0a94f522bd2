"""How the vectors of all processes are combined."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

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
        """``group``: of all processes, and used for nothing else; ``timeout``: seconds until one that does not come is
        taken to be gone."""
        self._group = group
        self._timeout = timedelta(seconds=timeout)

    def combine(self, bits: Sequence[int]) -> list[int]:
        """See :class:`Exchange`."""
        import torch
        import torch.distributed as dist

        vector = torch.tensor(list(bits), dtype=torch.uint8)
        work = dist.all_reduce(vector, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "this process is a member"
        work.wait(self._timeout)
        return vector.tolist()
