"""What somebody wants to see: which taps, what of them, when, and on which ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, get_args

from trimtab.scope.fields import MOST_INTEGER, Fields

What = Literal["statistics", "histogram", "tiles", "rows", "tokens", "raw", "attention", "pca"]
WHATS: Final[tuple[str, ...]] = get_args(What)
MOST_SUBSCRIPTIONS: Final = 64
"""At the same time."""
MOST_NUMBERS: Final = 4096
"""In one list: layers, heads, ranks, microbatches, rows, tokens."""
MOST_TILES: Final = 1024
"""Along one side of a heat map."""
MOST_RAW_BYTES: Final = 16 << 20
RAW_BYTES: Final = 1 << 20
"""Of a tensor, where nothing else was said."""
MOST_COMPONENTS: Final = 16
REDUCTIONS: Final = ("mean", "absmax", "rms")
LONGEST_PATTERN: Final = 256


@dataclass(frozen=True, slots=True)
class When:
    """At which moments."""

    every: int = 1
    """Steps from one to the next."""
    first: int = 0
    """Step from which on."""
    last: int | None = None
    """Step until which; None: without end."""
    microbatches: tuple[int, ...] | None = None
    """Of a step; None: all."""

    def matches(self, step: int, microbatch: int) -> bool:
        """Is it wanted there?"""
        if step < self.first or (self.last is not None and step > self.last) or (step - self.first) % self.every:
            return False
        return self.microbatches is None or microbatch in self.microbatches

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "every": self.every,
            "first": self.first,
            "last": self.last,
            "microbatches": _listed(self.microbatches),
        }

    @classmethod
    def from_dict(cls, value: object) -> When:
        """What :meth:`as_dict` gave, or a part of it; ValueError for anything else."""
        said = Fields(value, "when")
        when = cls(
            said.integer("every", 1, low=1),
            said.integer("first", 0),
            said.integer("last", None),
            said.integers("microbatches", None, most=MOST_NUMBERS),
        )
        said.done()
        return when


@dataclass(frozen=True, slots=True)
class Subscription:
    """One wish. The JSON of it is what travels and what a recording says of its frames."""

    pattern: str
    what: What = "statistics"
    when: When = When()
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Particular to ``what``, see :data:`PARAMETERS`."""
    id: str = ""
    """Given by the collector."""

    def problems(self) -> list[str]:
        """What is wrong with it, a line each; none: nothing."""
        found: list[str] = []
        when = self.when
        if not self.pattern or len(self.pattern) > LONGEST_PATTERN:
            found.append(f"tap: a pattern of 1 to {LONGEST_PATTERN} characters, for example layers.3.mlp.*")
        if self.what not in WHATS:
            found.append(f"what: {self.what!r} is unknown; one of {', '.join(WHATS)}")
            return found
        if when.every < 1:
            found.append("every: at least 1 step")
        if when.last is not None and when.last < when.first:
            found.append(f"steps: the last ({when.last}) is before the first ({when.first})")
        chosen = {
            "microbatches": when.microbatches,
            "layers": self.layers,
            "heads": self.heads,
            "ranks": self.ranks,
        }
        for name, numbers in chosen.items():
            if numbers is not None and (not numbers or len(numbers) > MOST_NUMBERS or min(numbers) < 0):
                found.append(f"{name}: 1 to {MOST_NUMBERS} numbers from 0 on")
        try:
            _checked(self.what, self.parameters)
        except ValueError as error:
            found.append(str(error))
        return found

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "pattern": self.pattern,
            "what": self.what,
            "when": self.when.as_dict(),
            "layers": _listed(self.layers),
            "heads": _listed(self.heads),
            "ranks": _listed(self.ranks),
            "parameters": self.parameters,
            "id": self.id,
        }

    @classmethod
    def from_dict(cls, value: object) -> Subscription:
        """What :meth:`as_dict` gave, or a part of it with at least a pattern; ValueError, in one line, for anything
        that is not as it should be, :meth:`problems` included."""
        said = Fields(value, "subscription")
        what = cast("What", said.one_of("what", WHATS, "statistics"))
        subscription = cls(
            said.text("pattern", longest=LONGEST_PATTERN),
            what,
            When.from_dict(said.object("when", {})),
            said.integers("layers", None, most=MOST_NUMBERS),
            said.integers("heads", None, most=MOST_NUMBERS),
            said.integers("ranks", None, most=MOST_NUMBERS),
            _checked(what, said.object("parameters", {})),
            said.text("id", "", longest=64),
        )
        said.done()
        for problem in subscription.problems():
            raise ValueError(f"subscription: {problem}")
        return subscription


def numbers(text: str, name: str, *, negative: bool = False) -> tuple[int, ...]:
    """Numbers from words such as ``0``, ``0,1`` or ``0-3,8``; ValueError says what was expected of ``name``.
    ``negative``: ``-1`` is one, too, but no end of a range."""
    found: list[int] = []
    for part in text.split(","):
        if negative and (word := part.strip()).startswith("-") and word[1:].isdecimal() and word.isascii():
            found.append(-int(word[1:17]))
            continue
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not (first.isdecimal() and first.isascii() and (not dash or (last.isdecimal() and last.isascii()))):
            last_one = ", or -1" if negative else ""
            raise ValueError(f"{name} {text!r}: expected numbers such as 3, or 0,1, or 0-3,8{last_one}")
        begin, end = int(first[:16]), int((last if dash else first)[:16])
        if end < begin or end - begin >= MOST_NUMBERS or len(found) >= MOST_NUMBERS:
            raise ValueError(f"{name} {text!r}: at most {MOST_NUMBERS} numbers, each range upwards")
        found.extend(range(begin, end + 1))
    return tuple(dict.fromkeys(found))


def step_range(text: str) -> tuple[int, int | None]:
    """First and last step from ``120``, ``100-200`` or ``100-`` (None: without end); ValueError says what was
    expected."""
    first, dash, last = (word.strip() for word in text.partition("-"))
    if not (first.isdecimal() and first.isascii() and (not last or (last.isdecimal() and last.isascii()))):
        raise ValueError(f"--steps {text!r}: expected a step, FIRST-LAST or FIRST-, for example 100-200")
    begin = min(int(first[:16]), MOST_INTEGER)
    if not dash:
        return begin, begin
    return begin, int(last[:16]) if last else None


def _statistics(said: Fields) -> dict[str, Any]:
    return {"shift": found} if (found := said.truth("shift", None)) is not None else {}


def _grid(said: Fields) -> tuple[int, ...] | None:
    grid = said.integers("grid", None, low=1, high=MOST_TILES, most=2)
    if grid is not None and len(grid) != 2:
        raise ValueError(f"{said.what}: grid is to be two numbers, rows and columns")
    return grid


def _tiles(said: Fields) -> dict[str, Any]:
    read: dict[str, Any] = {"grid": list(_grid(said) or (64, 64))}
    read["reduction"] = said.one_of("reduction", REDUCTIONS, "mean")
    dims = said.anything("dims", None)
    if dims is None:
        return read
    if not isinstance(dims, list | tuple) or len(cast("list[object]", dims)) != 2:
        raise ValueError(f"{said.what}: dims are to be two labels, for example s and h")
    return read | {"dims": [str(label)[:16] for label in cast("list[object]", dims)]}


def _rows(said: Fields) -> dict[str, Any]:
    return {"rows": list(said.integers("rows", (0,), low=-MOST_INTEGER, most=MOST_NUMBERS))}


def _tokens(said: Fields) -> dict[str, Any]:
    return {"tokens": list(said.integers("tokens", (0,), low=-MOST_INTEGER, most=MOST_NUMBERS))}


def _raw(said: Fields) -> dict[str, Any]:
    return {"bytes": said.integer("bytes", RAW_BYTES, low=1, high=MOST_RAW_BYTES)}


def _attention(said: Fields) -> dict[str, Any]:
    read: dict[str, Any] = {"grid": list(_grid(said) or (64, 64))}
    rows = said.integers("rows", None, most=MOST_NUMBERS)
    if rows is not None:
        read["rows"] = list(rows)
    read["batch"] = said.integer("batch", 0)
    return read


def _pca(said: Fields) -> dict[str, Any]:
    read: dict[str, Any] = {"components": said.integer("components", 3, low=1, high=MOST_COMPONENTS)}
    tokens = said.integers("tokens", None, low=-MOST_INTEGER, most=MOST_NUMBERS)
    return read if tokens is None else read | {"tokens": list(tokens)}


PARAMETERS: Final[dict[str, Callable[[Fields], dict[str, Any]]]] = {
    "statistics": _statistics,
    "histogram": _statistics,
    "tiles": _tiles,
    "rows": _rows,
    "tokens": _tokens,
    "raw": _raw,
    "attention": _attention,
    "pca": _pca,
}
"""What each kind takes: statistics, histogram: ``shift`` (sum powers of x minus the last mean); tiles: ``grid`` (rows,
columns), ``reduction`` and ``dims`` (two labels); rows: ``rows`` (of the tensor as a matrix of its last dimension, on
each part; negative ones from its end); tokens: ``tokens`` (positions in the sequence; negative ones from its end); raw:
``bytes`` (most); attention: ``rows`` (queries; all where none are given), ``grid`` and ``batch`` (which sequence); pca:
``components`` and ``tokens``."""


def _checked(what: What, parameters: object) -> dict[str, Any]:
    """``parameters`` with what was left out."""
    said = Fields(parameters, f"{what}")
    read = PARAMETERS[what](said)
    said.done()
    return read


def _listed(numbers: tuple[int, ...] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)
