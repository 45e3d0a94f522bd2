"""Who runs the forward of a microbatch, now that some forward instances may be gone."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.fbd.execute.mail import Mail
from trimtab.fbd.execute.program import REQUEST, Program, label
from trimtab.fbd.ranks import Role, VirtualRank


class Orphans:
    """Of one backward rank: its own microbatches whose forward instance is gone. The first stage's backward rank asks
    another instance for each of them, and a microbatch that it has asked for goes through all stages once more:
    backward ranks that have had it take no notice. With no instance left, all of them run their own forwards."""

    def __init__(self, program: Program, rank: VirtualRank, mail: Mail) -> None:
        self._program = program
        self._rank = rank
        self._mail = mail
        self._cell = rank.instance // program.layout.backwards
        self._helpers = {one: program.helper(self._cell, one) for one in range(program.microbatches)}
        self._most = program.bound(0)
        self._asked: dict[int, int] = {}
        """Instances, by microbatch."""

    def clear(self) -> None:
        """A step begins."""
        self._asked.clear()

    def helper(self, microbatch: int) -> int | None:
        """The forward instance that is responsible for a microbatch; None: the backward rank itself."""
        one = self._helpers[microbatch]
        return one if one is not None and self._mail.standing.left(self._cell) else None

    def ask(self, step: int, todo: Sequence[int]) -> None:
        """Ask for the oldest of what is missing of a step, as many as may be held: whoever is asked needs no free
        place."""
        standing = self._mail.standing
        left = standing.left(self._cell)
        if self._rank.stage > 0 or not standing.processes or not left:
            return
        orphans = [one for one in todo if (at := self.helper(one)) is not None and standing.lost(at)]
        for one in orphans[: self._most]:
            if one not in self._asked or standing.lost(self._asked[one]):
                self._asked[one] = left[one % len(left)]
                to = VirtualRank(Role.FORWARD, 0, self._asked[one], self._rank.tp)
                self._mail.send(self._program.placement.process(to), label(REQUEST, step, one, backward=True), ())
