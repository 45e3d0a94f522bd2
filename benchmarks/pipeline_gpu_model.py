"""The Llama-like model of the pipeline benchmarks on GPUs, and the part of it that a stage holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of what is run."""

    layers: int = 2
    """A stage's."""
    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    groups: int = 8
    """Heads of keys and values."""
    vocabulary: int = 32000
    sequence: int = 4096
    microbatches: tuple[int, ...] = (8, 16)


TINY = Sizes(layers=2, hidden=64, inner=96, heads=4, groups=2, vocabulary=128, sequence=32, microbatches=(4,))


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.groups, self.size = sizes.heads, sizes.groups, sizes.hidden // sizes.heads
        self.q = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k = nn.Linear(sizes.hidden, self.groups * self.size, bias=False)
        self.v = nn.Linear(sizes.hidden, self.groups * self.size, bias=False)
        self.o = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden), the same out."""
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Layer(nn.Module):
    """Pre-norm, attention, SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(sizes.hidden), nn.RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.gate = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """(batch, sequence, hidden), the same out."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    """Norm and logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to (batch, sequence, vocabulary)."""
        return self.output(self.norm(x))


class Part(nn.Module):
    """One position of the model."""

    def __init__(self, layers: Sequence[nn.Module], embedding: nn.Module | None, head: nn.Module | None) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = embedding, nn.ModuleList(layers), head
        self.tables: tuple[Tensor, Tensor]
        self.disturb: Callable[[Tensor], Tensor] | None = None
        """What stands before the layers, such as an emulated slow device."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states to hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        if self.disturb is not None:
            x = self.disturb(x)
        for layer in self.layers:
            x = layer(x, *self.tables)
        return x if self.head is None else self.head(x)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model:
    """This stage's modules, which all cases share: each lays other layers of the model on them.

    A stage has the layers of all its positions together, and an embedding and a head, used or not. ``owned``, the
    positions that it has in a case, are as many as its chunks.
    """

    def __init__(self, sizes: Sizes, stages: int, device: torch.device) -> None:
        self.sizes, self.stages, self.device = sizes, stages, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.device(device):
            self.layers = [Layer(sizes).to(self.dtype) for _ in range(sizes.layers)]
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden).to(self.dtype)
            self.head = Head(sizes).to(self.dtype)
        self.tables = _rotary(sizes, device, self.dtype)
        self.named: dict[str, nn.Module] = {}

    def parts(self, owned: Sequence[int]) -> list[Part]:
        """The chunks of a case."""
        each = self.sizes.layers // len(owned)
        parts: list[Part] = []
        for chunk, position in enumerate(owned):
            first, last = position == 0, position == self.stages * len(owned) - 1
            mine = self.layers[chunk * each : (chunk + 1) * each]
            part = Part(mine, self.embedding if first else None, self.head if last else None)
            part.tables = self.tables
            parts.append(part)
        return parts

    def fill(self, owned: Sequence[int]) -> None:
        """The weights that the model has there, and no gradients."""
        each = self.sizes.layers // len(owned)
        self.named = {"embedding": self.embedding, "head": self.head}
        for chunk, position in enumerate(owned):
            for number in range(each):
                self.named[f"layer {position * each + number}"] = self.layers[chunk * each + number]
        for name, module in self.named.items():
            seed = {"embedding": 1, "head": 2}.get(name) or 10 + int(name.split()[1])
            generator = torch.Generator(self.device).manual_seed(seed)
            for parameter in module.parameters():
                parameter.grad = None
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, 0.0, 0.02, generator)

    def gradients(self) -> dict[str, int]:
        """A number for each part's gradients that differs if a bit does."""
        found: dict[str, int] = {}
        for name, module in self.named.items():
            gradients = [parameter.grad for parameter in module.parameters()]
            if all(gradient is not None for gradient in gradients):
                found[name] = sum(
                    _digest(gradient) * (5 + n) for n, gradient in enumerate(gradients) if gradient is not None
                )
        return found

    def norms(self) -> dict[str, float]:
        """The norm of each part's gradients, for those whose bits may differ."""
        found: dict[str, float] = {}
        for name, module in self.named.items():
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            if gradients:
                found[name] = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
        return found


def _digest(tensor: Tensor) -> int:
    """Of the bits, each by its place; wraps around, as integers do."""
    bits = tensor.flatten().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = 0
    for number, block in enumerate(bits.split(1 << 24)):
        places = torch.arange(1, block.numel() + 1, device=block.device, dtype=torch.int32) % 65_521
        total += int((block.to(torch.int64) * places).sum()) * (number + 1)
    return total


def _rotary(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = sizes.hidden // sizes.heads // 2
    frequencies = 500_000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(sizes.sequence, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
