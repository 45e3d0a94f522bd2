"""Weights that several positions of the model have: an embedding that is the output layer, too.

Each position adds up its own gradients over the microbatches, whatever order runs, and only then are they summed, from
the first position to the last. So the sum is the same, bit for bit, on every stage that holds the weight and for every
order. (One process that adds both in each microbatch rounds differently in the last digit.)
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.pipeline.shape import Shape

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from trimtab.pipeline.execute.executor import Executor

Tie = Mapping[int, str]
"""Position and name, within the module there, of each appearance of one weight."""
_SHOWN: Final = 4


class _Place(NamedTuple):
    """An appearance of a weight."""

    position: int
    parameter: nn.Parameter | None
    """None: on another stage."""


class Ties:
    """The tied weights of a stage.

    A parameter that is in several chunks of the stage is one without being named.
    """

    def __init__(self, shape: Shape, stage: int, modules: Sequence[nn.Module], ties: Sequence[Tie] = ()) -> None:
        """``modules``: the stage's chunks. ``ties``: the same on all stages.

        Raises:
            ValueError: if a tie names a position or a weight that does not exist.
        """
        self._shape = shape
        self._stage = stage
        self._sums: dict[tuple[int, nn.Parameter], Tensor] = {}
        named = [self._named(tie, modules) for tie in ties]
        known = {place.parameter for tie in named for place in tie}
        self._ties = named + [tie for tie in self._unnamed(modules) if tie[0].parameter not in known]
        self._apart: list[list[nn.Parameter]] = [[] for _ in modules]
        for place in (place for tie in self._ties for place in tie if place.parameter is not None):
            self._apart[shape.place(place.position).chunk].append(place.parameter)  # pyright: ignore[reportArgumentType]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """On this stage."""
        return list(dict.fromkeys(parameter for chunk in self._apart for parameter in chunk))

    def running(self, chunk: int) -> AbstractContextManager[None]:
        """Around a backward of a chunk: ``.grad`` of its tied weights is the chunk's own sum."""
        return self._swapped(chunk) if self._apart[chunk] else nullcontext()

    def finish(self, executor: Executor) -> None:
        """Exchange sums with the other stages, and add up. Errors are those of a transport."""
        outgoing: list[tuple[int, int, Tensor]] = []
        wanted: list[int] = []
        for number, tie in enumerate(self._ties):
            if all(place.parameter is None for place in tie):
                continue
            others = {self._shape.place(place.position).stage for place in tie} - {self._stage}
            for place in tie:
                key = number * self._shape.positions + place.position
                if place.parameter is None:
                    wanted.append(key)
                else:
                    outgoing += [(stage, key, self._sum(place)) for stage in sorted(others)]
        came = executor.exchange(outgoing, wanted)
        for number, tie in enumerate(self._ties):
            self._add(tie, came, number * self._shape.positions)
        self._sums.clear()

    def _add(self, tie: Sequence[_Place], came: Mapping[int, Tensor], base: int) -> None:
        own = {place.parameter: None for place in tie if place.parameter is not None}
        if not own:
            return
        parts = [came[base + p.position] if p.parameter is None else self._sum(p) for p in tie]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        for parameter in own:
            if parameter.grad is None:
                parameter.grad = total.clone()
            else:
                parameter.grad += total

    def _sum(self, place: _Place) -> Tensor:
        assert place.parameter is not None
        found = self._sums.get((self._shape.place(place.position).chunk, place.parameter))
        return torch.zeros_like(place.parameter) if found is None else found

    @contextmanager
    def _swapped(self, chunk: int) -> Generator[None]:
        before = [(parameter, parameter.grad) for parameter in self._apart[chunk]]
        for parameter, _ in before:
            parameter.grad = self._sums.get((chunk, parameter))
        try:
            yield
        finally:
            for parameter, gradient in before:
                if parameter.grad is not None:
                    self._sums[chunk, parameter] = parameter.grad
                parameter.grad = gradient

    def _named(self, tie: Tie, modules: Sequence[nn.Module]) -> list[_Place]:
        places: list[_Place] = []
        for position, name in sorted(tie.items()):
            if not 0 <= position < self._shape.positions:
                raise ValueError(f"tied weight {name}: the model has positions 0 to {self._shape.positions - 1}")
            stage, chunk = self._shape.place(position)
            if stage != self._stage:
                places.append(_Place(position, None))
                continue
            known = dict(modules[chunk].named_parameters(remove_duplicate=False))
            if name not in known:
                shown = ", ".join(list(known)[:_SHOWN]) or "none at all"
                raise ValueError(f"tied weight {name}: position {position} has no such parameter, but {shown}")
            places.append(_Place(position, known[name]))
        return places

    def _unnamed(self, modules: Sequence[nn.Module]) -> list[list[_Place]]:
        """Parameters that are in several chunks of the stage."""
        owners: dict[nn.Parameter, list[_Place]] = {}
        for chunk, module in enumerate(modules):
            for parameter in module.parameters():
                owners.setdefault(parameter, []).append(_Place(self._shape.position(self._stage, chunk), parameter))
        return [sorted(places, key=lambda place: place.position) for places in owners.values() if len(places) > 1]
