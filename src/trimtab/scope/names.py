"""What taps are called, and the patterns that choose among them.

A name is dotted: ``layers.3.mlp.output``. Layers count from 0 over the whole model, whatever pipeline stage or chunk
holds them. In a pattern ``*`` stands for one segment (or a part of it), ``**`` for any number of segments, ``{a,b}``
for alternatives, and ``0-3`` (or ``[0-3]``) for a range of numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, cast, get_args

TapKind = Literal["activation", "gradient", "parameter", "optimizer", "attention", "communication"]
Shard = tuple[tuple[str, int, int], ...]
"""Over which parallel axes ranks hold different parts: (axis, index, count) each. Equal shards are replicas."""
GRADIENT: Final = ".grad"
"""Ending of the name of a tensor's gradient."""
LONGEST_PATTERN: Final = 512
"""Characters. Patterns come from outside."""
MOST_ALTERNATIVES: Final = 256
"""That the braces of one pattern may come to."""

_ROOTS: Final = (
    *("embedding", "layers", "final_norm", "logits", "loss", "modules"),
    *("parameters", "optimizer", "collectives", "p2p"),
)
_PARTS: Final = (
    *("input", "attention.input", "attention.q", "attention.k", "attention.v", "attention.map", "attention.core"),
    *("attention.output", "residual", "router.logits", "router.probabilities", "mlp.hidden", "mlp.output", "output"),
)
"""Of a block, in the order in which they come to be."""
_STORED: Final = ("parameters.", "optimizer.")
_DIGITS: Final = 9
_KINDS: Final = get_args(TapKind)


@dataclass(frozen=True, slots=True)
class Tap:
    """A tensor that a model offers, on one rank."""

    name: str
    kind: TapKind
    labels: tuple[str, ...] = ()
    """What each dimension is: ``("s", "b", "h")``."""
    shape: tuple[int, ...] | None = None
    """On this rank; None where it is not known before it has been seen."""
    dtype: str = ""
    shard: Shard = ()
    replica: int = 0
    """Index among the ranks that hold the very same part."""
    layer: int = -1
    heads: tuple[int, int, int] | None = None
    """First head on this rank, how many, and how many the whole model has."""
    module: str = ""
    """Path of the module in its model chunk."""
    chunk: int = 0
    part: tuple[int, int] | None = None
    """Of a shard of a distributed optimizer: which elements (first, end) of the flattened parameter that the ranks of
    its tensor parallel place hold."""

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; what is as usual is left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        usual = {field.name: field.default for field in fields(self)}
        return {key: _plain(value) for key, value in values.items() if value != usual[key]}

    @classmethod
    def from_json(cls, value: object) -> Tap:
        """The way back. ValueError for what is no tap; fields of a later version are passed over."""
        if not isinstance(value, Mapping):
            raise ValueError("a tap is a JSON object")
        given = cast("Mapping[str, Any]", value)
        name, kind = given.get("name"), given.get("kind")
        if not isinstance(name, str) or not name or kind not in _KINDS:
            raise ValueError("a tap has a name and a kind")
        shape, heads, part = given.get("shape"), given.get("heads"), given.get("part")
        return cls(
            name=name,
            kind=cast("TapKind", kind),
            labels=tuple(_text(label, "labels") for label in _list(given.get("labels", ()), "labels")),
            shape=None if shape is None else _numbers(shape, "shape"),
            dtype=_text(given.get("dtype", ""), "dtype"),
            shard=shard_from_json(given.get("shard", ())),
            replica=_number(given.get("replica", 0), "replica"),
            layer=_number(given.get("layer", -1), "layer"),
            heads=None if heads is None else cast("tuple[int, int, int]", _tuple(heads, "heads", 3)),
            module=_text(given.get("module", ""), "module"),
            chunk=_number(given.get("chunk", 0), "chunk"),
            part=None if part is None else cast("tuple[int, int]", _tuple(part, "part", 2)),
        )


def shard_from_json(value: object) -> Shard:
    """A shard as JSON has it: a list of [axis, index, count]. ValueError for anything else."""
    shard: list[tuple[str, int, int]] = []
    for part in _list(value, "shard"):
        entry = _list(part, "shard")
        if len(entry) != 3:
            raise ValueError("a tap's shard is a list of [axis, index, count]")
        shard.append((_text(entry[0], "shard"), _number(entry[1], "shard"), _number(entry[2], "shard")))
    return tuple(shard)


class Pattern:
    """A pattern, ready to be held against names."""

    __slots__ = ("_alternatives", "text")

    def __init__(self, text: str) -> None:
        """ValueError, in one line, for what is no pattern."""
        if not text or len(text) > LONGEST_PATTERN:
            raise ValueError(f"a pattern has 1 to {LONGEST_PATTERN} characters, not {len(text)}")
        if any(character.isspace() or not character.isprintable() for character in text):
            raise ValueError(f"the pattern {text!r} holds white space")
        self.text = text
        self._alternatives = [_segments(plain, text) for plain in _expand(text)]

    def matches(self, name: str) -> bool:
        """Is this name meant?"""
        parts = name.split(".")
        return any(_matches(alternative, parts) for alternative in self._alternatives)


def choose(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means, in order; ValueError that names the closest ones where there are none."""
    compiled = Pattern(pattern)
    names = list(names)
    chosen = [name for name in names if compiled.matches(name)]
    if not chosen:
        raise ValueError(no_match(pattern, names))
    return sorted(set(chosen), key=order)


def no_match(pattern: str, names: Iterable[str]) -> str:
    """The line that says that a pattern means nothing here, with the closest names."""
    close = closest(pattern, names)
    return f"no tap matches {pattern!r}" + (f"; close to it: {', '.join(close)}" if close else "; there are none")


def closest(pattern: str, names: Iterable[str], most: int = 4) -> list[str]:
    """Names, or ranges of names, most like a pattern; the best first."""
    ranges = summarise(names)
    if not ranges:
        return []
    forms: dict[str, str] = {}
    for text in ranges:
        forms.setdefault(_form(text), text)
    return [forms[form] for form in difflib.get_close_matches(_form(pattern), forms, most, cutoff=0.0)]


def summarise(names: Iterable[str]) -> list[str]:
    """Names that differ by numbers only, as one pattern with ranges: ``layers.0-3.mlp.output``. In order.

    A range may take in numbers that are not there (those of other pipeline stages, for instance).
    """
    families: dict[tuple[str, ...], list[list[int]]] = {}
    for name in names:
        parts = name.split(".")
        numbers = [int(part) for part in parts if _is_number(part)]
        form = tuple("#" if _is_number(part) else part for part in parts)
        families.setdefault(form, []).append(numbers)
    lines: list[str] = []
    for form, numbers in families.items():
        spans = iter([_span(column) for column in zip(*numbers, strict=True)])
        lines.append(".".join(next(spans) if part == "#" else part for part in form))
    return sorted(lines, key=order)


def is_stored(name: str) -> bool:
    """Is it of a parameter or of the optimizer, which stay, and not of what passes by?"""
    return name.startswith(_STORED)


def order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Key to sort names by: as the model computes them, numbers by their value."""
    name, gradient = (name.removesuffix(GRADIENT), 1) if name.endswith(GRADIENT) else (name, 0)
    root, _, rest = name.partition(".")
    key = [(_rank(_ROOTS, root), 0, root)]
    if root == "layers":
        number, _, part = rest.partition(".")
        key.append(_segment_key(number))
        key.append((_rank(_PARTS, part), 0, ""))
        rest = part
    key.extend(_segment_key(part) for part in rest.split("."))
    return (*key, (-1, gradient, ""))


def layer_name(layer: int, part: str) -> str:
    """Name of a tensor of a block: ``layer_name(3, "mlp.output")``."""
    return f"layers.{layer}.{part}"


def gradient_name(name: str) -> str:
    """Name of the gradient of the tensor called ``name``."""
    return name + GRADIENT


# ---------------------------------------------------------------- patterns


def _expand(text: str) -> list[str]:
    """Without braces: one text for each choice."""
    done: list[str] = []
    todo = [text]
    while todo:
        current = todo.pop()
        close = current.find("}")
        opening = current.rfind("{", 0, close) if close >= 0 else current.find("{")
        if close < 0 and opening < 0:
            done.append(current)
        elif close < 0 or opening < 0:
            raise ValueError(f"the braces of the pattern {text!r} do not match")
        else:  # the innermost braces that close first
            before, choices, after = current[:opening], current[opening + 1 : close], current[close + 1 :]
            todo.extend(before + choice + after for choice in reversed(choices.split(",")))
        if len(todo) + len(done) > MOST_ALTERNATIVES:
            raise ValueError(f"the pattern {text!r} has more than {MOST_ALTERNATIVES} alternatives")
    return list(dict.fromkeys(done))


_Segment = str | range | list[str] | None
"""Text as it is; a range of numbers; the pieces between stars; None: any number of segments."""


def _segments(plain: str, text: str) -> list[_Segment]:
    segments: list[_Segment] = []
    for part in plain.split("."):
        if not part:
            raise ValueError(f"the pattern {text!r} has an empty segment")
        if part == "**":
            if not segments or segments[-1] is not None:
                segments.append(None)
        elif (span := _range(part)) is not None:
            if not span:
                raise ValueError(f"the range {part} in the pattern {text!r} ends before it begins")
            segments.append(span)
        elif "[" in part or "]" in part:
            raise ValueError(f"{part!r} in the pattern {text!r} is no range of numbers such as [0-3]")
        else:
            segments.append(part.split("*") if "*" in part else part)
    return segments


def _range(part: str) -> range | None:
    if part.startswith("[") and part.endswith("]"):
        part = part[1:-1]
        if _is_number(part):
            return range(int(part), int(part) + 1)
    first, dash, last = part.partition("-")
    return range(int(first), int(last) + 1) if dash and _is_number(first) and _is_number(last) else None


def _matches(pattern: Sequence[_Segment], parts: Sequence[str]) -> bool:
    """By the set of places in the pattern that one may have come to: linear in the name, however many stars."""
    places = {0}
    for part in parts:
        following: set[int] = set()
        for place in _opened(pattern, places):
            if place == len(pattern):
                continue
            segment = pattern[place]
            if segment is None:
                following.add(place)
            elif _fits(segment, part):
                following.add(place + 1)
        if not following:
            return False
        places = following
    return len(pattern) in _opened(pattern, places)


def _opened(pattern: Sequence[_Segment], places: set[int]) -> set[int]:
    """With those behind a ``**``, which may stand for nothing."""
    return places | {place + 1 for place in places if place < len(pattern) and pattern[place] is None}


def _fits(segment: str | range | list[str], part: str) -> bool:
    if isinstance(segment, str):
        return segment == part
    if isinstance(segment, range):
        return _is_number(part) and int(part) in segment
    first, *middle, last = segment
    if len(part) < len(first) + len(last) or not part.startswith(first) or not part.endswith(last):
        return False
    at, end = len(first), len(part) - len(last)
    for piece in middle:
        at = part.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


# ------------------------------------------------------------------- order


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= _DIGITS


def _segment_key(part: str) -> tuple[int, int, str]:
    return (0, int(part), part) if _is_number(part) else _span_key(part)


def _span_key(part: str) -> tuple[int, int, str]:
    span = _range(part)
    return (0, span.start, part) if span is not None else (1, 0, part)


def _rank(known: Sequence[str], part: str) -> int:
    return known.index(part) if part in known else len(known)


def _span(numbers: Sequence[int]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first}-{last}"


def _form(text: str) -> str:
    """What is compared for likeness: any number, range or alternative is as good as another."""
    parts = ["#" if _is_number(part) or _range(part) is not None else part for part in text.split(".")]
    return ".".join(parts).replace("{", "").replace("}", "")


# -------------------------------------------------------------------- JSON


def _plain(value: Any) -> Any:
    return [_plain(part) for part in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value


def _list(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"a tap's {what} is a list")
    return cast("Sequence[object]", value)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a tap's {what} is text")
    return value


def _number(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"a tap's {what} is a whole number")
    return value


def _numbers(value: object, what: str) -> tuple[int, ...]:
    return tuple(_number(part, what) for part in _list(value, what))


def _tuple(value: object, what: str, length: int) -> tuple[int, ...]:
    numbers = _numbers(value, what)
    if len(numbers) != length:
        raise ValueError(f"a tap's {what} are {length} numbers")
    return numbers
