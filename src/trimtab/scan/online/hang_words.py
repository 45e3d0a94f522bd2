"""A diagnosis in words, safe to print."""

from __future__ import annotations

from typing import Final

from trimtab.scan.online.hang import Diagnosis, Elsewhere, Waiting
from trimtab.scan.report.wording import clean, ranks_named

_MOST: Final = 6
"""Places, roots and circles that are told."""


def lines(diagnosis: Diagnosis) -> list[str]:
    """One sentence a line: the cause first, then who waits where."""
    said: list[str] = []
    for one in diagnosis.mismatches[:_MOST]:
        calls = ", ".join(f"{clean(op)} of {_size(nbytes)}" for op, nbytes in one.ops[:_MOST])
        said.append(f"Mismatch in {_where(one)}: {ranks_named(one.arrived)} came with different operations: {calls}.")
    for circle in diagnosis.deadlocks[:_MOST]:
        chain = ", ".join(f"{rank} waits for {after}" for rank, after in zip(circle, _turned(circle), strict=True))
        said.append(f"Deadlock: {ranks_named(circle)} wait for each other ({chain}).")
    said += [_root(root) for root in diagnosis.roots[:_MOST]]
    if len(diagnosis.roots) > _MOST:
        said.append(f"{len(diagnosis.roots) - _MOST} more ranks are missing and wait for nobody.")
    for one in diagnosis.stuck[:_MOST]:
        said.append(
            f"All have come to {_what(one)} in {_where(one)}, and it does not end: the network, or the library."
        )
    for one in diagnosis.waiting[:_MOST]:
        missing = f"; {ranks_named(one.missing)} missing" if one.missing else ""
        verb = "waits" if len(one.arrived) == 1 else "wait"
        who = ranks_named(one.arrived)
        said.append(
            f"{who[:1].upper()}{who[1:]} {verb} for {one.seconds:.0f} s in {_what(one)} in {_where(one)}{missing}."
        )
    if len(diagnosis.waiting) > _MOST:
        said.append(f"Ranks wait in {len(diagnosis.waiting) - _MOST} more places.")
    if not diagnosis.waiting:
        said.append("No rank waits in a communication.")
    return said


def _root(root: Elsewhere) -> str:
    if root.silent:
        last = f"; it was in step {root.step}, {clean(root.phase) or 'at no known place'}" if root.step >= 0 else ""
        return f"Rank {root.rank} is missing: nothing is heard of it{last}."
    where = f"in {clean(root.phase)}" if root.phase else "outside of any communication"
    return f"Rank {root.rank} is missing: it is {where} (step {root.step}), and waits for nobody."


def _what(one: Waiting) -> str:
    op, nbytes = one.ops[0]
    number = f" {one.place.seq}" if one.place.seq >= 0 else ""
    return f"{clean(op)}{number} ({_size(nbytes)})"


def _where(one: Waiting) -> str:
    place = one.place
    if place.is_message:
        return f"{clean(place.group)} from rank {place.src} to {place.dst}"
    return f"group {clean(place.group)}"


def _turned(circle: tuple[int, ...]) -> tuple[int, ...]:
    return circle[1:] + circle[:1]


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} bytes"
