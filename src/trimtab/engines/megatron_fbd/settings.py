"""How a job is divided into forward and backward ranks, and what may be set of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trimtab.config import TransportConfig
from trimtab.engines.megatron_fbd.randomness import Kind
from trimtab.fbd.ranks import Layout


@dataclass(frozen=True, slots=True)
class Settings:
    """The same on every process. ValueError, in one line, for what cannot be."""

    tp: int = 1
    """Tensor parallel degree of backward ranks, as the training script has it."""
    pp: int = 1
    """Pipeline stages, of both."""
    forward_tp: int | None = None
    """Tensor parallel degree of forward ranks; None: as that of backward ranks."""
    forwards: int = 1
    """Forward instances of each stage, to every ``backwards`` backward instances."""
    backwards: int = 1
    mode: Literal["ship", "recompute", "auto"] = "ship"
    """What forwards send; this, ``order`` and ``when_lost`` are as in :class:`trimtab.fbd.execute.program.Program`."""
    shipped: Literal["stage", "layers"] = "stage"
    """With mode ``ship``, of what: all, or transformer layers (and the dropout behind the embedding) alone, so that
    embedding, logits and loss are run again where backwards are, and the softmax over the vocabulary does not travel.
    Always ``layers`` where tensor parallel degrees differ."""
    order: Literal["1f1b", "dynamic"] = "1f1b"
    when_lost: Literal["raise", "continue"] = "raise"
    randomness: Literal["auto", "stream", "microbatch"] = "auto"
    """Dropout. ``stream``: each replica draws what it would draw in ordinary training; its microbatches have to come
    from one forward instance, in order. ``microbatch``: what is drawn follows from the step, the stage and the
    microbatch. ``auto``: the former where it can be."""
    ahead: int | None = None
    """Microbatches that a forward rank may be ahead of a backward rank; None: as many as fill the pipeline."""
    patience: float = 60.0
    """Seconds until what does not come is an error."""
    opening: float = 600.0
    """The same until all processes have built their models and meet."""
    memory: float | None = None
    """Bytes that a process may use; None: what is free on its device."""
    optimizer_bytes: float = 0.0
    """Of a parameter, on backward ranks, beside itself and its gradient."""
    transport: TransportConfig = field(default_factory=TransportConfig)

    def __post_init__(self) -> None:
        for name, known in (
            ("mode", ("ship", "recompute", "auto")),
            ("shipped", ("stage", "layers")),
            ("order", ("1f1b", "dynamic")),
            ("when_lost", ("raise", "continue")),
            ("randomness", ("auto", "stream", "microbatch")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}: expected one of {', '.join(known)}")
        for name in ("patience", "opening"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is to be more than 0 seconds, not {getattr(self, name)}")
        why = self._why_no_streams()
        if self.randomness == "stream" and why:
            raise ValueError(f"randomness stream: {why}; use microbatch")

    @property
    def in_layers(self) -> bool:
        """Whether transformer layers alone are shipped."""
        return self.shipped == "layers" or self.forward_tp not in (None, self.tp)

    @property
    def draws(self) -> Kind:
        """What ``auto`` is, of :attr:`randomness`."""
        if self.randomness == "auto":
            return "microbatch" if self._why_no_streams() else "stream"
        return self.randomness

    def _why_no_streams(self) -> str:
        layout = self.layout_of_one
        if layout.backwards % layout.forwards:
            return (
                f"{layout.forwards} forward instances share the microbatches of {layout.backwards} backward instances, "
                "and those of one have to come from one"
            )
        if layout.forward_tp != layout.backward_tp:
            return "ranks of another tensor parallel degree have other generators"
        if self.order != "1f1b":
            return "microbatches that are taken in another order draw in another order"
        return "a forward that is run elsewhere cannot draw on" if self.when_lost != "raise" else ""

    def layout(self, world: int) -> Layout:
        """Of a job of ``world`` processes.

        Raises:
            ValueError: it does not divide, or a replica's data would have to be read by another.
        """
        one = self.layout_of_one
        each = one.stages * (one.forwards * one.forward_tp + one.backwards * one.backward_tp)
        if world < each or world % each:
            raise ValueError(
                f"{one.stages} stages of {one.forwards} forward instances at TP {one.forward_tp} and {one.backwards} "
                f"backward instances at TP {one.backward_tp} take a multiple of {each} processes; there are {world}"
            )
        found = self._layout(world // each)
        if self.when_lost == "continue" and found.forwards > 1:
            raise ValueError(
                "when_lost continue: a backward rank reads its own data alone, so each is to have one forward instance "
                "of its own (forwards = backwards), or all one together"
            )
        return found

    @property
    def layout_of_one(self) -> Layout:
        """Of the smallest job."""
        return self._layout(1)

    def _layout(self, replicas: int) -> Layout:
        """Microbatches are numbered over all replicas, as Megatron's samplers lay out a batch; so there is one cell,
        but where each backward instance has a forward instance of its own."""
        sizes = {
            "stages": self.pp,
            "forward_tp": self.tp if self.forward_tp is None else self.forward_tp,
            "backward_tp": self.tp,
        }
        if self.forwards == self.backwards:
            return Layout(**sizes, cells=self.forwards * replicas)
        return Layout(**sizes, forwards=self.forwards * replicas, backwards=self.backwards * replicas)
