"""The collector of another process, asked over the channel."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final, cast

from trimtab.control.endpoint import NoReply
from trimtab.control.messages import from_json
from trimtab.scope.collector.asking import is_gone
from trimtab.scope.collector.interface import Offered
from trimtab.scope.perturbation import Perturbation
from trimtab.scope.subscription import Subscription

_LOOK_SECONDS: Final = 0.03
_LONGEST_SECONDS: Final = 120.0


class GoneError(ValueError):
    """There is no collector any more: this process may become it."""


class Remote:
    """Those methods of :class:`~trimtab.scope.collector.interface.Scope` that the collector itself has to do."""

    def __init__(
        self,
        request: Callable[[Mapping[str, Any]], Future[bytes]],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """``request`` asks the collector."""
        self._request = request
        self._clock = clock
        self._pause = pause

    def taps(self, pattern: str = "**") -> list[Offered]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return [Offered.from_dict(one) for one in self._do(op="taps", pattern=pattern)]

    def status(self) -> dict[str, Any]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._do(op="status")

    def subscribe(self, subscription: Subscription) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._do(op="subscribe", subscription=subscription.as_dict())

    def unsubscribe(self, subscription: str) -> None:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        self._do(op="unsubscribe", id=subscription)

    def preview(self, perturbation: Perturbation) -> dict[str, Any]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._do(op="preview", perturbation=perturbation.as_dict())

    def perturb(self, perturbation: Perturbation) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._do(op="perturb", perturbation=perturbation.as_dict())

    def expire(self, perturbation: str) -> None:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        self._do(op="expire", id=perturbation)

    def revert(self, perturbation: str) -> dict[str, Any]:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._do(op="revert", id=perturbation)

    def probe(self, spec: Mapping[str, Any]) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._do(op="probe", spec=dict(spec))

    def pair(self, body: Mapping[str, Any]) -> str:
        """See :class:`~trimtab.scope.collector.interface.Scope`."""
        return self._do(op="pair", body=dict(body))

    def _do(self, **body: Any) -> Any:
        until = self._clock() + _LONGEST_SECONDS
        ticket = self._ask(body)["ticket"]
        parts: list[str] = []
        begin = 0
        while True:
            said = self._ask({"op": "result", "ticket": ticket, "from": begin})
            if said["state"] == "refused":
                raise ValueError(said["reason"])
            if said["state"] == "done":
                parts.append(said["text"])
                if said["next"] is None:
                    return from_json("".join(parts).encode("ascii"))
                begin = said["next"]
                continue
            if self._clock() > until:
                raise ValueError(f"the collector has not done it within {_LONGEST_SECONDS:g} s ({body['op']})")
            self._pause(_LOOK_SECONDS)

    def _ask(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            said = from_json(self._request(body).result(_LONGEST_SECONDS))
        except NoReply as error:
            if is_gone(error):
                raise GoneError(f"the collector has gone ({error})") from None
            raise ValueError(str(error)) from None
        if not isinstance(said, Mapping):
            raise ValueError("the collector's answer makes no sense")
        return cast("Mapping[str, Any]", said)
