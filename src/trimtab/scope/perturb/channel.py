"""One perturbation of communications: what of what has come it changes, and how late that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trimtab.scope.floats import bits_problem
from trimtab.scope.moment import Moment
from trimtab.scope.names import Pattern, Tap
from trimtab.scope.perturb.apply import Applied, describe, disturb_at, disturb_part
from trimtab.scope.perturb.kinds import dtype_name
from trimtab.scope.perturb.part import Part, choose
from trimtab.scope.perturb.place import Place
from trimtab.scope.perturbation import Perturbation

UNCOUNTED: Final = -1
"""Elements, where counting them would mean to wait for a device."""
Launch = Callable[[], None]
_MOST_REMEMBERED: Final = 256 << 20
"""Bytes of earlier contents, for ``stale``."""


class Channel:
    """One perturbation of communications."""

    def __init__(
        self, perturbation: Perturbation, log: Callable[[Applied], None], refuse: Callable[[Exception], None]
    ) -> None:
        self._perturbation = perturbation
        self._pattern = Pattern(perturbation.pattern)
        self._log = log
        self._refuse = refuse
        self._remembered: dict[tuple[Any, ...], torch.Tensor] = {}
        self._bytes = 0

    def settled(self, perturbation: Perturbation) -> None:
        """Its first step is known now."""
        self._perturbation = perturbation

    @property
    def delays(self) -> bool:
        """Does it change when, not what?"""
        return self._perturbation.kind == "delay"

    def concerns(self, name: str, moment: Moment) -> bool:
        """Does it do anything here (or has to remember what comes)?"""
        said = self._perturbation
        if not self._pattern.matches(name):
            return False
        return said.kind == "stale" or self.acts(name, moment)

    def acts(self, name: str, moment: Moment) -> bool:
        """Is this one of its moments?"""
        said = self._perturbation
        return said.acts(moment.step, moment.microbatch) and said.happens(name, moment.step, moment.microbatch)

    def delay_ns(self, name: str, moment: Moment) -> int:
        """By how much this communication is late."""
        if not (self.delays and self._pattern.matches(name) and self.acts(name, moment)):
            return 0
        milliseconds = float(self._perturbation.parameters["ms"])
        try:
            self._log(Applied(name, "delay", moment.step, moment.microbatch, 0, 0, old=(), new=(milliseconds,)))
        except OSError as error:
            self._refuse(error)
            return 0
        return round(milliseconds * 1e6)

    @torch.no_grad()
    def prepared(self, name: str, tensors: Sequence[torch.Tensor], moment: Moment) -> list[Launch]:
        """What is to be launched when a device has received: nothing then may wait for it, as it waits for the peers.
        So all is chosen and written down before, without the values. Raises nothing."""
        try:
            if self._perturbation.kind == "stale":
                return (
                    [lambda: self._repeat(name, tensors, moment, logs=False)]
                    if self._notes(name, tensors, moment)
                    else []
                )
            return list(self._launches(name, tensors, moment)) if self.acts(name, moment) else []
        except Exception as error:
            self._refuse(error)
            return []

    def _notes(self, name: str, tensors: Sequence[torch.Tensor], moment: Moment) -> bool:
        if self.acts(name, moment):
            size = sum(tensor.numel() for tensor in tensors)
            self._log(Applied(name, "stale", moment.step, moment.microbatch, size, size))
        return True

    def _launches(self, name: str, tensors: Sequence[torch.Tensor], moment: Moment) -> Iterator[Launch]:
        said = self._perturbation
        for tensor, tap, place in self._pieces(name, tensors):
            part = choose(said, tap, place, moment, tensor.device)
            if part.index is not None and part.index.numel() == 0:
                continue
            elements = tensor.numel() if part.mask is None else UNCOUNTED
            elements = elements if part.index is None else part.index.numel()
            self._log(Applied(name, said.kind, moment.step, moment.microbatch, elements, tensor.numel()))

            def launch(tensor: torch.Tensor = tensor, tap: Tap = tap, place: Place = place, part: Part = part) -> None:
                flat = tensor.detach().reshape(-1)
                tensor.copy_(disturb_part(said, tap, flat, moment, place, part).tensor.view_as(tensor))

            yield launch

    def _pieces(self, name: str, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Tap, Place]]:
        """All tensors as one, one behind the other; what a kind cannot be done to is passed over."""
        whole, before = sum(tensor.numel() for tensor in tensors), 0
        for tensor in tensors:
            first, before = before, before + tensor.numel()
            dtype = dtype_name(tensor.dtype)
            if tensor.numel() and self._can(tensor, dtype):
                tap = Tap(name, "communication", shape=(tensor.numel(),), dtype=dtype)
                yield tensor, tap, Place((whole,), (((first, tensor.numel()),),))

    def _can(self, tensor: torch.Tensor, dtype: str) -> bool:
        if self._perturbation.kind == "bit-flip":
            return bits_problem(self._perturbation.parameters["bits"], dtype) is None
        return tensor.is_floating_point()

    @torch.no_grad()
    def change(self, name: str, tensors: Sequence[torch.Tensor], moment: Moment) -> None:
        """Change what has come, in place. From any thread; raises nothing that is not an interrupt."""
        try:
            if self._perturbation.kind == "stale":
                self._repeat(name, tensors, moment)
            elif self.acts(name, moment):
                for tensor, new, applied in self._disturbed(name, tensors, moment):
                    self._log(applied)
                    tensor.copy_(new)
        except Exception as error:
            self._refuse(error)

    def _disturbed(
        self, name: str, tensors: Sequence[torch.Tensor], moment: Moment
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Applied]]:
        for tensor, tap, place in self._pieces(name, tensors):
            flat = tensor.detach().reshape(-1)
            done = disturb_at(self._perturbation, tap, flat, moment, place)
            applied = describe(self._perturbation, tap, flat, done, moment)
            if applied.elements:
                yield tensor, done.tensor.view_as(tensor), applied

    def _repeat(self, name: str, tensors: Sequence[torch.Tensor], moment: Moment, logs: bool = True) -> None:
        acts = self.acts(name, moment)
        for number, tensor in enumerate(tensors):
            key = (name, number, tensor.dtype, tuple(tensor.shape))
            last = self._remembered.get(key)
            if last is None and self._bytes + tensor.nbytes > _MOST_REMEMBERED:
                raise ValueError(f"stale: more than {_MOST_REMEMBERED >> 20} MB would have to be remembered")
            now = tensor.detach().clone()
            self._remembered[key] = now
            if last is None:
                self._bytes += tensor.nbytes
            elif acts:
                if logs:
                    size = tensor.numel()
                    self._log(Applied(name, "stale", moment.step, moment.microbatch, size, size))
                tensor.copy_(last)
