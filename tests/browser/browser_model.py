"""A small GPT that shows whatever passes through it, by the names that scope gives; text to train it on.

Activations are (s, b, h) and heads (s, b, n, d), as in Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import nn

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCAB = 4, 32, 4, 24, 2, 128
SIZE = HIDDEN // HEADS
SCALE = SIZE**-0.5
TEXT = "the pipeline of stage one waits for stage two; rank three is slow and all others wait for it. " * 40
See = Callable[[str, torch.Tensor], torch.Tensor | None]
"""Gets a tensor by the name of its tap; another in return takes its place."""


class TinyGpt(nn.Module):
    """Four layers with rotary-free attention: positions are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, 1, HIDDEN) * 0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, see: See) -> torch.Tensor:
        """Logits (s, b, vocabulary) of ``tokens`` (s, b)."""
        x = seen(see, "embedding.output", self.embedding(tokens) + self.positions)
        for number, layer in enumerate(self.layers):
            x = layer(x, lambda part, tensor, number=number: see(f"layers.{number}.{part}", tensor))
        return seen(see, "logits", self.output(seen(see, "final_norm.output", self.norm(x))))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.projection = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, see: See) -> torch.Tensor:
        """``see`` knows the parts of this layer."""
        heads = self.qkv(self.norm(x)).view(LENGTH, -1, 3, HEADS, SIZE)
        q, k, v = (seen(see, f"attention.{name}", part) for name, part in zip("qkv", heads.unbind(2), strict=True))
        apart = [part.permute(1, 2, 0, 3) for part in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*apart, is_causal=True, scale=SCALE).permute(2, 0, 1, 3).flatten(2)
        x = seen(see, "residual", x + seen(see, "attention.output", self.projection(mixed)))
        hidden = seen(see, "mlp.hidden", F.gelu(self.up(self.mlp_norm(x))))
        return seen(see, "output", x + seen(see, "mlp.output", self.down(hidden)))


def seen(see: See, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or what takes its place."""
    changed = see(name, tensor)
    return tensor if changed is None else changed


def batch(step: int, replica: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), each (s, b): other text for each microbatch of each replica."""
    letters = torch.tensor([ord(letter) % VOCAB for letter in TEXT])
    starts = [(131 * step + 37 * replica + 17 * microbatch + 61 * number) % 3000 for number in range(BATCH)]
    rows = torch.stack([letters[start : start + LENGTH + 1] for start in starts], 1)
    return rows[:-1], rows[1:]
