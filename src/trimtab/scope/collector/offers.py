"""Which taps each rank offers: asked page by page when somebody wants to know, and kept until a rank says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, cast

from trimtab.control.endpoint import NoReply
from trimtab.control.messages import from_json
from trimtab.scope.collector.interface import Offered
from trimtab.scope.collector.ranks import Beat
from trimtab.scope.messages import TAPS
from trimtab.scope.names import Pattern, Tap, no_match, order
from trimtab.scope.subscription import WHATS

_MOST_PAGES: Final = 10_000
_PATIENCE: Final = 10.0

Request = Callable[[int, str, Mapping[str, Any]], "Future[bytes]"]
"""Asks a rank for something."""


class Offers:
    """Taps by rank. For one thread at a time; :meth:`fetch` waits for answers."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._taps: dict[int, tuple[tuple[int, int], dict[str, Tap]]] = {}

    def fetch(self, beats: Mapping[int, Beat]) -> list[str]:
        """Ask those whose taps are not known, all at the same time; what went wrong, a line for each rank."""
        for rank in set(self._taps) - set(beats):
            del self._taps[rank]
        versions = {rank: (beat.started, beat.taps) for rank, beat in beats.items()}
        pages = {
            rank: _Pages()
            for rank, version in versions.items()
            if rank not in self._taps or self._taps[rank][0] != version
        }
        problems: list[str] = []
        asked = {rank: self._ask(rank, 0) for rank in pages}
        while asked:
            following: dict[int, Future[bytes]] = {}
            for rank, future in asked.items():
                try:
                    more = pages[rank].add(from_json(future.result(_PATIENCE)))
                except (NoReply, ValueError, TimeoutError) as error:
                    problems.append(f"rank {rank} does not say what it offers: {error}")
                    continue
                if more is None:
                    self._taps[rank] = (versions[rank], pages[rank].taps)
                else:
                    following[rank] = self._ask(rank, more)
            asked = following
        return problems

    def choose(
        self, pattern: str, *, ranks: Iterable[int] | None = None, layers: Iterable[int] | None = None
    ) -> list[Offered]:
        """Those that ``pattern`` means, in order; ValueError with the closest names where there are none."""
        compiled = Pattern(pattern)
        allowed = None if ranks is None else set(ranks)
        wanted = None if layers is None else set(layers)
        found: dict[str, list[tuple[int, Tap]]] = {}
        matches: dict[str, bool] = {}
        for rank in sorted(self._taps):
            if allowed is not None and rank not in allowed:
                continue
            for name, tap in self._taps[rank][1].items():
                if name not in matches:
                    matches[name] = compiled.matches(name)
                if matches[name] and (wanted is None or tap.layer in wanted):
                    found.setdefault(name, []).append((rank, tap))
        if not found:
            raise ValueError(self._nothing(pattern, matches, allowed, wanted))
        return [Offered(name, tuple(found[name])) for name in sorted(found, key=order)]

    def _ask(self, rank: int, first: int) -> Future[bytes]:
        return self._request(rank, TAPS, {"from": first})

    def _nothing(
        self, pattern: str, matches: Mapping[str, bool], ranks: set[int] | None, layers: set[int] | None
    ) -> str:
        if not matches and self._taps and ranks is not None:
            return f"no tap matches {pattern!r} on rank {', '.join(map(str, sorted(ranks)))}: there is no such rank"
        if any(matches.values()) and layers is not None:
            return f"no tap matches {pattern!r} in layer {', '.join(map(str, sorted(layers)))}"
        everywhere = {name for _, taps in self._taps.values() for name in taps}
        if not everywhere:
            return "the ranks have not shown their model yet: they do in their first step"
        if any(Pattern(pattern).matches(name) for name in everywhere) and ranks is not None:
            where = sorted(rank for rank, (_, taps) in self._taps.items() if any(map(Pattern(pattern).matches, taps)))
            return f"no tap matches {pattern!r} on these ranks; it is on rank {', '.join(map(str, where[:16]))}"
        return no_match(pattern, everywhere)


def fitting(offered: Sequence[Offered], what: str) -> list[Offered]:
    """Those of which ``what`` can be had; ValueError, in one line that says what can, where there are none."""
    found = [one for one in offered if _fits(one.first, what)]
    if offered and not found:
        name, kind = offered[0].name, offered[0].first.kind
        more = f" (as of {len(offered) - 1} more that match)" if len(offered) > 1 else ""
        if kind == "attention":
            raise ValueError(f"{name} has only --what attention{more}, not {what}")
        if kind == "communication":
            raise ValueError(f"{name}{more} can be disturbed, and not be measured")
        others = ", ".join(one for one in WHATS if one != "attention")
        raise ValueError(f"{name} has no attention map{more}; --what {others} can be had of it")
    return found


def _fits(tap: Tap, what: str) -> bool:
    return tap.kind != "communication" and (tap.kind == "attention") == (what == "attention")


class _Pages:
    """What one rank has said so far."""

    def __init__(self) -> None:
        self.taps: dict[str, Tap] = {}
        self._count = 0

    def add(self, said: object) -> int | None:
        """A page; the number of the first tap of the next one."""
        if not isinstance(said, Mapping):
            raise ValueError("its answer makes no sense")
        page = cast("Mapping[str, Any]", said)
        listed, following = page.get("taps"), page.get("next")
        if not isinstance(listed, list):
            raise ValueError("its answer makes no sense")
        for entry in cast("list[object]", listed):
            tap = Tap.from_json(entry)
            self.taps[tap.name] = tap
        self._count += 1
        if following is None:
            return None
        if type(following) is not int or self._count > _MOST_PAGES:
            raise ValueError("its answer has no end")
        return following
