"""The probes of a rank: run at the begin of a step, on all ranks alike, and never at the cost of the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from trimtab.scope.moment import Moment
from trimtab.scope.names import Shard
from trimtab.scope.probe.candidates import candidates
from trimtab.scope.probe.meeting import PATIENCE, all_come, forget, store_of_job
from trimtab.scope.probe.running import Runner, runner_for
from trimtab.scope.probe.spec import ProbeSpec
from trimtab.scope.probe.tokens import Batch, batches, tokens_of
from trimtab.scope.probe.watching import Watch

if TYPE_CHECKING:
    from trimtab.scope.job.handle import JobHandle

NEXT_TOKEN: Final = "nexttoken"
"""What frames of a probe are."""
TAP: Final = "logits"


@dataclass(frozen=True, slots=True)
class _Active:
    spec: ProbeSpec
    tokens: list[tuple[int, ...]]


class Probing:
    """See :class:`trimtab.scope.job.handle.Probing`, which it is."""

    def __init__(self, job: JobHandle, patience: float = PATIENCE) -> None:
        """``patience``: seconds that a rank waits for the others before a probe is given up."""
        self._job = job
        self._patience = patience
        self._met: dict[str, int] = {}
        self._active: dict[str, _Active] = {}

    def check(self, body: dict[str, Any]) -> None:
        """ValueError where this probe cannot run in this job. From any thread."""
        self._prepared(body)

    def add(self, body: dict[str, Any], change: str) -> None:
        """From this step on. On all ranks at the same step, on the training thread."""
        active = self._prepared(body if body.get("id") else {**body, "id": change})
        self._active[active.spec.id] = active

    def remove(self, name: str) -> None:
        """No more of it; a name that is not known is none."""
        self._active.pop(name, None)

    def active(self) -> list[dict[str, Any]]:
        """Those in force, as JSON."""
        return [active.spec.as_dict() for active in self._active.values()]

    def step_begin(self, step: int) -> None:
        """Run what is due. Raises nothing: a probe that fails is taken out, on all ranks."""
        for name, active in list(self._active.items()):
            if active.spec.over(step):
                del self._active[name]
                self._job.notice("expired", f"probe: after step {active.spec.last}", subscription=name, step=step)
            elif active.spec.due(step):
                self._run(name, active, step)

    def _run(self, name: str, active: _Active, step: int) -> None:
        failure: Exception | None = None
        everywhere = True
        try:
            runner = runner_for(self._job.chunks)  # before the others are met: it may fail here alone
            self._meet(name, step)
            failure = self._ask(active, runner, step)
            everywhere = _all_well(failure is None, self._job)
        except Exception as error:
            failure = failure or error
        if failure is None and everywhere:
            return
        self._active.pop(name, None)
        reason = "it failed on another rank"
        if failure is not None:
            reason = str(failure) if isinstance(failure, ValueError) else f"{type(failure).__name__}: {failure}"
        self._job.notice("error", f"probe: {reason}; it does not run any more", subscription=name, step=step)

    def _meet(self, name: str, step: int) -> None:
        """ValueError, on all ranks that come, where not all do."""
        store = store_of_job()
        if store is None:
            return
        if not all_come(store, f"trimtab/probe/{name}/{step}", dist.get_world_size(), self._patience):
            raise ValueError("not all ranks of the job have it")
        if dist.get_rank() == 0 and name in self._met:  # everybody has left the one before
            forget(store, f"trimtab/probe/{name}/{self._met[name]}")
        self._met[name] = step

    def _ask(self, active: _Active, runner: Runner, step: int) -> Exception | None:
        """Run all prompts. What goes wrong in a way that all ranks get through is returned, not raised."""
        failure: Exception | None = None
        with self._job.mute(), runner.aside(), self._aside():
            for number, batch in enumerate(batches(active.spec, active.tokens, runner)):
                moment = Moment(step, number)
                try:
                    self._ask_one(active.spec, batch, runner, moment)
                except Exception as error:  # the other ranks go on to the next batch, and need this one there
                    failure = failure or error
        return failure

    def _ask_one(self, spec: ProbeSpec, batch: Batch, runner: Runner, moment: Moment) -> None:
        with Watch(spec, self._job, moment, runner.speaks):
            answer = runner.forward(batch.tokens)
        if answer is None:
            return
        found = candidates(answer, batch.rows, spec.top, batch.targets, runner.group)
        if not runner.speaks:
            return
        prompts, positions = batch.rows
        found["prompt"] = (prompts + batch.first).to(torch.int32)
        found["position"] = positions.to(torch.int32)
        self._emit(spec, found, answer.shard, moment)

    def _emit(self, spec: ProbeSpec, found: dict[str, torch.Tensor], shard: Shard, moment: Moment) -> None:
        meta = {"labels": ["row", "k"], "probe": spec.id, "positions": spec.positions, "prompts": len(spec.prompts)}
        self._job.emit(TAP, NEXT_TOKEN, spec.id, found, meta, shard, replica=0, moment=moment)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Points deliver though no step runs; see ``Position`` of the engines."""
        position: Any = self._job.position
        if position is None or not hasattr(position, "aside"):
            yield
            return
        before = position.inside, position.microbatch
        position.aside, position.inside, position.microbatch = True, False, 0
        try:
            yield
        finally:
            position.aside = False
            position.inside, position.microbatch = before

    def _prepared(self, body: dict[str, Any]) -> _Active:
        spec = ProbeSpec.from_dict(body)
        return _Active(spec, tokens_of(spec, runner_for(self._job.chunks)))


def _all_well(here: bool, job: JobHandle) -> bool:
    """Is all well on all ranks? They have to agree, as the next run of the probe needs them all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return here
    device = next((weight.device for chunk in job.chunks for weight in chunk.parameters()), torch.device("cpu"))
    well = torch.tensor([int(here)], dtype=torch.int32, device=device)
    dist.all_reduce(well, dist.ReduceOp.MIN)
    return bool(well.item())
