"""Paired runs: the same steps clean and disturbed from one state, and where, how much and how long they differ.

A rank compares what it holds (:class:`Part`), :func:`merge` puts the parts of all ranks together, :func:`compare`
makes the same of two recordings. Values only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import numpy as np

from trimtab.scope.differences import Difference, Scalar, Tally, difference, means, plain, tally
from trimtab.scope.fields import Fields
from trimtab.scope.frame import Frame
from trimtab.scope.names import GRADIENT, Pattern, order
from trimtab.scope.perturb.wording import describe
from trimtab.scope.perturbation import MOST_PERTURBATIONS, Perturbation
from trimtab.scope.vector import derive
from trimtab.scope.vector import merge as merge_vectors

MOST_STEPS: Final = 100
MOST_ELEMENTS: Final = 1 << 22
CLEAN: Final = "clean"
DISTURBED: Final = "disturbed"
PATTERN: Final = "layers.*.output"


@dataclass(frozen=True, slots=True)
class PairSpec:
    """What is asked for. The steps of the perturbations count from 0, the first step of the pair."""

    perturbations: tuple[Perturbation, ...]
    steps: int = 5
    """Of each pass."""
    pattern: str = PATTERN
    """Taps that are compared."""
    tolerance: float = 1e-3
    """Relative difference below which two tensors count as alike."""
    elements: int = 65_536
    """Of each tensor that are compared, evenly spread; all of a smaller one."""
    id: str = ""

    def problems(self) -> list[str]:
        """What is wrong with it, a line each."""
        found: list[str] = []
        if not 1 <= self.steps <= MOST_STEPS:
            found.append(f"steps: 1 to {MOST_STEPS}, not {self.steps}")
        if not 0 < len(self.perturbations) <= MOST_PERTURBATIONS:
            found.append(f"perturbations: 1 to {MOST_PERTURBATIONS}, not {len(self.perturbations)}")
        if not 1 <= self.elements <= MOST_ELEMENTS:
            found.append(f"elements: 1 to {MOST_ELEMENTS}, not {self.elements}")
        if not 0.0 <= self.tolerance < math.inf:
            found.append(f"tolerance: a number from 0 on, not {self.tolerance:g}")
        try:
            Pattern(self.pattern)
        except ValueError as error:
            found.append(str(error))
        for perturbation in self.perturbations:
            found.extend(perturbation.problems())
            if max(perturbation.first, 0) >= self.steps:
                found.append(f"step {perturbation.first} is not one of the pair's, 0 to {self.steps - 1}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "perturbations": [perturbation.as_dict() for perturbation in self.perturbations],
            "steps": self.steps,
            "pattern": self.pattern,
            "tolerance": self.tolerance,
            "elements": self.elements,
            "id": self.id,
        }

    @classmethod
    def from_dict(cls, value: object) -> PairSpec:
        """What :meth:`as_dict` gave, or a part of it with perturbations; ValueError, in one line, for anything else."""
        said = Fields(value, "pair")
        given = said.anything("perturbations")
        if not isinstance(given, (list, tuple)):
            raise ValueError("pair: perturbations is to be a list")
        listed = cast("Sequence[object]", given)[: MOST_PERTURBATIONS + 1]
        spec = cls(
            tuple(Perturbation.from_dict(one) for one in listed),
            said.integer("steps", 5),
            said.text("pattern", PATTERN),
            said.number("tolerance", 1e-3),
            said.integer("elements", 65_536),
            said.text("id", "", longest=64),
        )
        said.done()
        for problem in spec.problems():
            raise ValueError(f"pair: {problem}")
        return spec


@dataclass(frozen=True, slots=True)
class PairedResult:
    """How two passes differ. Steps are the job's own numbers."""

    pair: str
    first_step: int
    steps: int
    tolerance: float
    rows: tuple[Difference, ...]
    """In the order of steps, and in each of the model."""
    loss: tuple[Scalar, ...] = ()
    gradient_norm: tuple[Scalar, ...] = ()
    measure: str = "elements"
    """``elements``: tensors were compared; ``statistics``: rms and largest value of what was recorded of them."""
    perturbations: tuple[str, ...] = ()
    missing: tuple[int, ...] = field(default=())
    """Ranks that did not say what they hold."""

    @property
    def parts_at(self) -> Difference | None:
        """Where they part: the first tensor, in the first step and microbatch, that differs at all; a gradient only
        where no activation does, and then the last in the model, where a backward pass begins."""
        apart = [row for row in self.rows if row.microbatch >= 0]
        if not apart:
            return None
        step = min(row.step for row in apart)
        there = [row for row in apart if row.step == step]
        forward = [row for row in there if not row.tap.endswith(GRADIENT)]
        microbatch = min(row.microbatch for row in forward or there)
        first = [row for row in forward or there if row.microbatch == microbatch]
        return min(first, key=_place) if forward else max(first, key=_place)

    @property
    def alike_after(self) -> int | None:
        """Steps from where they part until all tensors are within the tolerance and stay so; None: never, in the steps
        that were run. 0: they are so throughout."""
        last = max((row.step for row in self.rows if not row.l2 <= self.tolerance), default=None)
        if last is None:
            return 0
        if last >= self.first_step + self.steps - 1:
            return None
        parted = self.parts_at
        return last + 1 - (parted.step if parted is not None else self.first_step)

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        parted = self.parts_at
        return {
            "pair": self.pair,
            "first_step": self.first_step,
            "steps": self.steps,
            "tolerance": self.tolerance,
            "measure": self.measure,
            "perturbations": list(self.perturbations),
            "parts_at": None if parted is None else parted.as_dict(),
            "alike_after": self.alike_after,
            "rows": [row.as_dict() for row in self.rows],
            "loss": [one.as_dict() for one in self.loss],
            "gradient_norm": [one.as_dict() for one in self.gradient_norm],
            "missing": list(self.missing),
        }

    def text(self) -> str:
        """A table for people."""
        lines = [*self.perturbations, *self._summary(), ""]
        width = max([32, *(len(row.tap) for row in self.rows)])
        lines.append(f"{'step':>6}  {'tensor':{width}} {'relative L2':>12} {'largest':>12} {'of largest':>12}")
        for row in self.rows:
            numbers = (row.l2, row.maximum, row.relative_maximum)
            lines.append(f"{row.step:6}  {row.tap:{width}} " + " ".join(f"{number:12.3e}" for number in numbers))
        for name, scalars in (("loss", self.loss), ("gradient norm", self.gradient_norm)):
            for one in scalars:
                change = f"{one.clean:.6g} -> {one.disturbed:.6g} ({one.difference:+.3e})"
                lines.append(f"{one.step:6}  {name:{width}} {change}")
        if self.missing:
            lines.append(f"nothing was heard of rank(s) {', '.join(map(str, self.missing))}")
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        parted, alike = self.parts_at, self.alike_after
        if parted is None:
            return [f"no tensor differs in {self.steps} steps from step {self.first_step} on"]
        where = f"they part in step {parted.step}, microbatch {parted.microbatch}, at {parted.tap}"
        if alike is None:
            how_long = f"and are not within {self.tolerance:g} again in the {self.steps} steps that were run"
        elif alike == 0:
            how_long = f"and stay within {self.tolerance:g}"
        else:
            how_long = f"and are within {self.tolerance:g} again after {alike} step{'s' * (alike != 1)}"
        return [f"{where}, {how_long}"]


def _place(row: Difference) -> tuple[tuple[int, int, str], ...]:
    return order(row.tap)


# ------------------------------------------------------------------- parts


def part_row(tap: str, step: int, shard: object, replica: int, sums: Tally) -> list[Any]:
    """A row of what a rank says."""
    numbers = [sums.differing, sums.clean, sums.maximum, sums.largest]
    return [tap, step, str(shard), replica, *(plain(number) for number in numbers), sums.microbatch]


def merge(parts: Iterable[dict[str, Any]], world_size: int | None = None) -> PairedResult:
    """What the ranks have said as one result. ValueError where one said something else.

    Shards of a tensor add up; of replicas that which differs most counts (they are alike unless one of them alone was
    disturbed); losses are averaged over the ranks that have one.
    """
    said = list(parts)
    if not said:
        raise ValueError("pair: no rank has said anything")
    try:
        return _merged(said, world_size)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"pair: what a rank said is not understood ({error!r})") from None


def _merged(said: list[dict[str, Any]], world_size: int | None) -> PairedResult:
    shards: dict[tuple[int, str], dict[str, list[Tally]]] = {}
    scalars: dict[str, dict[int, list[tuple[float, float]]]] = {"loss": {}, "gradient_norm": {}}
    for part in said:
        for tap, step, shard, _replica, differing, clean, maximum, largest, microbatch in part["rows"]:
            sums = Tally(float(differing), float(clean), float(maximum), float(largest), int(microbatch))
            shards.setdefault((int(step), str(tap)), {}).setdefault(str(shard), []).append(sums)
        for name, found in scalars.items():
            for step, clean, disturbed in part.get(name, ()):
                found.setdefault(int(step), []).append((float(clean), float(disturbed)))
    rows: list[Difference] = []
    for step, tap in sorted(shards, key=lambda key: (key[0], order(key[1]))):
        total = Tally()
        for replicas in shards[step, tap].values():
            total.add(max(replicas, key=lambda one: math.inf if math.isnan(one.differing) else one.differing))
        rows.append(difference(step, tap, total))
    first = said[0]
    heard = {int(part["rank"]) for part in said}
    return PairedResult(
        str(first["pair"]),
        int(first["first_step"]),
        int(first["steps"]),
        float(first["tolerance"]),
        tuple(rows),
        means(scalars["loss"]),
        means(scalars["gradient_norm"]),
        perturbations=tuple(str(text) for text in first.get("perturbations", ())),
        missing=tuple(rank for rank in range(world_size or 0) if rank not in heard),
    )


# --------------------------------------------------------------- recordings


def compare(clean: Iterable[Frame], disturbed: Iterable[Frame], tolerance: float = 1e-3) -> PairedResult:
    """Two recordings of the same steps. Where both have a tensor's elements (``values``) these are compared, else
    rms and largest value of its statistics. ValueError where they have no tensor and step in common."""
    before, after = _by_moment(clean), _by_moment(disturbed)
    common = sorted(before.keys() & after.keys(), key=lambda key: (key[0], order(key[1]), key[2]))
    if not common:
        raise ValueError("the two recordings have no tensor of the same step in common")
    exact = all(_all_have(frames, "values") for key in common for frames in (before[key], after[key]))
    rows: dict[tuple[int, str], list[Tally]] = {}
    loss: dict[int, list[tuple[float, float]]] = {}
    for step, tap, microbatch in common:
        ours, theirs = before[step, tap, microbatch], after[step, tap, microbatch]
        if tap == "loss":
            loss.setdefault(step, []).append((_mean(ours), _mean(theirs)))
            continue
        sums = _elements(ours, theirs, microbatch) if exact else _statistics(ours, theirs, microbatch)
        rows.setdefault((step, tap), []).append(sums)
    found: list[Difference] = []
    for (step, tap), several in rows.items():
        total = Tally()
        for one in several:
            total.add(one)
        found.append(difference(step, tap, total))
    steps = [key[0] for key in common]
    count = max(steps) - min(steps) + 1
    measure = "elements" if exact else "statistics"
    return PairedResult("", min(steps), count, tolerance, tuple(found), means(loss), measure=measure)


_Frames = dict[tuple[Any, ...], Frame]


def _by_moment(frames: Iterable[Frame]) -> dict[tuple[int, str, int], _Frames]:
    """By step, tap and microbatch; of replicas the first."""
    found: dict[tuple[int, str, int], _Frames] = {}
    for frame in sorted(frames, key=lambda frame: frame.rank):
        if "vector" in frame.arrays or "values" in frame.arrays:
            found.setdefault((frame.step, frame.tap, frame.microbatch), {}).setdefault((frame.shard, frame.what), frame)
    return found


def _all_have(frames: _Frames, name: str) -> bool:
    return all(name in frame.arrays for frame in frames.values())


def _elements(ours: _Frames, theirs: _Frames, microbatch: int) -> Tally:
    total = Tally()
    for key in ours.keys() & theirs.keys():
        pair = [_numbers(frames[key]) for frames in (ours, theirs)]
        if pair[0].shape != pair[1].shape:
            raise ValueError(f"pair: {ours[key].tap} has another shape in the other recording")
        total.add(tally(pair[0], pair[1], microbatch))
    return total


def _numbers(frame: Frame) -> np.ndarray[Any, Any]:
    """float64; 16 bits that stand for a bfloat16 are its upper half of a float32."""
    values = frame.arrays["values"]
    if frame.meta.get("dtypes", {}).get("values") == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def _statistics(ours: _Frames, theirs: _Frames, microbatch: int) -> Tally:
    """Root of the mean square and largest value in the place of the elements."""
    (a, first), (b, second) = (_merged_statistics(frames) for frames in (ours, theirs))
    pair = np.array([a, first]), np.array([b, second])
    apart = abs(b - a)
    same = bool(np.array_equal(*pair, equal_nan=True))
    return Tally(apart * apart, a * a, abs(second - first), abs(first), -1 if same else microbatch)


def _merged_statistics(frames: _Frames) -> tuple[float, float]:
    """(rms, largest magnitude)."""
    vectors = [frame for frame in frames.values() if "vector" in frame.arrays]
    shifts = [float(frame.arrays["shift"][0]) if "shift" in frame.arrays else 0.0 for frame in vectors]
    derived = derive(*merge_vectors([frame.arrays["vector"] for frame in vectors], shifts))
    return derived.rms, derived.absmax


def _mean(frames: _Frames) -> float:
    values = [float(np.mean(_numbers(frame))) for frame in frames.values() if "values" in frame.arrays]
    if values:
        return float(np.mean(values))
    vectors = [frame.arrays["vector"] for frame in frames.values()]
    shifts = [float(f.arrays["shift"][0]) if "shift" in f.arrays else 0.0 for f in frames.values()]
    return derive(*merge_vectors(vectors, shifts)).mean


def words_of(spec: PairSpec) -> list[str]:
    """The perturbations of a pair, a line each."""
    return [describe(perturbation.settled(0)) for perturbation in spec.perturbations]
