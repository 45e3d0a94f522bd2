"""What a collector offers, to commands and the server, and the values that it hands out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from trimtab.scope.fields import Fields
from trimtab.scope.frame import Frame
from trimtab.scope.names import Tap
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.subscription import Subscription

_LONGEST_TEXT: Final = 4096


class Received(NamedTuple):
    """A frame, and the bytes in which it came."""

    frame: Frame
    raw: memoryview


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that a rank, or the collector, has to say."""

    kind: str
    """``applied``, ``expired``, ``reverted``, ``paused``, ``resumed``, ``dropped``, ``activated``, ``error``; of the
    collector itself ``rank``, ``agreed``, ``recording``."""
    text: str = ""
    rank: int = -1
    """-1: the collector."""
    change: str = ""
    subscription: str = ""
    perturbation: str = ""
    step: int = -1
    microbatch: int = -1
    unix_ns: int = 0
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "kind": self.kind,
            "text": self.text,
            "rank": self.rank,
            "change": self.change,
            "subscription": self.subscription,
            "perturbation": self.perturbation,
            "step": self.step,
            "microbatch": self.microbatch,
            "unix_ns": self.unix_ns,
            "details": self.details,
        }

    @classmethod
    def from_dict(cls, value: object) -> Notice:
        """What :meth:`as_dict` gave, fields of a later version passed over; ValueError for anything else."""
        if isinstance(value, Mapping):
            known: dict[str, Any] = {key: said for key, said in value.items() if key in cls.__dataclass_fields__}  # type: ignore[misc]
            value = known
        said = Fields(value, "notice")
        return cls(
            said.text("kind", longest=64),
            said.text("text", "", longest=_LONGEST_TEXT),
            said.integer("rank", -1, low=-1),
            said.text("change", "") or "",
            said.text("subscription", "") or "",
            said.text("perturbation", "") or "",
            said.integer("step", -1, low=-1),
            said.integer("microbatch", -1, low=-1),
            said.integer("unix_ns", 0, high=(1 << 63) - 1),
            dict(said.object("details", {})),
        )


@dataclass(frozen=True, slots=True)
class Offered:
    """A tap, over all ranks that have it."""

    name: str
    taps: tuple[tuple[int, Tap], ...]
    """Rank, and the tap as it is there; by rank."""

    @property
    def first(self) -> Tap:
        """On the first rank that has it."""
        return self.taps[0][1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """That have it."""
        return tuple(rank for rank, _ in self.taps)

    def as_dict(self) -> dict[str, Any]:
        """As JSON: ``{"name", "on": {rank: tap}}``."""
        return {"name": self.name, "on": {str(rank): tap.to_json() for rank, tap in self.taps}}

    @classmethod
    def from_dict(cls, value: object) -> Offered:
        """The way back; ValueError for anything else."""
        said = Fields(value, "tap")
        name, ranks = said.text("name"), said.object("on")
        taps = sorted((int(rank), Tap.from_json(tap)) for rank, tap in ranks.items())
        if not taps:
            raise ValueError("tap: on no rank")
        return cls(name, tuple(taps))


Listener = Callable[[Received | Notice], None]


class Scope(Protocol):
    """A collector, in this process or another. From any thread; what is refused is a ValueError in one line, and so is
    a job that has ended."""

    def taps(self, pattern: str = "**") -> list[Offered]:
        """What the model offers, in the order of its computation; ValueError with the closest names for nothing."""
        ...

    def status(self) -> dict[str, Any]:
        """``{"state": "waiting"|"live"|"ended", "run", "world_size", "step", "seconds_per_step", "ranks": {rank: its
        last beat}, "missing": [ranks], "settled": have the ranks said what they have to do?, "subscriptions": {id:
        {..., "ranks", "step", "state": "active"|"paused"|"failed"|"ended", "states": {rank: why it is not active},
        "orphaned": is whoever asked for it gone?}}, "perturbations": {id: {..., "stored": can it be put back?}},
        "probes": {...}, "recording"}``."""
        ...

    def subscribe(self, subscription: Subscription) -> str:
        """From an agreed step on, until :meth:`unsubscribe`; its id."""
        ...

    def unsubscribe(self, subscription: str) -> None:
        """End it."""
        ...

    def preview(self, perturbation: Perturbation) -> dict[str, Any]:
        """What it would concern, without doing anything: ``{"text", "taps": [names], "ranks": [...], "touched": {rank:
        [what, how many elements]}, "step": one that all ranks can be told of in time, "problems": [...]}``."""
        ...

    def perturb(self, perturbation: Perturbation) -> str:
        """Disturb, at its steps, or from the earliest possible one on (:data:`~trimtab.scope.perturbation.SOON`); its
        id."""
        ...

    def expire(self, perturbation: str) -> None:
        """End it before its time."""
        ...

    def revert(self, perturbation: str) -> dict[str, Any]:
        """End it, and restore what it changed in storage, bitwise; what the ranks say of it, by rank."""
        ...

    def probe(self, spec: Mapping[str, Any]) -> str:
        """Run prompts at step boundaries (see :mod:`trimtab.scope.probe.spec`); its id, for :meth:`unsubscribe`."""
        ...

    def pair(self, body: Mapping[str, Any]) -> str:
        """Begin a paired run (:class:`trimtab.scope.paired.PairSpec` as JSON); its id."""
        ...

    def pair_result(self, pair: str) -> dict[str, Any] | None:
        """What came of it, as JSON, once all ranks have said their part; None until then."""
        ...

    def audit(self) -> list[dict[str, Any]]:
        """Every activation of a perturbation that ranks have written down, in order of time."""
        ...

    def listen(self, callback: Listener, *, frames: bool = True) -> Callable[[], None]:
        """``callback`` gets frames and notices, on the collector's thread, until what is returned is called. What it
        raises is said once."""
        ...

    def record(self, label: str = "", *, budget_bytes: int = 0) -> Callable[[], None]:
        """Write all that comes into RUN_DIR/scope, until what is returned is called; ValueError if it cannot be."""
        ...

    def close(self) -> None:
        """End, and leave nothing."""
        ...
