"""From a recorded run to what is trained: the times of its passes and what of them is exposed communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trimtab.fbd.advise.training import Training
from trimtab.pipeline.simulate.recorded import Times


class Exposed(Protocol):
    """Waits for tensor parallel communication; :class:`trimtab.scan.exposure.Exposure` has them."""

    @property
    def degree(self) -> int: ...
    @property
    def forward(self) -> tuple[float, ...]: ...
    @property
    def backward(self) -> tuple[float, ...]: ...


@dataclass(frozen=True, slots=True)
class Model:
    """What a trace does not say."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    vocabulary: int
    parameters: float
    saved: float


def training_of(times: Times, exposed: Exposed, model: Model, microbatches: int | None = None) -> Training:
    """The run's job; the chunks of a stage are taken together. ValueError where waits are longer than their passes."""
    forward = [sum(row) for row in times.forward]
    backward = [sum(b) + sum(w) for b, w in zip(times.backward, times.wgrad, strict=True)]
    for name, whole, waits in (("forward", forward, exposed.forward), ("backward", backward, exposed.backward)):
        for stage, (seconds, wait) in enumerate(zip(whole, waits, strict=True)):
            if wait >= seconds:
                raise ValueError(
                    f"the trace has longer waits for tensor parallel communication in the {name} of stage {stage} "
                    f"({wait:.3g} s) than that took ({seconds:.3g} s): its times cannot be used"
                )
    return Training(
        tuple(whole - wait for whole, wait in zip(forward, exposed.forward, strict=True)),
        tuple(whole - wait for whole, wait in zip(backward, exposed.backward, strict=True)),
        tuple(exposed.forward),
        tuple(exposed.backward),
        exposed.degree,
        times.microbatches if microbatches is None else microbatches,
        model.layers,
        model.hidden,
        model.sequence,
        model.batch,
        model.vocabulary,
        model.parameters,
        model.saved,
        times.transfer,
    )
