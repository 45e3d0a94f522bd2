"""Reading a JSON object from others field by field: each has a type and a range, and what is not known is refused."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

MOST_INTEGER: Final = (1 << 53) - 1
"""Larger ones are not the same number in every reader of JSON."""
_LARGEST: Final = sys.float_info.max
"""JSON knows larger whole numbers, which are none of ours."""
_ABSENT: Final = object()


def closest(word: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Of ``known`` those that ``word`` may have meant, the likeliest first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=0.5)


class Fields:
    """One object. Whatever is not as it should be is a ValueError in one line that begins with its name."""

    def __init__(self, value: object, what: str) -> None:
        """``what`` the object is, for the messages."""
        if not isinstance(value, Mapping):
            raise ValueError(f"{what}: expected an object, not {_shown(value)}")
        self._left = dict(cast("Mapping[str, Any]", value))
        self._known: set[str] = set()
        self.what = what

    def integer(self, name: str, default: Any = _ABSENT, *, low: int = 0, high: int = MOST_INTEGER) -> Any:
        """A whole number from ``low`` to ``high``."""
        found = self._take(name, default)
        if found is default and default is not _ABSENT:
            return found
        if type(found) is not int or not low <= found <= high:
            self._refuse(name, f"a whole number from {low} to {high}", found)
        return found

    def number(self, name: str, default: Any = _ABSENT, *, low: float = -math.inf, high: float = math.inf) -> Any:
        """A finite number from ``low`` to ``high``."""
        found = self._take(name, default)
        if found is default and default is not _ABSENT:
            return found
        if type(found) not in (int, float) or not abs(found) <= _LARGEST or not low <= found <= high:
            upwards = f" from {low:g} on" if low > -math.inf else ""
            self._refuse(
                name, "a finite number" + upwards if high == math.inf else f"a number from {low:g} to {high:g}", found
            )
        return float(found)

    def truth(self, name: str, default: Any = _ABSENT) -> Any:
        """True or false."""
        found = self._take(name, default)
        if type(found) is not bool and found is not default:
            self._refuse(name, "true or false", found)
        return found

    def text(self, name: str, default: Any = _ABSENT, *, longest: int = 256) -> Any:
        """A string."""
        found = self._take(name, default)
        if found is default and default is not _ABSENT:
            return found
        if not isinstance(found, str) or len(found) > longest:
            self._refuse(name, f"a text of at most {longest} characters", found)
        return found

    def one_of(self, name: str, choices: tuple[str, ...], default: Any = _ABSENT) -> Any:
        """One of some words."""
        found = self._take(name, default)
        if found not in choices:
            near = closest(found, choices, 1) if isinstance(found, str) else []
            self._refuse(name, f"one of {', '.join(choices)}", found, f"; {near[0]}?" if near else "")
        return found

    def integers(
        self, name: str, default: Any = _ABSENT, *, low: int = 0, high: int = MOST_INTEGER, most: int = 65_536
    ) -> Any:
        """A list of whole numbers from ``low`` to ``high``, as a tuple."""
        found = self._take(name, default)
        if found is default and default is not _ABSENT:
            return found
        if not isinstance(found, list | tuple):
            self._refuse(name, "a list of whole numbers", found)
        listed = list(cast("Iterable[Any]", found))
        if len(listed) > most or not all(type(one) is int and low <= one <= high for one in listed):
            self._refuse(name, f"at most {most} whole numbers from {low} to {high}", listed)
        return tuple(listed)

    def texts(self, name: str, *, longest: int = 256, most: int = 4096) -> tuple[str, ...]:
        """A list of texts, as a tuple."""
        found: object = self._take(name, _ABSENT)
        listed = list(cast("Iterable[object]", found)) if isinstance(found, list | tuple) else [None]
        texts = [one for one in listed if isinstance(one, str) and len(one) <= longest]
        if len(listed) > most or len(texts) < len(listed):
            self._refuse(name, f"a list of at most {most} texts", cast("object", found))
        return tuple(texts)

    def object(self, name: str, default: Any = _ABSENT) -> Any:
        """An object of whatever fields."""
        found = self._take(name, default)
        if not isinstance(found, Mapping) and found is not default:
            self._refuse(name, "an object", found)
        return cast("Any", found)

    def anything(self, name: str, default: Any = _ABSENT) -> Any:
        """Whatever it is; the caller checks it."""
        return self._take(name, default)

    def done(self) -> None:
        """Everything has been read: what is left is unknown."""
        if self._left:
            unknown = min(self._left)
            near = closest(unknown, self._known, 1)
            hint = f"; {near[0]}?" if near else f"; known are {', '.join(sorted(self._known))}" if self._known else ""
            raise ValueError(f"{self.what}: {_shown(unknown)} is unknown{hint}")

    def _take(self, name: str, default: Any) -> Any:
        self._known.add(name)
        found = self._left.pop(name, default)
        if found is _ABSENT:
            raise ValueError(f"{self.what}: {name} is missing")
        return found

    def _refuse(self, name: str, expected: str, found: object, hint: str = "") -> None:
        raise ValueError(f"{self.what}: {name} is to be {expected}, not {_shown(found)}{hint}")


def _shown(value: object) -> str:
    return ascii(value)[:80]
