"""When what was asked for is enough, and when nothing will come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trimtab.scope.collector.interface import Notice
    from trimtab.scope.collector.ranks import Beat
    from trimtab.scope.subscription import Subscription

FEWEST_STEPS: Final = 3
"""That were due, before it is said that nothing came."""
FEWEST_SECONDS: Final = 5.0
_TOGETHER_SECONDS: Final = 1.0
"""In which other ranks say the same of a subscription."""
_MOST_TEXT: Final = 500
_PAUSED: Final = ("budget", "lease")


@dataclass(slots=True)
class Enough:
    """Which are shown, and when that is enough."""

    most: int | None
    ends: list[int | None] = field(default_factory=list[int | None])
    """Last step of each subscription."""
    _seen: set[int] = field(default_factory=set[int])

    def takes(self, step: int) -> bool:
        """Is this one to be shown?"""
        if step not in self._seen:
            if self.most is not None and len(self._seen) >= self.most:
                return False
            self._seen.add(step)
        return True

    def over(self, slowest: int) -> bool:
        """Nothing more is to come: every rank is in a step after the last one."""
        if self.most is not None and len(self._seen) >= self.most and slowest > max(self._seen):
            return True
        return all(last is not None and slowest > last for last in self.ends)


@dataclass(slots=True)
class _Hope:
    """One subscription."""

    wish: Subscription
    ranks: frozenset[int]
    """That measure it."""
    begin: int
    """First step at which it was in force."""
    came: bool = False
    told: bool = False
    due_since: float | None = None
    """When a step at which it was due was over; None: none is."""
    failed: set[int] = field(default_factory=set[int])
    notices: list[tuple[float, Notice]] = field(default_factory=list["tuple[float, Notice]"])
    """That ranks have sent, and nobody was told yet."""

    @property
    def lost(self) -> bool:
        """All ranks have failed."""
        return bool(self.failed) and self.failed >= self.ranks

    def due(self, slowest: int) -> range:
        """Steps that are over on all ranks, and at which something was to come."""
        when = self.wish.when
        first = when.first + -(-max(self.begin - when.first, 0) // when.every) * when.every
        last = slowest - 1 if when.last is None else min(slowest - 1, when.last)
        return range(first, last + 1, when.every)


class Hopes:
    """Of a command, for what it has subscribed to."""

    def __init__(self) -> None:
        self._every: dict[str, _Hope] = {}
        self._heard: list[Notice] = []

    def expect(self, name: str, wish: Subscription, said: Mapping[str, Any]) -> None:
        """``wish`` is agreed on; ``said``: what the collector's status has of it."""
        self._every[name] = _Hope(wish, frozenset(said.get("ranks", ())), int(said.get("step", -1)))

    def came(self, name: str) -> None:
        """A frame."""
        self._every[name].came = True

    def failed(self, notice: Notice) -> bool:
        """A rank says that it cannot measure one of them: kept for :meth:`failures`, which is to be called next."""
        hope = self._every.get(notice.subscription)
        if notice.kind != "error" or hope is None:
            return False
        hope.failed |= hope.ranks if notice.details.get("end") is True else {notice.rank}
        self._heard.append(notice)
        return True

    def failures(self, now: float) -> Iterator[Notice]:
        """What to say of those that failed on some ranks only, a little later, as others may follow. ValueError where
        nothing is left that could come: one line for all ranks."""
        for notice in self._heard:
            self._every[notice.subscription].notices.append((now, notice))
        self._heard.clear()
        hopes = self._every
        if hopes and all(hope.lost for hope in hopes.values()):
            name, hope = next(((name, hope) for name, hope in hopes.items() if hope.notices), next(iter(hopes.items())))
            why = hope.notices[0][1].text if hope.notices else "it failed on all ranks"
            raise ValueError(f"{name}: {' '.join(why.split())[:_MOST_TEXT]}")
        for hope in hopes.values():
            while hope.notices and now - hope.notices[0][0] >= _TOGETHER_SECONDS:
                yield hope.notices.pop(0)[1]

    def disappointed(self, beats: Mapping[int, Beat], slowest: int, now: float, *, over: bool = False) -> Iterator[str]:
        """What to say, once, of those of which nothing has come at steps at which it was due (``over``: no more will
        be). Nothing as long as anything has come of another one, or one is paused."""
        waited = [(name, hope) for name, hope in self._every.items() if not hope.told]
        if any(hope.came for hope in self._every.values()):
            return
        for name, hope in waited:
            due = hope.due(slowest)
            paused = any(beat.subscriptions.get(name) in _PAUSED for beat in beats.values())
            if not due or paused:
                hope.due_since = None
                continue
            if hope.due_since is None:
                hope.due_since = now
            if over or (len(due) >= FEWEST_STEPS and now - hope.due_since >= FEWEST_SECONDS):
                hope.told = True
                yield _nothing(name, hope.wish, due)


def _nothing(name: str, wish: Subscription, due: range) -> str:
    where = f"step {due[0]} was" if len(due) == 1 else f"steps {due[0]}-{due[-1]} were"
    parameters = wish.parameters
    asked = {
        "row": parameters.get("rows") is not None,
        "token": parameters.get("tokens") is not None,
        "sequence of the microbatch": bool(parameters.get("batch")),
        "microbatch": max(wish.when.microbatches or (0,)) > 0,  # the first is in each step
    }
    named = " or ".join(word for word, given in asked.items() if given)
    why = f"is there no such {named}" if named else "does nothing pass there"
    return f"{name}: {where} due, and nothing came of {wish.what} of {wish.pattern}; {why}?"
