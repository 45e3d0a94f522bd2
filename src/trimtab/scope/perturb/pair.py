"""A paired run inside a live job: between two of its steps every rank runs the next ones twice, clean and disturbed,
from one snapshot, and then puts everything back. The job goes on bit for bit as if nothing had been.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist

from trimtab.scope.device.measure import MeasureState, measure
from trimtab.scope.differences import Tally, tally
from trimtab.scope.moment import Moment
from trimtab.scope.names import Pattern, Tap
from trimtab.scope.paired import CLEAN, DISTURBED, PairSpec, part_row, words_of
from trimtab.scope.perturb.communication import communications_of
from trimtab.scope.perturb.lookahead import Lookahead
from trimtab.scope.perturb.make import MadeDisturbance, make
from trimtab.scope.perturb.passes import Runs, runs_of
from trimtab.scope.perturb.snapshot import Snapshot, flags_off, zero_gradients
from trimtab.scope.perturbation import SOON
from trimtab.scope.subscription import Subscription

_LOG = logging.getLogger("trimtab")
MOST_ROWS: Final = 8192
"""Tensors times steps that one rank may say something about."""
MOST_KEPT: Final = 2 << 30
"""Bytes of the clean pass that a rank keeps on its host."""
_NO_NAN: Final = {"check_for_nan_in_grad": False, "check_for_large_grads": False}
"""What would end the job in a disturbed pass."""

Stop = Callable[[], None]


def prepare(change: str, body: Mapping[str, Any], job: Any) -> Pair:
    """For this rank. ValueError, in one line, where it cannot be done here."""
    spec = PairSpec.from_dict(body)
    if any(getattr(getattr(chunk, "config", None), "fp8", None) for chunk in job.chunks):
        raise ValueError("pair: this job computes in fp8, whose recipe keeps a history that cannot be put back")
    pair = Pair(replace(spec, id=spec.id or change), job)
    pair.check()
    return pair


class Pair:
    """See :class:`trimtab.scope.job.handle.Boundary`."""

    def __init__(self, spec: PairSpec, job: Any) -> None:
        self.id = spec.id
        self._spec = spec
        self._job = job

    def check(self) -> None:
        """ValueError where a perturbation makes no sense here, or there is too much to compare."""
        for number in range(len(self._spec.perturbations)):
            self._made(number, 0)
        rows = len(self._taps()) * self._spec.steps
        if rows > MOST_ROWS:
            raise ValueError(f"pair: {rows} tensors times steps are to be compared on this rank, {MOST_ROWS} at most")

    def at_step(self, step: int) -> bool:
        """On the training thread of every rank, before the step. What goes wrong on one rank alone in the middle of a
        pass leaves the others waiting for it, as an error of the job does."""
        job = self._job
        lookahead = job.lookahead if job.lookahead is not None else Lookahead()
        runs, snapshot, problem = None, None, ""
        try:
            runs = runs_of(job, lookahead)
            snapshot = Snapshot(job.chunks, job.optimizers)
        except Exception as error:  # such as too little memory: told to all, so that none begins
            problem = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        if not _all_agree(not problem) or runs is None or snapshot is None:
            job.notice("error", problem or "another rank cannot do it", pair=self.id, step=step)
            return False
        job.lookahead = lookahead
        checks = flags_off([getattr(chunk, "ddp_config", None) for chunk in job.chunks], _NO_NAN)
        part: dict[str, Any] = {}
        try:
            part = self._both(step, runs, snapshot, lookahead)
        except Exception as error:  # the job's own, such as at the end of its data
            problem = f"{type(error).__name__}: {error}"
        finally:
            lookahead.passing = False
            lookahead.rewind()
            checks()
            zero_gradients(job.chunks, ())
            snapshot.restore()
            runs.over()
        if problem or part["refused"]:
            job.notice("error", problem or part["refused"], pair=self.id, step=step)
        else:
            job.notice("paired", "", step=step, pair=self.id, part=part)
        return False

    # ----------------------------------------------------------------- passes

    def _both(self, step: int, runs: Runs, snapshot: Snapshot, lookahead: Lookahead) -> dict[str, Any]:
        looks = Looks(self._job, self._spec, step)
        scalars: dict[str, list[tuple[float, float]]] = {}
        lookahead.passing = True
        made: list[MadeDisturbance] = []
        for name in (CLEAN, DISTURBED):
            lookahead.rewind()
            made = self._disturbances(step) if name == DISTURBED else []
            communications = communications_of(self._job)
            with self._job.mute(), communications.aside() if communications is not None else contextlib.nullcontext():
                scalars[name] = self._pass(step, runs, looks, made, name)
            if name == CLEAN:
                zero_gradients(self._job.chunks, ())
                snapshot.restore()
        part: dict[str, Any] = {
            "pair": self.id,
            "rank": self._job.rank,
            "first_step": step,
            "steps": self._spec.steps,
            "tolerance": self._spec.tolerance,
            "perturbations": words_of(self._spec),
            "rows": looks.rows(),
            "refused": "; ".join(one.refused for one in made if one.refused),
        }
        for number, name in enumerate(("loss", "gradient_norm")):
            both = [(clean[number], dirty[number]) for clean, dirty in zip(*scalars.values(), strict=True)]
            part[name] = [
                [step + k, *map(_plain, values)] for k, values in enumerate(both) if not math.isnan(values[0])
            ]
        return part

    def _pass(
        self, first: int, runs: Runs, looks: Looks, made: list[MadeDisturbance], name: str
    ) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        connected: list[Stop] = []
        try:
            for step in range(first, first + self._spec.steps):
                self._disconnect(connected)
                for one in made:
                    one.step_begin(step)
                    connected += [self._job.listen(point, receive) for point, receive in one.receivers().items()]
                connected += looks.listen(name)  # behind those that disturb

                def before_optimizer(step: int = step) -> None:
                    for one in made:
                        one.optimizer_begin(step)

                found.append(runs.step(step, before_optimizer))
        finally:
            self._disconnect(connected)
            for one in made:
                one.end("over")
        return found

    @staticmethod
    def _disconnect(connected: list[Stop]) -> None:
        for stop in connected:
            stop()
        connected.clear()

    def _disturbances(self, step: int) -> list[MadeDisturbance]:
        return [self._made(number, step) for number in range(len(self._spec.perturbations))]

    def _made(self, number: int, step: int) -> MadeDisturbance:
        said = self._spec.perturbations[number].settled(0)
        assert said.first != SOON
        moved = replace(said, first=said.first + step, last=said.last + step, id=f"{self.id}.{number}")
        return make(moved, self._job)

    def _taps(self) -> list[Tap]:
        pattern = Pattern(self._spec.pattern)
        taps = [point.tap for point in self._job.points.values()]
        return [tap for tap in taps if tap.kind in ("activation", "gradient") and pattern.matches(tap.name)]


class Looks:
    """Keeps what the clean pass had, compares the other with it, and sends the statistics of both."""

    def __init__(self, job: Any, spec: PairSpec, step: int) -> None:
        self._job = job
        self._spec = spec
        pattern = Pattern(spec.pattern)
        taps = [point.tap for point in job.points.values()]
        self._taps = [tap for tap in taps if tap.kind in ("activation", "gradient") and pattern.matches(tap.name)]
        self._kept: dict[tuple[str, int, int], torch.Tensor] = {}
        self._bytes = 0
        self._sums: dict[tuple[str, int], Tally] = {
            (tap.name, step + k): Tally() for tap in self._taps for k in range(spec.steps)
        }
        self._states = {(tap.name, name): _state(tap) for tap in self._taps for name in (CLEAN, DISTURBED)}
        self._measured = True

    def listen(self, name: str) -> list[Stop]:
        """To all taps, for one pass."""
        return [self._job.listen(tap.name, self._receiver(tap, name)) for tap in self._taps]

    def rows(self) -> list[list[Any]]:
        """What differed."""
        taps = {tap.name: tap for tap in self._taps}
        seen = {(name, step) for name, step, _ in self._kept}
        return [
            part_row(name, step, taps[name].shard, taps[name].replica, sums)
            for (name, step), sums in self._sums.items()
            if (name, step) in seen
        ]

    def _receiver(self, tap: Tap, name: str) -> Callable[[torch.Tensor, Moment], None]:
        def receive(x: torch.Tensor, moment: Moment) -> None:
            if moment.recompute:
                return
            self._send(tap, name, x, moment)
            values = _sampled(x.detach(), self._spec.elements)
            key = (tap.name, moment.step, moment.microbatch)
            if name == CLEAN:
                self._bytes += values.nbytes
                if self._bytes > MOST_KEPT:
                    raise ValueError(
                        f"pair: more than {MOST_KEPT >> 20} MB would have to be kept; compare fewer elements"
                    )
                self._kept[key] = values
                return
            before = self._kept.get(key)
            if before is not None and (tap.name, moment.step) in self._sums:
                sums = tally(before.double().numpy(), values.double().numpy(), moment.microbatch)
                self._sums[tap.name, moment.step].add(sums)

        return receive

    def _send(self, tap: Tap, name: str, x: torch.Tensor, moment: Moment) -> None:
        if not self._measured:
            return
        try:
            wanted = Subscription(tap.name, id=f"{self._spec.id}.{name}")
            with torch.no_grad():
                arrays = measure(x.detach(), wanted, self._states[tap.name, name])
            self._job.emit(tap.name, "statistics", wanted.id, arrays, {}, tap.shard, replica=tap.replica, moment=moment)
        except Exception as error:
            self._measured = False
            _LOG.info("trimtab: the statistics of a pair are not sent (%s)", error)


def _state(tap: Tap) -> MeasureState:
    state = MeasureState()
    state.tap, state.labels = tap, tap.labels
    return state


def _sampled(x: torch.Tensor, most: int) -> torch.Tensor:
    """Evenly spread elements, on the host."""
    flat = x.reshape(-1)
    if flat.numel() > most:
        at = torch.arange(most, device=x.device) * flat.numel() // most
        flat = flat[at]
    return flat.to("cpu", torch.float32 if flat.element_size() < 4 else flat.dtype, copy=True)


def _all_agree(willing: bool) -> bool:
    """Has every rank of the job got that far?"""
    if not (dist.is_available() and dist.is_initialized()):
        return willing
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    votes = torch.tensor([int(willing)], device=device)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.item())


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
