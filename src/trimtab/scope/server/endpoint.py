"""An endpoint of the API: one entry of a table from which both the routes and their description are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from trimtab.scope.fields import closest
from trimtab.scope.server.answers import JSON, Problem
from trimtab.scope.server.guard import Caller
from trimtab.scope.server.schema import Schema, said
from trimtab.scope.subscription import numbers

if TYPE_CHECKING:
    from trimtab.scope.server.service import Service

Access = Literal["open", "read", "control"]
"""Who may: anybody who reaches the server; who has shown the token; who has shown the second token, too."""
_WORDS: Final = {"true": True, "1": True, "false": False, "0": False}
_LONGEST: Final = 1024


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in the path or the query."""

    name: str
    schema: Schema
    default: Any = None
    required: bool = False
    where: Literal["path", "query"] = "query"

    def read(self, text: str) -> Any:
        """From its text; :class:`Problem` says what was expected."""
        if len(text) > _LONGEST:
            raise Problem(400, f"{self.name} is longer than {_LONGEST} characters")
        kind = self.schema.get("type")
        if kind == "integer":
            low, high = self.schema.get("minimum", 0), self.schema.get("maximum", (1 << 53) - 1)
            digits = text.removeprefix("-")
            if not (digits.isdecimal() and digits.isascii() and len(digits) <= 16 and low <= int(text) <= high):
                raise Problem(400, f"{self.name}={text!a}: expected a whole number from {low} to {high}")
            return int(text)
        if kind == "boolean":
            if text not in _WORDS:
                raise Problem(400, f"{self.name}={text!a}: expected true or false")
            return _WORDS[text]
        words = self.schema.get("enum")
        if words is not None and text not in words:
            raise Problem(400, f"{self.name}={text!a}: expected one of {', '.join(words)}")
        if self.schema.get("format") == "numbers":
            try:
                return numbers(text, self.name)
            except ValueError as error:
                raise Problem(400, str(error)) from None
        return text


@dataclass(slots=True)
class Call:
    """One request, read."""

    caller: Caller
    values: Mapping[str, Any]
    """Of the parameters."""
    body: Any = None
    more_in_seconds: float = 0.0
    """Set by who answers: after so long the same request will have more to its answer; 0: that is not known."""

    def text(self, name: str) -> str:
        """A text parameter, empty where it was not given."""
        return self.values[name] or ""

    def whole(self, name: str) -> int:
        """An integer parameter that was given or has a default."""
        return int(self.values[name])

    def maybe(self, name: str) -> int | None:
        """An integer parameter that may be left out."""
        return self.values[name]

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """Numbers such as ``0,3-5``; None: all."""
        return self.values[name]


Handler = Callable[["Service", Call], object]
"""Answers; on a thread of a pool, so it may take its time. Raises :class:`Problem`, or ValueError for bad input."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is answered there."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    """Below ``/api/v1``; parameters in braces."""
    name: str
    """``operationId``."""
    summary: str
    handler: Handler
    answer: Schema = field(default_factory=dict[str, Any])
    """Of the JSON that comes with ``status``."""
    parameters: tuple[Parameter, ...] = ()
    body: Schema | None = None
    access: Access = "read"
    status: int = 200
    media: tuple[str, ...] = (JSON,)
    tag: str = "live"

    def read(self, given: Mapping[str, str], path: Mapping[str, str]) -> dict[str, Any]:
        """Values of all parameters; :class:`Problem` for unknown, wrong and missing ones."""
        values: dict[str, Any] = {}
        known = {parameter.name for parameter in self.parameters if parameter.where == "query"}
        for name in given:
            if name not in known:
                near = closest(name, known, 1)
                hint = f"; {near[0]}?" if near else f"; known are {', '.join(sorted(known))}" if known else ""
                raise Problem(400, f"the parameter {name[:80]!a} is unknown here{hint}")
        for parameter in self.parameters:
            text = (path if parameter.where == "path" else given).get(parameter.name)
            if text is None or (text == "" and not parameter.required):
                if parameter.required:
                    raise Problem(400, f"the parameter {parameter.name} is missing")
                values[parameter.name] = parameter.default
            else:
                values[parameter.name] = parameter.read(text)
        return values


def text(name: str, description: str, *, required: bool = False, default: str | None = None) -> Parameter:
    """A text."""
    schema: Schema = {"type": "string", "maxLength": _LONGEST}
    return Parameter(name, said(schema, description), default, required)


def whole(
    name: str, description: str, *, low: int = 0, high: int = (1 << 53) - 1, default: int | None = None
) -> Parameter:
    """An integer."""
    return Parameter(name, said({"type": "integer", "minimum": low, "maximum": high}, description), default)


def word(name: str, description: str, *words: str, default: str | None = None) -> Parameter:
    """One of some words."""
    return Parameter(name, said({"type": "string", "enum": list(words)}, description), default, default is None)


def truth(name: str, description: str) -> Parameter:
    """True or false; false where it is left out."""
    return Parameter(name, said({"type": "boolean"}, description), False)


def several(name: str, description: str) -> Parameter:
    """Numbers and ranges of numbers."""
    return Parameter(name, said({"type": "string", "format": "numbers"}, f"{description}, such as 0,3-5. Default: all"))


def of_path(name: str, description: str) -> Parameter:
    """A segment of the path."""
    return Parameter(name, said({"type": "string", "maxLength": _LONGEST}, description), None, True, "path")
