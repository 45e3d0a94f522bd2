"""What somebody wants to disturb: where, how, when. Values only; :mod:`trimtab.scope.perturb` does it.

What each kind means, its units, and what is done on replicas and shards is in docs/scope-perturb.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast, get_args

from trimtab.scope.fields import Fields
from trimtab.scope.floats import bits_problem
from trimtab.scope.names import Pattern, Tap, TapKind, no_match

PerturbKind = Literal["gaussian", "uniform", "offset", "bit-flip", "zero", "scale", "mask", "stuck", "stale", "delay"]
KINDS: Final[tuple[str, ...]] = get_args(PerturbKind)
Where = Literal["copy", "master", "both"]
WHERES: Final[tuple[str, ...]] = get_args(Where)
"""A parameter in the precision in which the model computes, the optimizer's float32 original of it, or both."""
SOON: Final = -1
"""As first step: the one that the ranks agree upon. ``last`` then counts from it (0: this step only)."""

MOST_PERTURBATIONS: Final = 64
"""At the same time."""
MOST_STEPS: Final = 100_000
"""From the first to the last: a perturbation is to end by itself while somebody still knows of it."""
MOST_NUMBERS: Final = 4096
"""In one list: microbatches, ranks, layers, indices, tokens, heads, channels."""
MOST_ELEMENTS: Final = 4096
"""Of a tensor, where their number is given; more are a fraction."""
MOST_MILLISECONDS: Final = 60_000.0
"""Of one delay: backends give up after some minutes."""
LONGEST_PATTERN: Final = 256

_VALUES: Final[tuple[TapKind, ...]] = ("activation", "gradient", "parameter", "optimizer", "communication")
PLACES: Final[dict[str, tuple[TapKind, ...]]] = {
    **dict.fromkeys(("gaussian", "uniform", "offset", "bit-flip", "zero", "scale", "mask", "stuck"), _VALUES),
    "stale": ("activation", "gradient", "communication"),
    "delay": ("communication",),
}
"""What each kind can be done to."""
_SLICES: Final = ("tokens", "heads", "channels")
_PARTS: Final = ("fraction", "elements", "indices", *_SLICES)


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One disturbance. It ends by itself after step ``last``."""

    pattern: str
    kind: PerturbKind
    first: int = SOON
    last: int = 0
    microbatches: tuple[int, ...] | None = None
    """Of each step; None: all. What is in storage, and what no microbatch is known of, is disturbed whatever is said
    here."""
    probability: float = 1.0
    """That it happens at a moment at which it may; drawn from the seed, the same on all replicas."""
    seed: int = 0
    ranks: tuple[int, ...] | None = None
    """Only there, on purpose; None: on all ranks that hold the tensor, replicas alike."""
    layers: tuple[int, ...] | None = None
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Particular to ``kind``, see :data:`PARAMETERS`."""
    id: str = ""
    """Given by the collector."""

    def problems(self, taps: Sequence[Tap] | None = None) -> list[str]:
        """What is wrong with it, a line each; none: nothing. ``taps``: what there is to disturb, if it is known."""
        found: list[str] = []
        if not self.pattern or len(self.pattern) > LONGEST_PATTERN:
            found.append(f"tap: a pattern of 1 to {LONGEST_PATTERN} characters, for example layers.3.mlp.output")
        else:
            found.extend(_problem_of(lambda: Pattern(self.pattern)))
        if self.kind not in KINDS:
            return [*found, f"kind: {self.kind!r} is unknown; one of {', '.join(KINDS)}"]
        found.extend(self._problems_of_time())
        chosen = {"microbatches": self.microbatches, "layers": self.layers, "ranks": self.ranks}
        for name, numbers in chosen.items():
            if numbers is not None and (not numbers or len(numbers) > MOST_NUMBERS or min(numbers) < 0):
                found.append(f"{name}: 1 to {MOST_NUMBERS} numbers from 0 on")
        found.extend(_problem_of(lambda: checked(self.kind, self.parameters)))
        if taps is not None and not found:
            found.extend(self._problems_of_taps(taps))
        return found

    def _problems_of_time(self) -> list[str]:
        found: list[str] = []
        if self.first < SOON:
            found.append("steps: the first is a number from 0 on")
        length = self.last - (0 if self.first == SOON else self.first) + 1
        if length < 1:
            found.append(f"steps: the last ({self.last}) is before the first ({self.first})")
        elif length > MOST_STEPS:
            found.append(f"steps: at most {MOST_STEPS}, not {length}: a perturbation is to end by itself")
        if not 0.0 < self.probability <= 1.0:
            found.append(f"probability: above 0 and at most 1, not {self.probability:g}")
        return found

    def _problems_of_taps(self, taps: Sequence[Tap]) -> list[str]:
        matching = self.choose(taps)
        if not matching:
            if self.pattern.startswith(("collectives.", "p2p.")):
                return []  # known only once they have happened
            return [no_match(self.pattern, [tap.name for tap in taps if tap.kind != "attention"])]
        named = ((tap.name, self._problem_of_tap(tap)) for tap in matching)
        return [f"{name}: {problem}" for name, problem in named if problem][:8]

    def _problem_of_tap(self, tap: Tap) -> str | None:
        if tap.kind not in PLACES[self.kind]:
            return f"{self.kind} is for {', '.join(PLACES[self.kind])}; this is {tap.kind}"
        if self.kind == "bit-flip" and tap.dtype:
            original = tap.kind == "parameter" and self.parameters.get("where") == "master"
            problem = bits_problem(self.parameters.get("bits", ["random"]), "float32" if original else tap.dtype)
            if problem:
                return problem
        return _problem_of_part(self.parameters.get("part"), tap)

    def choose(self, taps: Sequence[Tap]) -> list[Tap]:
        """Those that are meant. ValueError for a pattern that is none."""
        pattern = Pattern(self.pattern)
        layers = self.layers
        return [
            tap
            for tap in taps
            if tap.kind != "attention" and (layers is None or tap.layer in layers) and pattern.matches(tap.name)
        ]

    def settled(self, step: int) -> Perturbation:
        """With the first step that the ranks agreed upon in the place of :data:`SOON`."""
        return replace(self, first=step, last=step + self.last) if self.first == SOON else self

    def acts(self, step: int, microbatch: int | None = None) -> bool:
        """May it happen there? None: there are no microbatches where it is done."""
        if not self.first <= step <= self.last:
            return False
        return microbatch is None or self.microbatches is None or microbatch in self.microbatches

    def happens(self, tap: str, step: int, microbatch: int) -> bool:
        """Is this one of the moments at which it does? The same everywhere."""
        if self.probability >= 1.0:
            return True
        drawn = int.from_bytes(digest("happens", self.seed, tap, step, microbatch)[:8], "little")
        return drawn < int(self.probability * 2.0**64)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "pattern": self.pattern,
            "kind": self.kind,
            "first": self.first,
            "last": self.last,
            "microbatches": _listed(self.microbatches),
            "probability": self.probability,
            "seed": self.seed,
            "ranks": _listed(self.ranks),
            "layers": _listed(self.layers),
            "parameters": self.parameters,
            "id": self.id,
        }

    @classmethod
    def from_dict(cls, value: object) -> Perturbation:
        """What :meth:`as_dict` gave, or a part of it with at least pattern and kind; ValueError, in one line, for
        anything that is not as it should be, :meth:`problems` included."""
        said = Fields(value, "perturbation")
        kind = cast("PerturbKind", said.one_of("kind", KINDS))
        first = said.integer("first", SOON, low=SOON)
        perturbation = cls(
            said.text("pattern", longest=LONGEST_PATTERN),
            kind,
            first,
            said.integer("last", max(first, 0)),
            said.integers("microbatches", None, most=MOST_NUMBERS),
            said.number("probability", 1.0),
            said.integer("seed", 0),
            said.integers("ranks", None, most=MOST_NUMBERS),
            said.integers("layers", None, most=MOST_NUMBERS),
            checked(kind, said.object("parameters", {})),
            said.text("id", "", longest=64),
        )
        said.done()
        for problem in perturbation.problems():
            raise ValueError(f"perturbation: {problem}")
        return perturbation


def digest(*key: object) -> bytes:
    """32 bytes that follow from a key, the same in every process and on every machine."""
    return hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=32).digest()


def checked(kind: PerturbKind, parameters: object) -> dict[str, Any]:
    """Parameters with what was left out; ValueError says what is wrong with them."""
    said = Fields(parameters, kind)
    read = PARAMETERS[kind](said)
    said.done()
    return read


# ------------------------------------------------------------- parameters


def _part(said: Fields, default: dict[str, Any] | None) -> dict[str, Any]:
    """Which elements; nothing: all of them."""
    given = said.anything("part", None)
    if given is None:
        return {} if default is None else {"part": default}
    inner = Fields(given, f"{said.what}: part")
    read: dict[str, Any] = {}
    for name, value in {
        "fraction": inner.number("fraction", None, low=0.0, high=1.0),
        "elements": inner.integer("elements", None, low=1, high=MOST_ELEMENTS),
        "indices": inner.integers("indices", None, most=MOST_NUMBERS),
        **{name: inner.integers(name, None, most=MOST_NUMBERS) for name in _SLICES},
    }.items():
        if value is not None:
            read[name] = list(cast("tuple[int, ...]", value)) if isinstance(value, tuple) else value
    inner.done()
    if not read:
        raise ValueError(f"{said.what}: part is to say which: {', '.join(_PARTS)}")
    if len(read) > 1 and not {"indices", "elements"}.isdisjoint(read):
        raise ValueError(
            f"{said.what}: part: indices and elements stand alone; fraction goes with {', '.join(_SLICES)}"
        )
    if any(value == [] for value in read.values()):
        raise ValueError(f"{said.what}: part has an empty list")
    return {"part": read}


def _storage(said: Fields) -> dict[str, Any]:
    """Where in storage, and whether it ends with the steps. Said of other places, too, it has no effect there."""
    read: dict[str, Any] = {}
    where = said.one_of("where", WHERES, "copy")
    if where != "copy":
        read["where"] = where
    if said.truth("revert", False):
        read["revert"] = True
    return read


def _amount(name: str, **bounds: float) -> Callable[[Fields], dict[str, Any]]:
    def read(said: Fields) -> dict[str, Any]:
        found: dict[str, Any] = {name: said.number(name, **bounds)}
        if said.truth("relative", False):
            found["relative"] = True
        return found | _part(said, None) | _storage(said)

    return read


def _uniform(said: Fields) -> dict[str, Any]:
    read: dict[str, Any] = {"low": said.number("low"), "high": said.number("high")}
    if read["high"] < read["low"]:
        raise ValueError(f"uniform: high ({read['high']:g}) is below low ({read['low']:g})")
    return read | _part(said, None) | _storage(said)


def _bits(said: Fields) -> dict[str, Any]:
    given = said.anything("bits", ["random"])
    listed = list(cast("Sequence[object]", given)) if isinstance(given, (list, tuple)) else [cast("object", given)]
    if problem := bits_problem(listed, ""):
        raise ValueError(f"bit-flip: {problem}")
    return {"bits": listed} | _part(said, {"elements": 1}) | _storage(said)


def _value(default: float | None, part: dict[str, Any] | None, needs_part: bool) -> Callable[[Fields], dict[str, Any]]:
    def read(said: Fields) -> dict[str, Any]:
        value = said.number("value") if default is None else said.number("value", default)
        found: dict[str, Any] = {"value": value} | _part(said, part)
        if needs_part and "part" not in found:
            raise ValueError(f"{said.what}: part is missing: which of {', '.join(_PARTS)}")
        return found | _storage(said)

    return read


PARAMETERS: Final[dict[str, Callable[[Fields], dict[str, Any]]]] = {
    "gaussian": _amount("std", low=0.0),
    "uniform": _uniform,
    "offset": _amount("value"),
    "bit-flip": _bits,
    "zero": lambda said: _part(said, None) | _storage(said),
    "scale": lambda said: {"factor": said.number("factor")} | _part(said, None) | _storage(said),
    "mask": _value(0.0, None, needs_part=True),
    "stuck": _value(None, {"elements": 1}, needs_part=False),
    "stale": lambda said: _part(said, None),
    "delay": lambda said: {"ms": said.number("ms", low=0.0, high=MOST_MILLISECONDS)},
}
"""What each kind takes: gaussian: ``std``, ``relative`` (to the rms of what is there); uniform: factors from ``low`` to
``high``; offset: ``value``, ``relative``; bit-flip: ``bits`` (numbers; or sign, exponent, mantissa, random: one of
those, drawn for each element; or exponent[2]: the third from below); scale: ``factor``; mask: ``value`` (0); stuck:
``value``; delay: ``ms``. All but delay: ``part``, one of {"fraction"}, {"elements"} (so many, drawn), {"indices"} (in
the flattened whole tensor), or {"tokens", "heads", "channels"} (with "fraction": of these). In storage: ``where`` and
``revert`` (put back after the last step)."""


def _problem_of(look: Callable[[], object]) -> list[str]:
    try:
        look()
    except ValueError as error:
        return [str(error)]
    return []


def _problem_of_part(part: dict[str, Any] | None, tap: Tap) -> str | None:
    """Why this tap has no such part."""
    if not part:
        return None
    if tap.labels and "tokens" in part and not {"s", "t"} & set(tap.labels):
        return f"it has no dimension of tokens, only {', '.join(tap.labels)}"
    if tap.labels and "heads" in part and tap.heads is None:
        return "it has no heads"
    if "heads" in part and tap.heads is not None and (problem := beyond("head", part["heads"], tap.heads[2])):
        return problem
    if tap.shape is None or tap.part is not None or any(axis == "fsdp" for axis, _, _ in tap.shard):
        return None  # parts of ranks may differ in size: how large the whole is shows when it is disturbed
    shards = math.prod(count for _, _, count in tap.shard)  # not all of them cut this dimension: at most so many
    return beyond("element", part.get("indices", ()), math.prod(tap.shape) * shards)


def beyond(what: str, numbers: Sequence[int], size: int) -> str | None:
    """That what is asked for is not there, of ``size`` that are; None: it is."""
    gone = [number for number in numbers if number >= size]
    return f"{what} {gone[0]} is not there: it has {size}, counted from 0" if gone else None


def _listed(numbers: tuple[int, ...] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)
