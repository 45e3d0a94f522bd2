"""What is known of the ranks from their beats: who is there, at which step, and what each has to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from trimtab.scope.fields import Fields

SILENT_SECONDS: Final = 5.0
"""A rank that was not heard of for so long is asked whether it is there."""
GONE_SECONDS: Final = 20.0
"""... and then taken for gone."""
_MOST_RANKS: Final = 1 << 20

State = Literal["waiting", "live", "ended"]


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank last said of itself."""

    rank: int
    world_size: int
    step: int
    microbatch: int
    seconds_per_step: float
    overhead: float
    """Share of the training time that scope takes."""
    dropped: int
    subscriptions: dict[str, str]
    """State of each: ``active``, ``budget``, ``lease``, ``error``."""
    perturbations: tuple[str, ...]
    coordinates: dict[str, int]
    started: int
    """When its session began, in Unix ns: another one is a rank that was started again."""
    taps: int
    """Another number: it offers other taps."""
    leaving: bool

    @classmethod
    def from_dict(cls, value: object) -> Beat:
        """ValueError for what is no beat; fields of a later version are passed over."""
        said = Fields(value, "beat")
        rank, world = said.integer("rank", high=_MOST_RANKS), said.integer("world_size", low=1, high=_MOST_RANKS)
        states: Mapping[str, Any] = said.object("subscriptions", {})
        coordinates: Mapping[str, Any] = said.object("coordinates", None) or {}
        return cls(
            rank,
            world,
            said.integer("step", -1, low=-1),
            said.integer("microbatch", -1, low=-1),
            said.number("seconds_per_step", None, low=0.0) or 0.0,
            said.number("overhead", None, low=0.0) or 0.0,
            said.integer("dropped", 0),
            {str(key): str(state) for key, state in states.items()},
            tuple(str(one) for one in _list(said.anything("perturbations", []))),
            {str(axis): at for axis, at in coordinates.items() if type(at) is int},
            said.integer("started", 0, high=(1 << 63) - 1),
            said.integer("taps", 0),
            said.truth("leaving", False),
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "rank": self.rank,
            "step": self.step,
            "microbatch": self.microbatch,
            "seconds_per_step": self.seconds_per_step,
            "overhead": self.overhead,
            "dropped": self.dropped,
            "subscriptions": self.subscriptions,
            "perturbations": list(self.perturbations),
            "coordinates": self.coordinates,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """Of who is there."""

    kind: Literal["came", "restarted", "left", "back", "placed"]
    """``placed``: it has come to know where it stands in the parallel layout."""
    rank: int


@dataclass(slots=True)
class _Seen:
    beat: Beat
    at: float
    asked: bool = False
    gone: bool = False


@dataclass(slots=True)
class Ranks:
    """All of a job. Not for several threads at once."""

    world_size: int = 0
    _seen: dict[int, _Seen] = field(default_factory=dict[int, _Seen])
    _told: set[int] = field(default_factory=set[int])
    """Ranks that have said what they have to do."""

    def hear(self, beat: Beat, now: float) -> list[Change]:
        """One more."""
        self.world_size = beat.world_size
        before = self._seen.get(beat.rank)
        self._seen[beat.rank] = seen = _Seen(beat, now, gone=beat.leaving)
        if beat.leaving:
            return [] if before is None or before.gone else [Change("left", beat.rank)]
        if before is None:
            return [Change("came", beat.rank)]
        if before.beat.started != beat.started:
            return [Change("restarted", beat.rank)]
        if before.gone and not seen.gone:
            return [Change("back", beat.rank)]
        return [Change("placed", beat.rank)] if before.beat.coordinates != beat.coordinates else []

    def silent(self, now: float) -> list[int]:
        """Ranks to ask whether they are there; each once, until it is heard again."""
        found = [rank for rank, seen in self._seen.items() if not (seen.asked or seen.gone) and self._old(seen, now)]
        for rank in found:
            self._seen[rank].asked = True
        return found

    def answered(self, rank: int, now: float) -> None:
        """It is there, whatever became of its beats, and has said what it has to do."""
        self._told.add(rank)
        if rank in self._seen:
            self._seen[rank].at, self._seen[rank].asked = now, False

    def lost(self, rank: int) -> list[Change]:
        """It is not there."""
        seen = self._seen.get(rank)
        if seen is None or seen.gone:
            return []
        seen.gone = True
        return [Change("left", rank)]

    def late(self, now: float) -> list[Change]:
        """Those that have become too old."""
        old = [rank for rank, seen in self._seen.items() if not seen.gone and now - seen.at > GONE_SECONDS]
        return [change for rank in old for change in self.lost(rank)]

    def copy(self) -> Ranks:
        """As it is now."""
        return Ranks(self.world_size, dict(self._seen), set(self._told))

    @staticmethod
    def _old(seen: _Seen, now: float) -> bool:
        return now - seen.at > SILENT_SECONDS

    @property
    def here(self) -> list[int]:
        """Ranks that are there."""
        return sorted(rank for rank, seen in self._seen.items() if not seen.gone)

    @property
    def missing(self) -> list[int]:
        """Ranks of the job that are not."""
        here = set(self.here)
        return [rank for rank in range(self.world_size) if rank not in here]

    @property
    def complete(self) -> bool:
        """All are there."""
        return self.world_size > 0 and len(self.here) == self.world_size

    @property
    def settled(self) -> bool:
        """All are there, and have said what they have to do."""
        return self.complete and self._told.issuperset(self.here)

    @property
    def showing(self) -> bool:
        """All are there, and offer something: their model has been seen."""
        return self.settled and all(seen.beat.taps > 0 for seen in self._seen.values())

    @property
    def state(self) -> State:
        """Of the job."""
        if not self._seen:
            return "waiting"
        return "live" if self.here else "ended"

    @property
    def beats(self) -> Mapping[int, Beat]:
        """The last of each rank that is there."""
        return {rank: self._seen[rank].beat for rank in self.here}

    @property
    def step(self) -> int:
        """The latest that any rank has begun; -1: unknown."""
        return max((beat.step for beat in self.beats.values()), default=-1)

    @property
    def seconds_per_step(self) -> float:
        """Mean over the ranks that know; 0: none does."""
        known = [beat.seconds_per_step for beat in self.beats.values() if beat.seconds_per_step > 0]
        return sum(known) / len(known) if known else 0.0


def _list(value: object) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, list) else []
