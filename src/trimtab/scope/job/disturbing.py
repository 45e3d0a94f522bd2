"""The perturbations that are in force on this rank, from their agreed step until they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from trimtab.scope.job.agreement import Change
from trimtab.scope.job.handle import Disturbance
from trimtab.scope.taps.points import Receive

_MOST_ENDED: Final = 64
"""That are kept, for somebody may yet want back what they have changed."""


class Disturbing:
    """On the training thread, but for what says otherwise."""

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self._active: dict[str, Disturbance] = {}
        self._ended: dict[str, Disturbance] = {}
        self._failed: dict[str, str] = {}

    @property
    def any(self) -> bool:
        """Is one in force?"""
        return bool(self._active)

    @property
    def active(self) -> Mapping[str, Disturbance]:
        """By id. From any thread."""
        return self._active

    @property
    def ended(self) -> Mapping[str, Disturbance]:
        """That may be reverted yet, by id. From any thread."""
        return self._ended

    def apply(self, change: Change, step: int) -> tuple[str, dict[str, Any]]:
        """An agreed change; what to say of it. ValueError where it cannot be done."""
        if change.kind == "perturb":
            made: Disturbance = change.made
            name = made.perturbation.id or change.id
            self._active = self._active | {name: made}
            return "", {"perturbation": name, "matched": list(made.matched)}
        name = str(change.body.get("id", ""))
        if change.kind == "expire":
            if name in self._active:
                self._end(name, "expired", step)
            return "expired", {"perturbation": name}
        assert change.kind == "revert", change.kind
        found = self._active.get(name) or self._ended.get(name)
        if found is None:
            return "not known here", {"perturbation": name}
        details = found.revert()
        if name in self._active:
            self._end(name, "reverted", step, tell=False)
        self._ended = {key: other for key, other in self._ended.items() if key != name}
        text = str(details.pop("text", ""))
        self._notify("reverted", text, perturbation=name, step=step, **details)
        return "reverted", {"perturbation": name}

    def end_what_is_over(self, step: int) -> None:
        """At the begin of a step: end those that have had their last one, and begin the step of the others."""
        for name, text in list(self._failed.items()):
            del self._failed[name]
            if name in self._active:
                self._notify("error", text, perturbation=name, step=step)
                self._end(name, "expired", step, tell=False)
        for name, disturbance in list(self._active.items()):
            try:
                disturbance.step_begin(step)
                over = disturbance.over(step)
            except Exception as error:
                self._notify("error", f"{type(error).__name__}: {error}", perturbation=name, step=step)
                over = True
            if over:
                self._end(name, "expired", step)

    def optimizer_begin(self, step: int) -> None:
        """The gradients of a step are whole."""
        for name, disturbance in list(self._active.items()):
            begin = getattr(disturbance, "optimizer_begin", None)
            if begin is not None:
                try:
                    begin(step)
                except Exception as error:
                    self.fail(name, error)

    def receivers(self) -> dict[str, list[tuple[str, Receive]]]:
        """Of all in force, by the name of the point, in the order in which they came."""
        found: dict[str, list[tuple[str, Receive]]] = {}
        for name, disturbance in self._active.items():
            try:
                receivers = disturbance.receivers()
            except Exception as error:
                self.fail(name, error)
                continue
            for point, receive in receivers.items():
                found.setdefault(point, []).append((name, receive))
        return found

    def fail(self, name: str, error: Exception) -> None:
        """One raised something while a tensor passed by: it ends at the next step. From any thread."""
        self._failed.setdefault(name, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End all."""
        for name in list(self._active):
            self._end(name, "detached", -1, tell=False)
        self._ended = {}

    def _end(self, name: str, why: str, step: int, *, tell: bool = True) -> None:
        disturbance = self._active[name]
        self._active = {key: other for key, other in self._active.items() if key != name}
        self._ended = self._ended | {name: disturbance}
        while len(self._ended) > _MOST_ENDED:
            self._ended = dict(list(self._ended.items())[1:])
        try:
            disturbance.end(why)
        except Exception as error:
            self._notify("error", f"{type(error).__name__}: {error}", perturbation=name, step=step)
        if tell:
            self._notify(why, "", perturbation=name, step=step)
