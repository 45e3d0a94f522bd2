"""A stand-in for Megatron-Bridge, which needs GPUs: its documented callback interface around the example's job.

It follows the interface of 0.7 (https://docs.nvidia.com/nemo/megatron-bridge/latest/training/callbacks.html): a class
``Callback`` with a method for each event that takes one context; only overridden methods are registered; they are
called in order, and what they raise passes on. As there, the schedule is picked before ``on_train_start``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

EVENTS = tuple(f"on_{what}_{when}" for what in ("train", "train_step", "eval", "test") for when in ("start", "end"))


class Callback:
    """Base class; every event does nothing."""


def _nothing(self: Callback, context: Context) -> None:
    """What an event does that is not overridden."""


for event in EVENTS:
    setattr(Callback, event, _nothing)


@dataclass
class Context:
    """What the callbacks get."""

    model: list[Any]
    user_state: dict[str, Any] = field(default_factory=dict)


def put_in_place() -> None:
    """As if ``megatron.bridge`` had been imported."""
    for name in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.callbacks"):
        sys.modules[name] = ModuleType(name)
    sys.modules["megatron.bridge.training.callbacks"].Callback = Callback  # type: ignore[attr-defined]


def pretrain(script: Any, arguments: list[str], callbacks: list[Callback], evaluate_every: int = 2) -> list[float]:
    """Train the example as Megatron-Bridge would, and call back; the losses on the last stage."""
    args = script.parse_arguments(arguments)
    text = script.load_text(None, args.seq_length + 2)
    model = script.build_model(args, script.transformer_config(args))
    optimizer = script.build_optimizer(args, model)
    context = Context(model)

    def fire(event: str) -> None:
        for callback in callbacks:
            if getattr(type(callback), event) is not getattr(Callback, event):
                getattr(callback, event)(context)

    def batches() -> list[Any]:
        state = script.parallel_state
        replica, replicas = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
        return [script.Batches(text, args, replica, replicas)(0)]

    schedule = script.get_forward_backward_func()
    script.get_forward_backward_func = lambda: schedule
    data, losses = batches(), []
    fire("on_train_start")
    for step in range(args.steps):
        fire("on_train_step_start")
        loss = script.train_step(args, model, optimizer, data)
        losses += [] if loss is None else [loss.item()]
        fire("on_train_step_end")
        if (step + 1) % evaluate_every == 0:
            fire("on_eval_start")
            schedule(
                forward_step_func=script.forward_step,
                data_iterator=batches()[0],
                model=model[0],
                num_microbatches=1,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=True,
            )
            fire("on_eval_end")
    fire("on_train_end")
    return losses
