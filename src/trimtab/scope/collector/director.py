"""What the collector has the ranks do: each wish is agreed on with all ranks that it concerns, one after the other."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from trimtab.scope.collector.agreement import Agreed, Agreement, ChangeKind, Rules
from trimtab.scope.collector.asking import Request, agree
from trimtab.scope.collector.claims import Claims
from trimtab.scope.collector.interface import Notice, Offered
from trimtab.scope.collector.offers import Offers, fitting
from trimtab.scope.collector.ranks import Beat, Ranks
from trimtab.scope.collector.wish import Wish, WishKind
from trimtab.scope.names import Tap, order
from trimtab.scope.perturb.wording import describe, preview
from trimtab.scope.perturbation import SOON, Perturbation
from trimtab.scope.subscription import MOST_SUBSCRIPTIONS, Subscription

KINDS: Final[dict[WishKind, ChangeKind]] = {
    "subscription": "subscribe",
    "perturbation": "perturb",
    "probe": "probe",
    "pair": "pair",
}
_SUBSCRIBING: Final = Rules(lead_seconds=0.25, partial=True, needs_match=True)
_ENDING: Final = Rules(lead_seconds=0.25, partial=True, patience=3.0)
_DISTURBING: Final = Rules(lead_seconds=0.5, fewest_steps=2, needs_match=True)
_TOGETHER: Final = Rules(lead_seconds=2.0, fewest_steps=2)
"""What runs collectives: on all ranks, or on none, so it gets more time than the news will ever take."""
_AHEAD_SECONDS: Final = 1.0
_MOST_WISHES: Final = 256
_MOST_PASSED: Final = 64
"""That are over, and cannot be put back."""
_OF_COMMUNICATION: Final = ("collectives.", "p2p.")
"""Names that ranks know but do not list: groups come to be known as they are used."""


class Director:
    """From any thread. What is refused is a ValueError in one line."""

    def __init__(
        self,
        ranks: Callable[[], Ranks],
        request: Request,
        tell: Callable[[Notice], None],
        clock: Callable[[], float] = time.monotonic,
        token: Callable[[], str] = lambda: secrets.token_hex(2),
    ) -> None:
        """``ranks`` gives a snapshot of what is known; ``tell`` passes notices on."""
        self._ranks = ranks
        self._request = request
        self._tell = tell
        self._clock = clock
        self._token = token
        self._changes = itertools.count(time.time_ns() // 1_000_000)
        self._changing = threading.Lock()
        self._asking = threading.Lock()
        self._offers = Offers(request)
        self._wishes: dict[str, Wish] = {}
        self.claims = Claims(clock)
        """Of wishes whose owners are there."""

    # ------------------------------------------------------------------ questions

    def taps(
        self, pattern: str = "**", *, ranks: Iterable[int] | None = None, layers: Iterable[int] | None = None
    ) -> list[Offered]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        with self._asking:
            problems = self._offers.fetch(self._live().beats)
            for problem in problems:
                self._tell(Notice("error", problem, unix_ns=time.time_ns()))
            return self._offers.choose(pattern, ranks=ranks, layers=layers)

    def wishes(self, kind: WishKind) -> dict[str, dict[str, Any]]:
        """All of a kind, as JSON."""
        found = [wish for wish in list(self._wishes.values()) if wish.kind == kind]
        return {wish.id: wish.as_dict() | {"orphaned": self.claims.orphaned(wish)} for wish in found}

    def preview(self, perturbation: Perturbation) -> dict[str, Any]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        problems = list(perturbation.problems())
        taps: list[str] = []
        concerned: set[int] = set()
        touched: dict[str, Any] = {}
        try:
            offered = self.taps(perturbation.pattern, ranks=perturbation.ranks, layers=perturbation.layers)
            by_rank: dict[int, list[Tap]] = {}
            for one in offered:
                for rank, tap in one.taps:
                    by_rank.setdefault(rank, []).append(tap)
            problems += [problem for problem in perturbation.problems(by_rank[min(by_rank)]) if problem not in problems]
            taps = [one.name for one in offered if perturbation.choose([one.first])]
            touched = {
                str(rank): [one.as_dict() for one in preview(perturbation, held)] for rank, held in by_rank.items()
            }
            concerned = set(by_rank)
        except ValueError as error:
            if not perturbation.pattern.startswith(_OF_COMMUNICATION):
                problems.append(str(error))
            else:
                concerned = set(perturbation.ranks if perturbation.ranks is not None else self._live().here)
        earliest = self._earliest()
        if SOON < perturbation.first <= self._live().step + _DISTURBING.fewest_steps:
            problems.append(f"step {perturbation.first} is over or too near: give {earliest} or later")
        return {
            "text": describe(perturbation),
            "taps": taps,
            "ranks": sorted(concerned),
            "touched": touched,
            "step": earliest,
            "problems": list(dict.fromkeys(problems)),
        }

    # -------------------------------------------------------------------- wishes

    def subscribe(self, subscription: Subscription) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        _refuse("subscription", subscription.problems())
        subscription = Subscription.from_dict(subscription.as_dict())  # with what its parameters leave out
        self._sweep()
        active = sum(wish.kind == "subscription" and not wish.ended for wish in self._wishes.values())
        if active >= MOST_SUBSCRIPTIONS:
            raise ValueError(f"there are {MOST_SUBSCRIPTIONS} subscriptions already; end one of them first")
        matching = self.taps(subscription.pattern, ranks=subscription.ranks, layers=subscription.layers)
        offered = fitting(matching, subscription.what)
        last = subscription.when.last
        if last is not None and last <= self._live().step:
            raise ValueError(f"step {last} is over: the job is at step {self._live().step}")
        named = replace(subscription, id=self._new("s"))
        concerned = {rank for one in offered for rank in one.ranks}
        rules = _SUBSCRIBING
        if subscription.what == "attention" and any(map(_gathers, offered)):
            if subscription.ranks is not None:
                raise ValueError("attention under context parallelism takes all ranks of a layer: leave ranks out")
            rules = replace(_TOGETHER, needs_match=True)
        return self._wish(named.id, "subscription", named.as_dict(), concerned, rules)

    def perturb(self, perturbation: Perturbation) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        _refuse("perturbation", perturbation.problems())
        concerned = self._concerned(perturbation)
        named = replace(perturbation, id=self._new("p"))
        rules = replace(_DISTURBING, not_after=None if named.first == SOON else named.first)
        return self._wish(named.id, "perturbation", named.as_dict(), concerned, rules)

    def probe(self, spec: Mapping[str, Any]) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        named = {**spec, "id": self._new("n")}
        return self._wish(named["id"], "probe", named, self._all(), _TOGETHER)

    def pair(self, body: Mapping[str, Any]) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        named = {**body, "id": self._new("d")}
        return self._wish(named["id"], "pair", named, self._all(), _TOGETHER)

    def unsubscribe(self, name: str) -> None:
        """Also a probe."""
        wish = self._known(name, "subscription", "probe")
        self._end(wish, "unsubscribe", replace(_TOGETHER, partial=True) if wish.together else _ENDING)
        self._wishes.pop(name, None)

    def expire(self, name: str) -> None:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        self._end(self._known(name, "perturbation"), "expire", _ENDING)

    def revert(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Asks for it: the change, whose notices of kind ``reverted`` say what became of it, and the ranks."""
        wish = self._known(name, "perturbation")
        if wish.reverted:
            raise ValueError(f"{name} is put back already, on all its ranks")
        change = self._change()
        agreed = self._agree(change, "revert", {"id": name}, self._present(wish), _ENDING)
        wish.ended = True
        return change, agreed.ranks

    # ------------------------------------------------------------- what ranks say

    def adopt(self, rank: int, state: Mapping[str, Any]) -> list[Wish]:
        """``rank`` has answered what it has to do: take over what an earlier collector has asked for."""
        found: list[Wish] = []
        kinds: tuple[tuple[WishKind, str], ...] = (
            ("subscription", "subscriptions"),
            ("perturbation", "perturbations"),
            ("probe", "probes"),
        )
        for kind, key in kinds:
            for body in _list(state.get(key)):
                name = cast("Mapping[str, Any]", body).get("id") if isinstance(body, Mapping) else None
                if isinstance(name, str) and name:
                    found += self._adopt(rank, name, kind, cast("Mapping[str, Any]", body))
        for name in filter(None, map(str, _list(state.get("revertible")))):
            for wish in self._adopt(rank, name, "perturbation", {}):
                wish.ended = wish.revertible = True
        return found

    def _adopt(self, rank: int, name: str, kind: WishKind, body: Mapping[str, Any]) -> list[Wish]:
        wish = self._wishes.get(name)
        if wish is not None:
            if wish.adopted and rank not in wish.ranks:
                wish.ranks = (*wish.ranks, rank)
            return []
        since = _list(body.get("since"))
        step = since[0] if since and type(since[0]) is int else -1
        known = {key: value for key, value in body.items() if key not in ("since", "state")}
        together = kind == "probe" or known.get("what") == "attention"
        self._wishes[name] = Wish(name, kind, known, (rank,), step, together=together, adopted=True)
        return [self._wishes[name]]

    def heard(self, beat: Beat) -> None:
        """What the rank says of the state of its subscriptions."""
        for name, state in beat.subscriptions.items():
            wish = self._wishes.get(name)
            if wish is None:
                continue
            if state == "active":
                wish.states.pop(beat.rank, None)
            else:
                wish.states[beat.rank] = state

    def noticed(self, notice: Notice) -> None:
        """What ranks say of the end of what they had to do."""
        pair = notice.details.get("pair") or notice.details.get("boundary")
        wish = self._wishes.get(notice.perturbation or (pair if isinstance(pair, str) else ""))
        if wish is None or notice.kind not in ("expired", "reverted", "error", "paired"):
            return
        wish.states[notice.rank] = notice.kind
        wish.ended = wish.ended or wish.states.keys() >= set(wish.ranks)
        self._forget()

    def restarted(self, rank: int) -> None:
        """A rank begins anew: it is told of the subscriptions that concern it. Waits for answers."""
        for wish in list(self._wishes.values()):
            if wish.kind != "subscription" or wish.ended or rank not in wish.ranks:
                continue
            try:
                self._agree(self._change(), "subscribe", wish.body, [rank], _SUBSCRIBING)
            except ValueError as error:
                self._tell(Notice("error", f"rank {rank} began anew, without {wish.id}: {error}", subscription=wish.id))

    # ---------------------------------------------------------------------- inside

    def _wish(self, name: str, kind: WishKind, body: Mapping[str, Any], ranks: Iterable[int], rules: Rules) -> str:
        change = self._change()
        agreed = self._agree(change, KINDS[kind], body, ranks, rules)
        matched = tuple(sorted({found for names in agreed.matched.values() for found in names}, key=order))
        concerned = tuple(rank for rank in agreed.ranks if agreed.matched.get(rank) or not rules.needs_match)
        together = rules.lead_seconds >= _TOGETHER.lead_seconds
        self.claims.take([name])
        self._wishes[name] = Wish(name, kind, body, concerned, agreed.step, matched, together)
        self._forget()
        gone = f", without {_listed(agreed.missing)}, not there any more" if agreed.missing else ""
        text = f"{kind} {name} from step {agreed.step} on, on {_listed(concerned)}{gone}"
        details = {"kind": kind, "body": dict(body), "ranks": list(concerned), "matched": list(matched)}
        self._tell(
            Notice(
                "agreed",
                text,
                change=change,
                subscription=name if kind in ("subscription", "probe") else "",
                perturbation=name if kind in ("perturbation", "pair") else "",
                step=agreed.step,
                unix_ns=time.time_ns(),
                details=details,
            )
        )
        return name

    def _end(self, wish: Wish, kind: ChangeKind, rules: Rules) -> None:
        present = self._present(wish)
        if present:
            self._agree(self._change(), kind, {"id": wish.id}, present, rules)
        wish.ended = True

    def _agree(
        self, change: str, kind: ChangeKind, body: Mapping[str, Any], ranks: Iterable[int], rules: Rules
    ) -> Agreed:
        with self._changing:
            return agree(Agreement(change, kind, body, ranks, rules), self._request, self._clock)

    def _concerned(self, perturbation: Perturbation) -> list[int]:
        try:
            offered = self.taps(perturbation.pattern, ranks=perturbation.ranks, layers=perturbation.layers)
            return sorted({rank for one in offered for rank in one.ranks})
        except ValueError:
            if not perturbation.pattern.startswith(_OF_COMMUNICATION):
                raise
            here = self._live().here
            return here if perturbation.ranks is None else [rank for rank in here if rank in perturbation.ranks]

    def _earliest(self) -> int:
        """A step at which something can begin on all ranks, most likely."""
        ranks = self._live()
        seconds = ranks.seconds_per_step
        ahead = int(_AHEAD_SECONDS / seconds) if seconds > 0 else 0
        return ranks.step + 1 + max(_DISTURBING.fewest_steps + 1, min(ahead, 100_000))

    def _live(self) -> Ranks:
        ranks = self._ranks()
        if ranks.state == "waiting":
            raise ValueError("no rank has been heard of yet")
        if ranks.state == "ended":
            raise ValueError("the job has ended: all its ranks have left")
        return ranks

    def _all(self) -> list[int]:
        ranks = self._live()
        if not ranks.complete:
            raise ValueError(f"this takes all ranks, and {_listed(ranks.missing)} cannot be reached")
        return ranks.here

    def _present(self, wish: Wish) -> list[int]:
        here = set(self._live().here)
        return [rank for rank in wish.ranks if rank in here]

    def _known(self, name: str, *kinds: WishKind) -> Wish:
        wish = self._wishes.get(name)
        if wish is None or wish.kind not in kinds:
            there = sorted(wish.id for wish in self._wishes.values() if wish.kind in kinds)
            more = f"; there are {', '.join(there)}" if there else "; there is none"
            raise ValueError(f"{ascii(name)[:80]}: no {' or '.join(kinds)} of that name{more}")
        return wish

    def _sweep(self) -> None:
        """End subscriptions whose last step is over."""
        step = min((beat.step for beat in self._live().beats.values()), default=-1)
        for wish in list(self._wishes.values()):
            with contextlib.suppress(ValueError):
                last = Subscription.from_dict(wish.body).when.last if wish.kind == "subscription" else None
                if last is not None and step > last + 1:
                    self.unsubscribe(wish.id)

    def _forget(self) -> None:
        """Of those that are over only the latest are kept, and fewer of those that cannot be put back."""
        over = [name for name, wish in list(self._wishes.items()) if wish.ended]
        passed = [name for name in over if not self._wishes[name].stored]
        gone = over[: max(len(self._wishes) - _MOST_WISHES, 0)] + passed[: max(len(passed) - _MOST_PASSED, 0)]
        for name in gone:
            self._wishes.pop(name, None)

    def _new(self, letter: str) -> str:
        while (name := f"{letter}-{self._token()}") in self._wishes:
            pass
        return name

    def _change(self) -> str:
        return f"c{next(self._changes):013x}"


def _gathers(offered: Offered) -> bool:
    """Do ranks gather keys from each other there?"""
    return any(axis == "cp" and count > 1 for axis, _, count in offered.first.shard)


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _refuse(what: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{what}: {problems[0]}")


def _listed(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
