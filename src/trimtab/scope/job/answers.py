"""What the collector may ask of a rank, answered on the channel's thread. Whoever else asks is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Final

from trimtab.control.endpoint import Endpoint
from trimtab.control.messages import Message, from_json, to_json
from trimtab.scope.fields import Fields
from trimtab.scope.job.agreement import Agreement, Change
from trimtab.scope.job.handle import JobHandle, Probing
from trimtab.scope.job.limits import check_limits
from trimtab.scope.job.measures import Measures
from trimtab.scope.job.switchboard import Switchboard
from trimtab.scope.messages import CANCEL, CHANGE_KINDS, COLLECTOR, COMMIT, PREPARE, STATE, TAPS
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap, closest, is_stored
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.subscription import Subscription

_TAPS: Final = 500
"""In one answer; some 250 bytes each."""
_MOST_MATCHED: Final = 1000
"""Names in an answer."""


class Answers:
    """To requests of the collector."""

    def __init__(
        self,
        agreement: Agreement,
        board: Switchboard,
        job: JobHandle,
        measures: Measures,
        *,
        heard: Callable[[], None],
        warm: Callable[[Subscription, Sequence[Tap]], None],
    ) -> None:
        """``heard`` is called when the collector has said something, ``warm`` with what will have to be measured."""
        self._agreement = agreement
        self._board = board
        self._job = job
        self._measures = measures
        self._heard = heard
        self._warm = warm
        self.ended = ""
        """Why nothing is done any more on this rank."""
        self._makers: dict[str, Callable[[str, dict[str, Any]], tuple[Any, list[str]]]] = {
            "subscribe": self._subscription,
            "perturb": self._perturbation,
            "probe": self._probe,
            "pair": self._pair,
        }

    def register(self, endpoint: Endpoint) -> None:
        """Answer what comes to ``endpoint``."""
        asked = {
            TAPS: self.taps,
            STATE: self.state,
            PREPARE: self.prepare,
            COMMIT: self.commit,
            CANCEL: self.cancel,
        }
        for subject, answer in asked.items():
            endpoint.answer(subject, self._only_the_collector(answer))

    def taps(self, said: Fields) -> dict[str, Any]:
        """``{"from": n}`` -> ``{"taps", "next", "step"}``: so many from the nth on, and where it goes on (or null)."""
        begin = said.integer("from", 0)
        said.done()
        every = self._board.registry.taps()
        end = begin + _TAPS
        return {
            "taps": [tap.to_json() for tap in every[begin:end]],
            "next": end if end < len(every) else None,
            "step": self._board.step,
        }

    def state(self, said: Fields) -> dict[str, Any]:
        """What is in force."""
        said.done()
        board = self._board
        return {
            "step": board.step,
            "subscriptions": [
                active.subscription.as_dict() | {"state": active.state, "since": list(active.since[:2])}
                for active in board.subscriptions.values()
            ],
            "perturbations": [found.perturbation.as_dict() for found in board.disturbing.active.values()],
            "revertible": [name for name, one in board.disturbing.ended.items() if any(map(is_stored, one.matched))],
            "probes": board.probes,
            "pairs": list(board.boundaries),
            "open": [change.id for change in self._agreement.prepared],
            "overhead": self._board.overhead,
            "budget": self._job.config.budget,
            "allow_perturb": self._job.config.allow_perturb,
        }

    def prepare(self, said: Fields) -> dict[str, Any]:
        """``{"change", "kind", "body"}`` -> ``{"step", "seconds_per_step", "matched", "closest"}``."""
        name, kind = said.text("change", longest=64), said.one_of("kind", CHANGE_KINDS)
        body = dict(said.object("body"))
        said.done()
        if not name:
            raise ValueError("change: it has no name")
        make = self._makers.get(kind, self._by_id)
        if kind == "revert":
            self._may_disturb()
        made, matched = make(name, body)
        self._agreement.prepare(Change(name, kind, body, made))
        answer = self._where() | {"matched": matched[:_MOST_MATCHED], "count": len(matched)}
        if not matched and "pattern" in body:
            answer["closest"] = closest(str(body["pattern"]), self._board.registry.names())
        return answer

    def commit(self, said: Fields) -> dict[str, Any]:
        """``{"change", "step", "microbatch"}`` -> ``{"step"}`` (that has begun last); refused if it is late."""
        name = said.text("change", longest=64)
        at = Moment(said.integer("step"), said.integer("microbatch", 0))
        said.done()
        self._agreement.commit(name, at)
        return self._where()

    def cancel(self, said: Fields) -> dict[str, Any]:
        """``{"change"}`` -> ``{"applied"}``: whether it was in force, and has to be taken back at the next step."""
        name = said.text("change", longest=64)
        said.done()
        return self._where() | {"applied": self._agreement.cancel(name) is not None}

    def _only_the_collector(self, answer: Callable[[Fields], dict[str, Any]]) -> Callable[[Message], bytes]:
        def answered(message: Message) -> bytes:
            if message.sender != COLLECTOR:
                raise ValueError(f"{message.subject}: only the collector may ask this; join as its client")
            self._heard()
            if self.ended:
                raise ValueError(f"rank {self._job.rank}: scope has stepped aside: {self.ended}")
            body = from_json(message.body) if message.body else {}
            return to_json(answer(Fields(body, message.subject)))

        return answered

    def _where(self) -> dict[str, Any]:
        return {"step": self._board.step, "seconds_per_step": self._board.seconds_per_step}

    # ----------------------------------------------------------------- kinds

    def _subscription(self, change: str, body: dict[str, Any]) -> tuple[Subscription, list[str]]:
        subscription = Subscription.from_dict({"id": change} | body)
        self._has_model()
        points = self._board.registry.select(subscription, self._job.rank)
        for point in points:
            self._measures.check(subscription, point.tap)
        known = {found.id: found for found in self._open_subscriptions()} | {
            name: active.subscription for name, active in self._board.subscriptions.items()
        }
        known.pop(subscription.id, None)
        taps = [point.tap for point in points]
        check_limits(subscription, taps, len(known), self._job.config)
        self._warm(subscription, taps)
        return subscription, [point.tap.name for point in points]

    def _open_subscriptions(self) -> list[Subscription]:
        return [change.made for change in self._agreement.prepared if isinstance(change.made, Subscription)]

    def _perturbation(self, change: str, body: dict[str, Any]) -> tuple[Any, list[str]]:
        self._may_disturb()
        self._has_model()
        perturbation = Perturbation.from_dict({"id": change} | body)
        make = importlib.import_module("trimtab.scope.perturb.make").make
        disturbance = make(perturbation, self._job)
        return disturbance, list(disturbance.matched)

    def _probe(self, change: str, body: dict[str, Any]) -> tuple[Probing, list[str]]:
        self._has_model()
        probing = self._board.probing
        if probing is None:
            found: Probing = importlib.import_module("trimtab.scope.probe.probing").Probing(self._job)
            probing = self._board.probing = found
        body.setdefault("id", change)
        probing.check(body)
        return probing, []

    def _pair(self, change: str, body: dict[str, Any]) -> tuple[Any, list[str]]:
        self._may_disturb()
        self._has_model()
        prepare = importlib.import_module("trimtab.scope.perturb.pair").prepare
        return prepare(change, body, self._job), []

    def _by_id(self, change: str, body: dict[str, Any]) -> tuple[None, list[str]]:
        del change
        said = Fields(body, "body")
        said.text("id", longest=64)
        said.done()
        return None, []

    def _may_disturb(self) -> None:
        if not self._job.config.allow_perturb:
            raise ValueError("this rank may not be disturbed; start the job with scope.allow_perturb = true")

    def _has_model(self) -> None:
        if not self._board.registry.names():
            raise ValueError(f"rank {self._job.rank} has not shown its model yet; try again after its first step")
