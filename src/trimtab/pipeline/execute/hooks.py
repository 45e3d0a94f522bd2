"""Where others listen to an executor or interfere with it: recorders, emulated devices, injected faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trimtab.pipeline.actions import Action
from trimtab.pipeline.decisions import DecisionLog

if TYPE_CHECKING:
    import torch

    from trimtab.transport.interface import Label, Message
    from trimtab.transport.sending import Sending


class Hooks(Protocol):
    """Called on the executor's thread; what they raise ends the iteration like an error of the model."""

    def iteration_begins(self, iteration: int, forward_only: bool) -> None:
        """Before the first action. Every stage counts iterations alike, from 0."""
        ...

    def iteration_ends(self, iteration: int) -> None:
        """After the last action; not where an error ended it."""
        ...

    def begin(self, action: Action) -> None:
        """The action's inputs are here, and it is about to be run (on CUDA: launched)."""
        ...

    def end(self, action: Action) -> None:
        """It has been run (on CUDA: launched), and nothing has been sent yet. Time spent here counts as the action's,
        so that an emulated device may lengthen it."""
        ...

    def sent(self, action: Action, to: int, label: Label, tensors: Sequence[torch.Tensor], sending: Sending) -> None:
        """What an action made was handed to the transport, for stage ``to``; ``sending`` says when it is complete."""
        ...

    def received(self, message: Message) -> None:
        """A message has come: of this iteration, or of a later one."""
        ...

    def decided(self, log: DecisionLog) -> None:
        """What was decided in the iteration that has ended, if that is kept."""
        ...


class NoHooks:
    """Hooks that do nothing; to be derived from."""

    def iteration_begins(self, iteration: int, forward_only: bool) -> None:
        """Nothing."""

    def iteration_ends(self, iteration: int) -> None:
        """Nothing."""

    def begin(self, action: Action) -> None:
        """Nothing."""

    def end(self, action: Action) -> None:
        """Nothing."""

    def sent(self, action: Action, to: int, label: Label, tensors: Sequence[torch.Tensor], sending: Sending) -> None:
        """Nothing."""

    def received(self, message: Message) -> None:
        """Nothing."""

    def decided(self, log: DecisionLog) -> None:
        """Nothing."""


class Several(NoHooks):
    """Many hooks as one: each in turn, at the end of an action in reverse."""

    def __init__(self, *hooks: Hooks) -> None:
        self._hooks = hooks

    def iteration_begins(self, iteration: int, forward_only: bool) -> None:
        """Each in turn."""
        for hooks in self._hooks:
            hooks.iteration_begins(iteration, forward_only)

    def iteration_ends(self, iteration: int) -> None:
        """Each in reverse."""
        for hooks in reversed(self._hooks):
            hooks.iteration_ends(iteration)

    def begin(self, action: Action) -> None:
        """Each in turn."""
        for hooks in self._hooks:
            hooks.begin(action)

    def end(self, action: Action) -> None:
        """Each in reverse."""
        for hooks in reversed(self._hooks):
            hooks.end(action)

    def sent(self, action: Action, to: int, label: Label, tensors: Sequence[torch.Tensor], sending: Sending) -> None:
        """Each in turn."""
        for hooks in self._hooks:
            hooks.sent(action, to, label, tensors, sending)

    def received(self, message: Message) -> None:
        """Each in turn."""
        for hooks in self._hooks:
            hooks.received(message)

    def decided(self, log: DecisionLog) -> None:
        """Each in turn."""
        for hooks in self._hooks:
            hooks.decided(log)
