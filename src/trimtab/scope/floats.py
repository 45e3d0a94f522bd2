"""Which bit of a number means what, for each floating-point format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Format:
    """A number's bits, from the lowest: mantissa, exponent, sign."""

    mantissa: int
    exponent: int

    @property
    def bits(self) -> int:
        """How many in all; the sign is the last of them."""
        return self.mantissa + self.exponent + 1

    def field(self, name: str) -> range:
        """The bits of ``sign``, ``exponent`` or ``mantissa``, from the lowest."""
        if name == "mantissa":
            return range(self.mantissa)
        if name == "exponent":
            return range(self.mantissa, self.mantissa + self.exponent)
        return range(self.bits - 1, self.bits)

    def name(self, bit: int) -> str:
        """``sign``, ``exponent[2]`` or ``mantissa[0]``: what a bit is."""
        for field in ("mantissa", "exponent"):
            if bit in (span := self.field(field)):
                return f"{field}[{bit - span.start}]"
        return "sign"


FORMATS: Final[dict[str, Format]] = {
    "float64": Format(52, 11),
    "float32": Format(23, 8),
    "bfloat16": Format(7, 8),
    "float16": Format(10, 5),
    "float8_e4m3fn": Format(3, 4),
    "float8_e4m3fnuz": Format(3, 4),
    "float8_e5m2": Format(2, 5),
    "float8_e5m2fnuz": Format(2, 5),
}
_INTEGERS: Final = {"bool": 8, "uint8": 8, "int8": 8, "int16": 16, "int32": 32, "int64": 64}
FIELDS: Final = ("sign", "exponent", "mantissa", "random")
"""What can be said instead of a number: one of these bits, drawn for each element."""
_ONE: Final = re.compile(r"(exponent|mantissa)\[(\d{1,2})\]")
_MOST: Final = 63


def width(dtype: str) -> int | None:
    """Bits of a type; None where it is unknown."""
    known = FORMATS.get(dtype)
    return known.bits if known is not None else _INTEGERS.get(dtype)


def choices(wanted: Sequence[object], dtype: str) -> list[tuple[int, ...]]:
    """For each of the wanted bits those among which it is drawn (one, where it is said). ValueError for what a type
    does not have."""
    problem = bits_problem(wanted, dtype)
    bits = width(dtype)
    if problem is not None or bits is None:
        raise ValueError(problem or f"bits of {dtype} are not known")
    found: list[tuple[int, ...]] = []
    for one in wanted:
        if isinstance(one, int):
            found.append((one,))
        elif one == "random":
            found.append(tuple(range(bits)))
        else:
            form = FORMATS[dtype]
            exact = _ONE.fullmatch(str(one))
            found.append((form.field(exact[1])[int(exact[2])],) if exact else tuple(form.field(str(one))))
    return found


def bits_problem(wanted: Sequence[object], dtype: str) -> str | None:
    """What is wrong with a choice of bits, in one line; ``dtype`` ``""``: of whatever type."""
    if not wanted or len(wanted) > _MOST + 1:
        return "bits: 1 to 64 of them, such as [14] or ['exponent']"
    if len(set(map(str, wanted))) < len(wanted):
        return "bits: one is said twice"
    for one in wanted:
        if type(one) is int:
            most = (width(dtype) or _MOST + 1) - 1 if dtype else _MOST
            if not 0 <= one <= most:
                return f"bit {one} is not there: {dtype or 'a number'} has 0 to {most}"
        elif not isinstance(one, str) or (one not in FIELDS and not _ONE.fullmatch(one)):
            return f"bits: {one!r} is none; numbers, {', '.join(FIELDS)}, or one as exponent[2]"
        elif dtype and (problem := _field_problem(one, dtype)):
            return problem
    return None


def _field_problem(one: str, dtype: str) -> str | None:
    if one == "random":
        return None if width(dtype) else f"bits of {dtype} are not known"
    form = FORMATS.get(dtype)
    if form is None:
        return f"{dtype} has no {one}: it is no floating-point number"
    exact = _ONE.fullmatch(one)
    if exact and int(exact[2]) >= len(form.field(exact[1])):
        return f"{one} is not there: {dtype} has {len(form.field(exact[1]))} bits of {exact[1]}"
    return None
