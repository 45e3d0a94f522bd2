"""Does the job get on? From heartbeats, as they come in, by the clock of whoever listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from trimtab.scan.online.summary import Heartbeat

LEAST_PATIENCE: Final = 60.0
STEPS_OF_PATIENCE: Final = 10.0
"""Seconds, and steps, without progress of any rank until a job is said to hang."""
SILENCE: Final = 30.0
"""Seconds after which nothing is heard of a rank any more."""


@dataclass(slots=True)
class _Rank:
    beat: Heartbeat
    heard: float
    moved: float


class Progress:
    """Remembers the last heartbeat of each rank, and when it had last got on."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: dict[int, _Rank] = {}
        self._here: set[int] = set()
        self._gone: set[int] = set()

    @property
    def beats(self) -> dict[int, Heartbeat]:
        """The last ones."""
        return {rank: one.beat for rank, one in self._ranks.items()}

    def seen(self, rank: int) -> None:
        """The rank has said something."""
        self._here.add(rank)
        self._gone.discard(rank)

    def add(self, beat: Heartbeat, now: float) -> None:
        """Take in a heartbeat, at ``now`` (seconds, monotonic)."""
        known = self._ranks.get(beat.rank)
        self.seen(beat.rank)
        if known is None:
            self._ranks[beat.rank] = _Rank(beat, now, now)
            return
        if _state(beat) != _state(known.beat):
            known.moved = now
        known.beat, known.heard = beat, now

    def left(self, rank: int) -> None:
        """The rank has said goodbye."""
        self._gone.add(rank)

    @property
    def over(self) -> bool:
        """Every rank that was there has left."""
        return bool(self._here) and self._gone >= self._here

    def silent(self, now: float) -> tuple[int, ...]:
        """Ranks that were heard of, and are no more."""
        return tuple(
            sorted(rank for rank, one in self._ranks.items() if now - one.heard > SILENCE or rank in self._gone)
        )

    def standing(self, now: float) -> float:
        """Seconds since any rank got on."""
        return min((now - one.moved for one in self._ranks.values()), default=0.0)

    def patience(self, wanted: float | None, step_seconds: float) -> float:
        """Seconds after which the job hangs: as ``wanted``, or by how long its steps take (NaN: unknown)."""
        if wanted is not None:
            return wanted
        by_steps = STEPS_OF_PATIENCE * step_seconds
        return max(LEAST_PATIENCE, by_steps) if by_steps == by_steps else LEAST_PATIENCE


def _state(beat: Heartbeat) -> tuple[Any, ...]:
    """What changes when a rank gets on."""
    return (beat.step, beat.groups, tuple((one.group, one.op, one.seq, one.src, one.dst) for one in beat.open))
