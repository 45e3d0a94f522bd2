"""A training script's microbatches, taken from its data iterator before its model is run.

The script's ``forward_step_func`` reads a batch, moves it, broadcasts it over tensor parallel ranks and calls its
model. A hook on the model stops it there and notes what the model was called with: what both sides have to have in
common, and what does not have to be sent. Later the function is run again on the same data, and the model is given the
very tensors that were noted, so that they are recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

ForwardStep = Callable[..., tuple[Any, Any]]


class Microbatch(tuple[torch.Tensor, ...]):
    """The tensors that the model is called with; and how to call it so again."""

    number: int
    """Of this rank's, from 0 in each step."""
    items: list[Any]
    """What the data iterator gave."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def of(cls, number: int, items: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Microbatch:
        """From a call of the model."""
        made = cls(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
        made.number, made.items, made.arguments = number, items, (args, kwargs)
        return made


class Replay:
    """A data iterator that gives again what was noted; in between it passes on the script's own, and notes."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._noted: list[Any] = []
        self._given: Iterator[Any] | None = None

    def __iter__(self) -> Replay:
        return self

    def __next__(self) -> Any:
        if self._given is not None:
            try:
                return next(self._given)
            except StopIteration:
                raise RuntimeError("the forward step took more from its data iterator than before") from None
        item = next(self._data)
        self._noted.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def noted(self) -> list[Any]:
        """What has been passed on since the last call."""
        noted, self._noted = self._noted, []
        return noted

    @contextmanager
    def giving(self, items: list[Any]) -> Iterator[None]:
        """Within, these once more."""
        self._given = iter(items)
        try:
            yield
        finally:
            self._given = None


class Microbatches:
    """Those of one call of the schedule, each taken once and in order, in whatever order they are asked for."""

    def __init__(self, forward_step: ForwardStep, model: torch.nn.Module, data: Any) -> None:
        """``data``: the script's iterator; None where it has none, as on some tensor parallel ranks."""
        self._forward_step = forward_step
        self._model = model
        self.replay = None if data is None else Replay(data)
        self._waiting: dict[int, Microbatch] = {}
        self._taken = 0

    def take(self, number: int) -> Microbatch:
        """The ``number``-th, from 0; once.

        Raises:
            ValueError: the forward step function does not call the model that the schedule was given.
        """
        while self._taken <= number:
            self._waiting[self._taken] = self._next()
            self._taken += 1
        return self._waiting.pop(number)

    def _next(self) -> Microbatch:
        with torch.no_grad(), _calls(self._model, _stop):
            try:
                self._forward_step(self.replay, self._model)
            except _Reached as reached:
                items = [] if self.replay is None else self.replay.noted()
                return Microbatch.of(self._taken, items, reached.positional, reached.named)
        raise ValueError("the forward step function has to call the model that the schedule was given, and did not")

    @contextmanager
    def again(self, microbatch: Microbatch) -> Iterator[None]:
        """Within, the forward step function gets this microbatch, and its model the noted tensors."""
        with _calls(self._model, lambda _args, _kwargs: microbatch.arguments):
            if self.replay is None:
                yield
            else:
                with self.replay.giving(microbatch.items):
                    yield


class _Reached(BaseException):
    """The model was called. No ordinary exception, so that the script does not take it for its own."""

    def __init__(self, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.positional = positional
        self.named = named


def _stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _Reached(args, kwargs)


@contextmanager
def _calls(model: torch.nn.Module, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Within, the model is called with what ``change`` makes of its arguments."""
    handle = model.register_forward_pre_hook(
        lambda _module, args, kwargs: change(args, kwargs), prepend=True, with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()
