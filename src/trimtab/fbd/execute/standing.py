"""Which forward instances are still there."""

from __future__ import annotations

from trimtab.fbd.execute.program import Program
from trimtab.fbd.ranks import Role, VirtualRank


class Standing:
    """As one process knows it: an instance is gone with the first of its processes, for a microbatch goes through all
    of them."""

    def __init__(self, program: Program) -> None:
        layout = program.layout
        self._placement = program.placement
        self._layout = layout
        self._gone: set[int] = set()
        self.processes: set[int] = set()
        """That are lost, or whose instance is."""
        self._instance = {self._placement.process(one): one.instance for one in layout.ranks(Role.FORWARD)}

    @property
    def may_go(self) -> list[int]:
        """Processes that can be done without."""
        return sorted(self._instance)

    def lose(self, process: int) -> int | None:
        """A process is lost; the forward instance that is gone with it, None where it was before."""
        instance = self._instance[process]
        if instance in self._gone:
            return None
        self._gone.add(instance)
        self.processes |= {one for one, of in self._instance.items() if of == instance}
        return instance

    def lost(self, instance: int) -> bool:
        """Whether a forward instance is gone."""
        return instance in self._gone

    def left(self, cell: int) -> list[int]:
        """Forward instances of a cell that are not."""
        each = self._layout.forwards
        return [one for one in range(cell * each, (cell + 1) * each) if one not in self._gone]

    def said(self, instance: int, process: int, why: str) -> str:
        """One line on a loss."""
        cell = instance // self._layout.forwards
        left = self.left(cell)
        others = f"go to instance {', '.join(map(str, left))}" if left else "are run where their backwards are"
        return (
            f"process {process} is lost ({why}): training goes on without forward instance {instance}, whose "
            f"microbatches {others}"
        )


def speaks(rank: VirtualRank, program: Program, instance: int) -> bool:
    """Whether a rank is the one that says what concerns the cell of a forward instance."""
    layout = program.layout
    first = VirtualRank(Role.BACKWARD, 0, instance // layout.forwards * layout.backwards, 0)
    return rank == first
