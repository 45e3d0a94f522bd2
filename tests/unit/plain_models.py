"""Small models, and an engine for plain PyTorch with somebody who listens to it: what its tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trimtab.config import Granularity
from trimtab.engines.plain import PlainEngine
from trimtab.record.observe import Call

WIDTH = 4


class Block(nn.Module):
    """A layer of two parts and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.mlp(torch.tanh(self.attention(self.norm(x))))


class Decoder(nn.Module):
    """Embedding, layers, norm, head; ``around`` says how a layer is called."""

    def __init__(self, layers: int = 2, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 8)
        self.around = around or (lambda layer, x: layer(x))

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.around(layer, x)
        return self.head(self.norm(x))


TOKENS = torch.arange(6) % 8
FORWARD = ["forward embedding", "forward layer 0", "forward layer 1", "forward output"]
BACKWARD = ["backward output", "backward layer 1", "backward layer 0", "backward embedding"]


class Listener:
    """Notes what it is told as text, ``{`` where a call begins and ``}`` where it ends."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.calls: list[Call] = []
        self.fail = False

    def step_begin(self, step: int) -> None:
        raise AssertionError("the session tells of steps, not the engine")

    def begin(self, call: Call) -> None:
        if self.fail:
            raise OSError("broken")
        self.heard.append(f"{_text(call)} {{")
        self.calls.append(call)

    def end(self, call: Call) -> None:
        self.heard.append(f"{_text(call)} }}")

    def in_order(self) -> list[str]:
        """Calls that follow each other without overlap."""
        for begin, end in zip(self.heard[::2], self.heard[1::2], strict=True):
            assert begin[:-1] == end[:-1], self.heard
            assert (begin[-1], end[-1]) == ("{", "}"), self.heard
        return [begin[:-2] for begin in self.heard[::2] if not begin.startswith("optimizer")]


class Trained:
    """A model trained under an engine, step by step."""

    def __init__(self, model: nn.Module, granularity: Granularity = "layer", found: bool = True, **more: Any) -> None:
        """``found``: a first step has been made, and forgotten."""
        self.listener = Listener()
        self.engine = PlainEngine(self.listener, granularity=granularity, **more)
        self.engine.install()
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if found:
            self.step()
            self.listener.heard.clear()
            self.listener.calls.clear()

    def step(self, microbatches: int = 1, inputs: Any = TOKENS) -> float:
        """Forward and backward passes and the optimizer; the loss."""
        self.engine.step_begin()
        total = 0.0
        for _ in range(microbatches):
            output = self.model(inputs)
            loss = output.square().mean()
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def hooks_of(model: nn.Module) -> list[Any]:
    """All forward hooks in a model, and calls that were replaced."""
    return [
        hook
        for module in model.modules()
        for hook in (
            *module._forward_hooks.values(),
            *module._forward_pre_hooks.values(),
            *module._forward_hooks_always_called.values(),
            *(replaced for name, replaced in vars(module).items() if name == "_compiled_call_impl"),
        )
    ]


def _text(call: Call) -> str:
    return f"{call.kind} {call.name}" + (f" {call.layer}" if call.layer >= 0 else "")
