"""What is trained, as a user says it; the same on every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import nn

from trimtab.fbd.execute.hooks import Hooks
from trimtab.fbd.ranks import Layout, Placement
from trimtab.fbd.sharing import ahead_of, helpers_of, partners_of
from trimtab.fbd.split.random_states import RandomStates
from trimtab.transport.interface import Label

Tensors = tuple[torch.Tensor, ...]
Stage = Callable[[nn.Module, Tensors, Tensors], Tensors]
"""A stage's forward of one microbatch: its module, what the stage before gave (nothing on the first), and the batch;
what it gives the next, or on the last stage the loss alone, scaled as its gradient is to count."""
Batch = Callable[[int, int, int], Tensors]
"""Step, cell, microbatch: the tensors that all stages may use. Forward and backward side each ask for them, and have to
get the same."""
Finish = Callable[[nn.Module], None]
"""After the last backward of a step: reduce gradients over replicas, clip, let the optimizer step, clear gradients."""
Mode = Literal["ship", "recompute"]

ACTIVATION: Final = 0
SHIPMENT: Final = 1
WEIGHTS: Final = 2
CREDIT: Final = 3
ASIDE: Final = 4
MODE: Final = 5
MEASURED: Final = 6
REHEARSAL: Final = 7
VERDICT: Final = 8
REQUEST: Final = 9
DONE: Final = 10
LOST: Final = 11
OWN: Final = 12
CUT: Final = 13
"""Chunks of labels, that tell messages apart. Those from 16 to 31 are an engine's."""


@dataclass(frozen=True, slots=True)
class Program:
    """All of it. ValueError, in one line, where it does not fit together."""

    layout: Layout
    microbatches: int
    """Of a cell in a step."""
    stage: Stage
    batch: Batch
    mode: Mode | Literal["auto"] = "ship"
    """``auto``: of each stage the one with which a microbatch takes less, as the first two steps show."""
    ahead: int | None = None
    """Microbatches that a forward rank may have sent to a backward rank and not heard back of, which holds them. None:
    as many as keep a pipeline of that depth full (:meth:`bound`)."""
    patience: float = 60.0
    """Seconds until what does not come is taken to be lost."""
    random: RandomStates = field(default_factory=RandomStates)
    hooks: Hooks = field(default_factory=Hooks)
    """Of an engine."""
    order: Literal["1f1b", "dynamic"] = "1f1b"
    """``1f1b``: microbatches in order on every rank, so gradients are added up in that order. ``dynamic``: whatever has
    come, the oldest first."""
    when_lost: Literal["raise", "continue"] = "raise"
    """What a forward process that dies is: an error, or the end of its forward instance alone."""
    seed: int | None = None
    """Each forward draws from PyTorch's generators as this, step, cell, microbatch and stage say, wherever it runs;
    None: from the generators of its process as they are."""
    helped: float = 1.0
    """Share of the microbatches whose forward runs on forward ranks; backward ranks run the others' themselves. Less
    than 1 for helpers that are slower than what they help."""
    equal_backwards: bool = False
    """Backward ranks of a stage begin with the same weights by themselves."""
    rehearse: bool = True
    """Before the first step both sides try a microbatch, and refuse what cannot be trained or does not fit."""
    memory: float | None = None
    """Bytes that a process may use; None: what is free on its CUDA device, and on the CPU no limit."""
    optimizer_bytes: float = 0.0
    """Of a parameter, where backwards run, beside itself and its gradient; 8 for the two float32 moments of Adam."""
    cores: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """With mode ``ship``: modules of a stage, in the order in which it calls them, that hold most of it. What they do
    is sent; what is around them (embedding, loss) is run again by backward ranks and may draw no random numbers. None:
    all of the stage is sent. Needed where tensor parallel degrees differ."""
    through_host: bool = False
    """Everything travels by way of host memory, over a transport that was opened for the CPU; for sides that are on
    devices of different types."""

    def __post_init__(self) -> None:
        layout = self.layout
        if self.microbatches < 1 or self.microbatches % layout.backwards:
            raise ValueError(
                f"{self.microbatches} microbatches of a cell are to be the same number, from 1 on, for each of its "
                f"{layout.backwards} backward instances"
            )
        if not 0 < self.helped <= 1:
            raise ValueError(f"helped: a share of the microbatches, above 0 and at most 1, not {self.helped:g}")
        shared = len(self.helped_microbatches)
        if shared < layout.forwards:
            raise ValueError(
                f"{layout.forwards} forward instances of a cell share {shared} microbatches of a step: some would have "
                "none; take fewer forward instances or more microbatches"
            )
        if self.ahead is not None and self.ahead < 1:
            raise ValueError(f"ahead: at least 1 microbatch, not {self.ahead}")
        if layout.forward_tp != layout.backward_tp and (self.cores is None or self.mode != "ship" or not self.rehearse):
            raise ValueError(
                f"forwards at TP {layout.forward_tp} and backwards at TP {layout.backward_tp} need cores, mode 'ship' "
                "and a rehearsal"
            )
        for name, value, known in (
            ("mode", self.mode, ("ship", "recompute", "auto")),
            ("order", self.order, ("1f1b", "dynamic")),
            ("when_lost", self.when_lost, ("raise", "continue")),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r}: expected {', '.join(known[:-1])} or {known[-1]}")
        if layout.backward_tp > 1 and self.when_lost == "continue":
            raise ValueError(
                "when_lost='continue' is for stages without tensor parallelism: a rank that dies leaves the others of "
                "its group in a collective"
            )

    @property
    def placement(self) -> Placement:
        """A process for each virtual rank."""
        return Placement(self.layout)

    @property
    def goes_on(self) -> bool:
        """Whether the loss of a forward process is no error."""
        return self.when_lost == "continue"

    @property
    def helped_microbatches(self) -> list[int]:
        """Of a cell: those whose forward runs on a forward rank."""
        return sorted(self._helpers())

    def _helpers(self) -> dict[int, int]:
        layout = self.layout
        return helpers_of(self.microbatches, layout.forwards, layout.backwards, self.helped)

    def forwarded(self, instance: int) -> list[int]:
        """Those of a forward instance; the instances of a cell take turns."""
        return [one for one, helper in self._helpers().items() if helper == instance % self.layout.forwards]

    def helper(self, cell: int, microbatch: int) -> int | None:
        """The forward instance that has a microbatch; None: its backward rank has it itself."""
        helper = self._helpers().get(microbatch)
        return None if helper is None else cell * self.layout.forwards + helper

    def partners(self) -> int:
        """Forward instances that send to one backward instance, at most."""
        return partners_of(self._helpers(), self.layout.backwards)

    def bound(self, stage: int) -> int:
        """Microbatches of a stage that one forward rank may have sent to one backward rank and not heard back of.

        A microbatch is with a backward rank of the stage while it goes forward through the stages behind, and back; a
        forward instance takes as much longer as there are more of them. Once a backward is done the forward that may
        begin then has to run, and to travel, while the backward rank is busy with others: it has the time of one
        backward for each of the two.
        """
        if self.ahead is not None:
            return self.ahead
        return ahead_of(self.layout.stages - 1 - stage, self.layout.forwards, self.layout.backwards, self.partners())


_NAMES: Final = {
    ACTIVATION: "what the stage beside gives",
    WEIGHTS: "the weights",
    ASIDE: "what comes beside a shipment",
    OWN: "what the stage before gives",
}


def named(label: Label) -> str:
    """Of a message that is waited for."""
    where = f"step {label.iteration}" + (f", microbatch {label.microbatch}" if label.chunk != WEIGHTS else "")
    return f"{_NAMES.get(label.chunk, 'a message')} ({where})"


def label(chunk: int, step: int, microbatch: int = 0, *, backward: bool = False) -> Label:
    """Of a message."""
    return Label(backward, chunk, microbatch, step)
