"""Which way pays, by how much, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trimtab.fbd.advise.candidates import Candidate, Way, candidates
from trimtab.fbd.advise.predict import Prediction, bound, predict
from trimtab.fbd.advise.shares import refined
from trimtab.fbd.advise.training import Devices, Helpers, Training

_LEAST_GAIN: Final = 0.02
"""Below this a prediction says nothing: times are not known better."""
_SIMULATED: Final = 12
"""Disaggregated candidates of a kind."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and what it rests on."""

    training: Training
    now: Prediction
    """The job as it is: ordinary, with full recompute where nothing else fits."""
    best: Prediction
    """The best that fits, of all."""
    best_split: Prediction | None
    """The best disaggregated one that fits; None: none does."""
    predictions: tuple[Prediction, ...]
    """All, in order of throughput; those that do not fit last."""
    pays: bool
    """Disaggregation beats everything else that fits, by more than can be told from nothing."""
    reasons: tuple[str, ...]
    """Sentences with figures."""

    def gain(self, of: Prediction) -> float:
        """Throughput for each training device, with that of the job as it is as 1."""
        return of.throughput / self.now.throughput


def advise(training: Training, devices: Devices, helpers: Helpers | None = None) -> Advice:
    """Look at all candidates. ValueError where not even ordinary training fits."""
    found = [predict(training, devices, one, helpers) for one in _promising(training, devices, helpers)]
    fitting = [one for one in found if one.fits]
    ordinary = [one for one in fitting if not one.candidate.disaggregated]
    now = next((one for one in ordinary if _is_as_it_is(one.candidate, training)), None)
    if now is None:
        raise ValueError(
            f"the job does not fit into devices of {devices.memory / 1e9:.3g} GB as it is, even with full recompute: "
            f"{found[0].reason}; check --memory, --layers, --hidden, --saved and the bytes a parameter"
        )
    split = [one for one in fitting if one.candidate.disaggregated]
    best_split = max(split, key=_worth, default=None)
    if best_split is not None and best_split.candidate.way is Way.SHIP:
        better = refined(best_split, lambda one: predict(training, devices, one, helpers))
        found += [better] if better is not best_split else []
        best_split = better
    best_ordinary = max(ordinary, key=_worth)
    pays = best_split is not None and _worth(best_split) > _worth(best_ordinary) * (1 + _LEAST_GAIN)
    best = best_split if pays and best_split is not None else best_ordinary
    ordered = sorted(found, key=lambda one: (not one.fits, -_worth(one)))
    reasons = tuple(_reasons(training, helpers, now, best_ordinary, best_split, found, pays=pays))
    return Advice(training, now, best, best_split, tuple(ordered), pays, reasons)


def _promising(training: Training, devices: Devices, helpers: Helpers | None) -> Iterator[Candidate]:
    """All but the disaggregated ones of a kind that the bound already says are worse than others of it: to simulate a
    step takes time, and there are hundreds of ratios."""
    kinds: dict[tuple[Way, bool, bool], list[Candidate]] = {}
    for one in candidates(training, helpers):
        if one.disaggregated:
            kinds.setdefault((one.way, one.on_helpers, one.helped < 1), []).append(one)
        else:
            yield one
    for alike in kinds.values():
        alike.sort(key=lambda one: -bound(training, devices, one, helpers))
        yield from alike[:_SIMULATED]


def _worth(one: Prediction) -> float:
    return one.throughput


def _is_as_it_is(candidate: Candidate, training: Training) -> bool:
    return candidate.pp == training.pp and candidate.tp == training.tp


def _reasons(
    training: Training,
    helpers: Helpers | None,
    now: Prediction,
    best_ordinary: Prediction,
    best_split: Prediction | None,
    found: Sequence[Prediction],
    *,
    pays: bool,
) -> list[str]:
    reasons: list[str] = []
    if now.candidate.way is Way.RECOMPUTE:
        reasons.append("Without full recompute the job does not fit: that is what it is compared with.")
    reasons.append(_exposure(training))
    if best_split is not None:
        gain = best_split.throughput / now.throughput
        word = "gains" if gain > 1 else "loses"
        reasons.append(f"The best disaggregated way, {best_split.candidate.name}, {word} {abs(gain - 1):.1%}.")
    else:
        why = next((one.reason for one in found if one.candidate.disaggregated and one.reason), "")
        reasons.append(f"No disaggregated way fits: {why}.")
    if best_ordinary.candidate != now.candidate:
        gain = best_ordinary.throughput / now.throughput - 1
        reasons.append(
            f"{best_ordinary.candidate.name} gains {gain:.1%} and needs no disaggregation; it fits "
            f"({best_ordinary.trainer_bytes / 1e9:.3g} GB a device)."
        )
    if best_split is not None and best_split.candidate.way is Way.SHIP:
        reasons.append(
            f"A forward device sends {best_split.shipped / 1e9:.3g} GB/s while it computes; recompute granularity sets "
            "how much."
        )
    reasons += _limits(best_split, found)
    if helpers is not None and best_split is not None and best_split.candidate.on_helpers and helpers.price:
        reasons.append(_price(helpers, best_split, now))
    if not pays and best_split is not None and best_split.throughput > now.throughput * (1 + _LEAST_GAIN):
        reasons.append("It beats the job as it is, but not what else could be done with the same devices.")
    return reasons


def _exposure(training: Training) -> str:
    if training.tp == 1:
        return "At TP 1 there is no tensor parallel communication that forwards elsewhere would be rid of."
    return (
        f"Forwards wait for tensor parallel communication for {training.kappa:.0%} of their compute (kappa "
        f"{training.kappa:.2f}); that is what forwards at TP 1 would save."
    )


def _limits(best_split: Prediction | None, found: Sequence[Prediction]) -> list[str]:
    """Where the link is the reason for computing twice."""
    ships = [one for one in found if one.candidate.way is Way.SHIP and one.fits]
    if not ships or best_split is None or best_split.candidate.way is not Way.SEND_INPUT:
        return []
    return ["Sending what forwards saved takes longer than computing it again: the link limits it."]


def _price(helpers: Helpers, split: Prediction, now: Prediction) -> str:
    cost = 1 + helpers.price * split.helpers / split.devices
    gain = split.throughput / cost / now.throughput - 1
    word = "more" if gain > 0 else "less"
    return f"For the money, with helpers at {helpers.price:g} of a trainer's price, it trains {abs(gain):.1%} {word}."
