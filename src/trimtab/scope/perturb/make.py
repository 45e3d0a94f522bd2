"""A perturbation made for this rank: what it matches, its receivers, its storage, its end.

Everything that is done is in the audit log first. Where the log cannot be written, or a tensor turns out to have no
such part, the perturbation is refused from then on and says so once; the job goes on undisturbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from trimtab.record.complain import tell
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.perturb.apply import Applied, Applier
from trimtab.scope.perturb.audit import Audit
from trimtab.scope.perturb.channel import Channel
from trimtab.scope.perturb.communication import communications_of, names_communication
from trimtab.scope.perturb.storage import Storage, as_details, targets_of
from trimtab.scope.perturb.wording import describe
from trimtab.scope.perturbation import SOON, Perturbation
from trimtab.scope.taps.points import AttentionPoint, Point, Receive, StatePoint

_ELSEWHERE: Final = "none of its elements are on this rank"


class Job(Protocol):
    """What is needed of :class:`trimtab.scope.job.handle.JobHandle`."""

    rank: int
    run_directory: Path

    @property
    def points(self) -> Mapping[str, Point | AttentionPoint]:
        """That tensors pass by."""
        ...

    @property
    def state(self) -> Mapping[str, StatePoint]:
        """Tensors that stay."""
        ...

    def notice(self, kind: str, text: str = "", **details: Any) -> None:
        """Tell the collector."""
        ...


def make(perturbation: Perturbation, job: Job) -> MadeDisturbance:
    """For this rank. ValueError, in one line, where it cannot be done here."""
    made = MadeDisturbance(perturbation, job, Audit(job.run_directory, job.rank))
    made.check()
    return made


class MadeDisturbance:
    """See :class:`trimtab.scope.job.handle.Disturbance`."""

    def __init__(self, perturbation: Perturbation, job: Job, audit: Audit) -> None:
        self.perturbation = perturbation
        self.matched: list[str] = []
        self._job = job
        self._audit = audit
        self._here = perturbation.ranks is None or job.rank in perturbation.ranks
        self._appliers: dict[str, Applier] = {}
        self._storage: Storage | None = None
        self._gradients: Storage | None = None
        self._channel: Channel | None = None
        self._told = -1
        self._step = -1
        self._looked: tuple[int, int, int] | None = None
        self.refused = ""
        """Why nothing is disturbed any more."""

    def check(self) -> None:
        """Find what it matches; ValueError where that, or what would be done to it, makes no sense."""
        if not self._here:
            return
        taps = self._taps()
        matching = self.perturbation.choose(taps)  # none: another pipeline stage may have it
        for problem in self.perturbation.problems(taps if matching else None):
            raise ValueError(problem)
        self.matched = [tap.name for tap in matching]
        chunks = getattr(self._job, "chunks", ())
        gathers = any(getattr(getattr(one, "ddp_config", None), "overlap_param_gather", False) for one in chunks)
        where = self.perturbation.parameters.get("where", "copy")
        if gathers and where != "master" and any(tap.kind == "parameter" for tap in matching):
            raise ValueError(
                "with overlap_param_gather parameters are gathered while the step runs, and what is written into them "
                "before is lost: use where = master"
            )
        if names_communication(self.perturbation.pattern):
            self._channel = Channel(self.perturbation, self._log, self._refuse)
            communications = communications_of(self._job)
            if communications is None:
                raise ValueError(
                    f"{self.perturbation.pattern}: communication is not intercepted in Python here; set "
                    "scope.allow_perturb when the job starts"
                )
            self.matched += [tap.name for tap in self.perturbation.choose(communications.taps())]
            self.matched = self.matched or [self.perturbation.pattern]

    # ----------------------------------------------------------- in the steps

    def receivers(self) -> Mapping[str, Receive]:
        """For the points that it disturbs, in the steps in which it may (or has to remember what it will give)."""
        return {name: self._receiver(name) for name in self._appliers} if self._wanted else {}

    def step_begin(self, step: int) -> None:
        """On the training thread: settle the first step, disturb what is stored, put it back after the last."""
        self._step = step
        first = self.perturbation.first == SOON
        if first:
            self.perturbation = self.perturbation.settled(step)
        if first or not (self._appliers or self._storage or self._gradients):
            try:
                self._look()
            except ValueError as error:
                self._refuse(error)
        communications = communications_of(self._job) if self._channel is not None else None
        if self._channel is not None and communications is not None:
            if self._wanted:
                self._channel.settled(self.perturbation)
                communications.add(self._channel, step)
            else:
                communications.remove(self._channel)
        self._apply(self._storage, step)
        if self.over(step) and self.perturbation.parameters.get("revert"):
            self.revert()

    def optimizer_begin(self, step: int) -> None:
        """The accumulated gradients of the step are whole."""
        self._apply(self._gradients, step)

    def over(self, step: int) -> bool:
        """Its last step is."""
        return bool(self.refused) or (self.perturbation.first != SOON and step > self.perturbation.last)

    def revert(self) -> dict[str, Any]:
        """Put back what is stored, bit for bit. ValueError where nothing of it is."""
        parts = [part for part in (self._storage, self._gradients) if part is not None and part.kept]
        if not parts:
            return {"restored": 0, "text": self._nothing_kept()}
        kept, said = sum(part.kept for part in parts), self.perturbation
        text = f"puts back {kept} element{'s' * (kept != 1)} of {said.pattern}"
        step = getattr(self._job, "step", -1)
        self._audit.append("reverted", said.id, kind=said.kind, tap=said.pattern, step=step, elements=kept, text=text)
        self._audit.close()
        done: dict[str, int] = {}
        for part in parts:
            for name, count in part.revert().items():
                done[name] = done.get(name, 0) + count
        return as_details(done)

    def _nothing_kept(self) -> str:
        """Why there is nothing to put back on this rank."""
        if self._storage is None and self._gradients is None:
            return "there is nothing to put back here: only what is stored can be"
        if self._told >= 0:
            return "everything has been put back already"
        if self._step < self.perturbation.first:
            return "nothing has been disturbed yet"
        return _ELSEWHERE if self.perturbation.probability >= 1.0 else "nothing was disturbed on this rank"

    def end(self, why: str) -> None:
        """Nothing of it is in the job any more, but for what it has stored."""
        del why
        communications = communications_of(self._job)
        if self._channel is not None and communications is not None:
            communications.remove(self._channel)
        self._appliers = {}
        self._audit.close()

    # ----------------------------------------------------------------- inside

    @property
    def _wanted(self) -> bool:
        """Is there something to do, or to remember, in this step?"""
        said = self.perturbation
        return not self.refused and said.first - (said.kind == "stale") <= self._step <= said.last

    def _taps(self) -> list[Tap]:
        points, state = self._job.points, self._job.state
        return [point.tap for point in (*points.values(), *state.values())]

    def _look(self) -> None:
        """What there is may have grown since it was asked for: optimizers come with their first step."""
        points = self._job.points
        known = (self.perturbation.first, len(points), len(self._job.state))
        if not self._here or self.refused or known == self._looked:
            return
        self._looked = known
        matching = self.perturbation.choose(self._taps())
        for tap in matching:
            if tap.name in points and tap.kind in ("activation", "gradient") and tap.name not in self._appliers:
                self._appliers[tap.name] = Applier(self.perturbation, tap, self._log)
        stored = [tap for tap in matching if tap.name in self._job.state]
        gradients = [tap for tap in stored if tap.kind == "gradient"]
        others = [tap for tap in stored if tap.kind != "gradient"]
        if others:
            self._storage = Storage(
                self.perturbation, targets_of(self.perturbation, others, self._job.state), self._log
            )
        if gradients:
            targets = targets_of(self.perturbation, gradients, self._job.state)
            self._gradients = Storage(self.perturbation, targets, self._log)

    def _apply(self, storage: Storage | None, step: int) -> None:
        if storage is None or self.refused or not self.perturbation.acts(step):
            return
        try:
            storage.apply(self.perturbation, step)
        except (ValueError, OSError) as error:
            self._refuse(error)

    def _receiver(self, name: str) -> Receive:
        applier = self._appliers[name]

        def receive(x: torch.Tensor, moment: Moment) -> torch.Tensor | None:
            if self.refused or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                return None  # what a graph captures would be disturbed forever
            try:
                return applier.apply(x, moment)
            except (ValueError, OSError) as error:
                self._refuse(error)
                return None

        return receive

    def _log(self, applied: Applied) -> None:
        """Into the audit log, and only then to others; one notice a step."""
        text = describe(self._single(applied.tap)) + ("" if applied.elements else f"; {_ELSEWHERE}")
        self._audit.append("activated", self.perturbation.id, **applied.as_dict(), text=text)
        if applied.step != self._told:
            self._told = applied.step
            details = {"tap": applied.tap, "elements": applied.elements, "step": applied.step}
            self._job.notice(
                "activated", text, perturbation=self.perturbation.id, microbatch=applied.microbatch, **details
            )

    def _single(self, tap: str) -> Perturbation:
        return replace(self.perturbation, pattern=tap, layers=None)

    def _refuse(self, error: Exception) -> None:
        """Once; nothing is disturbed from now on."""
        if self.refused:
            return
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"the audit log cannot be written ({error})"
            tell(f"scope: perturbation {self.perturbation.id} is refused: {reason}")
        self.refused = reason
        self._job.notice("error", f"refused: {reason}; nothing is disturbed", perturbation=self.perturbation.id)
