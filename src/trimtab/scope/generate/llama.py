"""Llama in plain PyTorch, to look into: grouped queries, interleaved rotary positions, RMSNorm, SwiGLU, a KV cache.

The weights are those of a GGUF file, in its layout: its rotary embedding turns pairs of neighbours (2i, 2i + 1), not
halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from trimtab.scope.generate.gguf_file import GgufFile
from trimtab.scope.generate.taps import OwnAttentionPoint, OwnPoint, Taps
from trimtab.scope.names import Tap
from trimtab.scope.taps.points import AttentionInput, ModelPoints

Take = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Gives the weight of that name in GGUF, which has to be of that shape."""
_TAPS: Final = (
    "input", "attention.input", "attention.core", "attention.output", "residual", "mlp.hidden", "mlp.output", "output",
)  # fmt: skip
"""Of a block, (b, s, h) each."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    context: int
    """Tokens that it was trained to look back."""
    rotary: int
    """Of a head's ``head_size`` values, how many are turned by the position."""
    base: float
    epsilon: float
    scale: float = 1.0
    """Positions are divided by it (linear scaling)."""

    @classmethod
    def of(cls, file: GgufFile) -> Shape:
        """From a header. Raises ValueError for another architecture, and for what is not known here."""
        kind = file.values.get("general.architecture")
        if kind != "llama":
            raise ValueError(f"{file.path}: a model of the architecture {kind}; only llama is known here")
        if file.number("llama.expert_count", 0):
            raise ValueError(f"{file.path}: a mixture of experts, which is not known here; give a dense model")
        scaling = file.values.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ValueError(f"{file.path}: rotary positions scaled by {scaling}, which is not known here")
        hidden, heads = file.count("llama.embedding_length"), file.count("llama.attention.head_count")
        head_size = file.count("llama.attention.key_length", hidden // heads)
        tokens = file.values.get("tokenizer.ggml.tokens")
        shape = cls(
            layers=file.count("llama.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=file.count("llama.attention.head_count_kv", heads),
            head_size=head_size,
            mlp=file.count("llama.feed_forward_length"),
            vocabulary=file.count("llama.vocab_size", len(tokens) if isinstance(tokens, list) else None),
            context=file.count("llama.context_length"),
            rotary=file.count("llama.rope.dimension_count", head_size),
            base=file.number("llama.rope.freq_base", 10_000.0),
            epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
            scale=file.number("llama.rope.scaling.factor", 1.0) if scaling == "linear" else 1.0,
        )
        if shape.heads % shape.kv_heads or shape.rotary % 2 or shape.rotary > shape.head_size:
            raise ValueError(f"{file.path}: {heads} heads, {shape.kv_heads} of keys; the file is damaged")
        return shape


class Cache:
    """Keys and values of the tokens so far."""

    def __init__(self, shape: Shape, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        """``capacity``: the most tokens that it will hold."""
        size = (shape.layers, 2, 1, shape.kv_heads, capacity, shape.head_size)
        self._kept = torch.empty(size, device=device, dtype=dtype)
        self.length = 0

    @property
    def capacity(self) -> int:
        """The most tokens that it holds."""
        return self._kept.shape[4]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put (1, heads, s, d) behind what is there; all of the layer's keys and values. ``length`` stays."""
        begin, end = self.length, self.length + k.shape[2]
        kept = self._kept[layer]
        kept[0, :, :, begin:end], kept[1, :, :, begin:end] = k, v
        return kept[0, :, :, :end], kept[1, :, :, :end]


class Rotary:
    """Positions as angles by which pairs of neighbours are turned."""

    def __init__(self, shape: Shape, factors: torch.Tensor | None, device: torch.device) -> None:
        """``factors`` (rotary / 2,) divide the frequencies (Llama 3.1)."""
        pairs = torch.arange(0, shape.rotary, 2, dtype=torch.float64)
        frequencies = shape.base ** (-pairs / shape.rotary) / shape.scale
        if factors is not None:
            frequencies = frequencies / factors.cpu().double()
        self.size = shape.rotary
        self._frequencies = frequencies.float().to(device)

    def angles(self, begin: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine (count, rotary / 2), float32."""
        positions = torch.arange(begin, begin + count, device=self._frequencies.device, dtype=torch.float32)
        turned = torch.outer(positions, self._frequencies)
        return turned.cos(), turned.sin()

    def __call__(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Turn (b, heads, s, d)."""
        cosine, sine = angles
        even, odd = x[..., : self.size].float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2).to(x.dtype)
        return torch.cat((turned, x[..., self.size :]), -1) if self.size < x.shape[-1] else turned


class Linear(nn.Module):
    """Without a bias. PyTorch's own would fill its weight with random numbers first, or need its meta device, whose
    import takes longer than a model takes to load."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self._epsilon)


class Block(nn.Module):
    """A layer."""

    def __init__(self, shape: Shape, number: int, taps: Taps, rotary: Rotary, take: Take) -> None:
        super().__init__()
        self._shape, self._number, self._taps, self._rotary = shape, number, taps, rotary
        hidden, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size

        def linear(name: str, rows: int, columns: int) -> Linear:
            return Linear(take(f"blk.{number}.{name}.weight", (rows, columns)))

        def norm(name: str) -> Norm:
            return Norm(take(f"blk.{number}.{name}.weight", (hidden,)), shape.epsilon)

        self.attention_norm = norm("attn_norm")
        self.q = linear("attn_q", queries, hidden)
        self.k = linear("attn_k", keys, hidden)
        self.v = linear("attn_v", keys, hidden)
        self.output = linear("attn_output", hidden, queries)
        self.mlp_norm = norm("ffn_norm")
        self.gate = linear("ffn_gate", shape.mlp, hidden)
        self.up = linear("ffn_up", shape.mlp, hidden)
        self.down = linear("ffn_down", hidden, shape.mlp)

    def forward(self, x: torch.Tensor, cache: Cache, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(1, s, h) to (1, s, h)."""
        tap, name = self._taps, f"layers.{self._number}"
        x = tap(f"{name}.input", x)
        x = tap(f"{name}.residual", x + self._attention(self.attention_norm(x), cache, angles))
        inner = self.mlp_norm(x)
        inner = tap(f"{name}.mlp.hidden", functional.silu(self.gate(inner)) * self.up(inner))
        return tap(f"{name}.output", x + tap(f"{name}.mlp.output", self.down(inner)))

    def _attention(self, x: torch.Tensor, cache: Cache, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tap, name, size = self._taps, f"layers.{self._number}.attention", self._shape.head_size
        x = tap(f"{name}.input", x)
        q, k, v = (part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q = tap(f"{name}.q", self._rotary(q, angles))
        k = tap(f"{name}.k", self._rotary(k, angles))
        keys, values = cache.append(self._number, k, tap(f"{name}.v", v))
        if tap.wanted(f"{name}.map"):
            tap.attention(f"{name}.map", AttentionInput(q, keys, scale=1 / math.sqrt(size)))
        core = _attend(q, keys, values)
        core = tap(f"{name}.core", core.transpose(1, 2).flatten(2))
        return tap(f"{name}.output", self.output(core))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last tokens (1, heads, s, d) to all of them (1, kv heads, S, d)."""
    new, length = q.shape[2], k.shape[2]
    mask = None
    if 1 < new < length:
        mask = torch.ones(new, length, dtype=torch.bool, device=q.device).tril(length - new)
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=new == length > 1, enable_gqa=True
    )


class Llama(nn.Module):
    """The model. Its taps are those of :mod:`trimtab.scope.names`."""

    def __init__(self, shape: Shape, take: Take, *, tied: bool, factors: torch.Tensor | None = None) -> None:
        """``take`` gives each weight. ``tied``: the head's are those of the embedding."""
        super().__init__()
        self.shape = shape
        self.tied = tied
        self.taps = Taps()
        table = (shape.vocabulary, shape.hidden)
        self.embedding = Linear(take("token_embd.weight", table))
        rotary = Rotary(shape, factors, self.embedding.weight.device)
        self._rotary = rotary
        self.layers = nn.ModuleList(Block(shape, number, self.taps, rotary, take) for number in range(shape.layers))
        self.norm = Norm(take("output_norm.weight", (shape.hidden,)), shape.epsilon)
        self.head = self.embedding if tied else Linear(take("output.weight", table))

    def forward(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Logits (1, vocabulary) after the last of ``tokens`` (1, s), which follow those in the cache."""
        x = self.taps("embedding.output", functional.embedding(tokens, self.embedding.weight))
        angles = self._rotary.angles(cache.length, tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cache, angles)
        cache.length += tokens.shape[1]
        x = self.taps("final_norm.output", self.norm(x[:, -1:]))
        return self.taps("logits", self.head(x))[:, -1]

    def points(self) -> ModelPoints:
        """What can be seen and disturbed."""
        shape = self.shape
        points = [self._point("embedding.output", ("b", "s", "h"))]
        attention: list[OwnAttentionPoint] = []
        for layer in range(shape.layers):
            of = f"layers.{layer}"
            points += [self._point(f"{of}.{name}", ("b", "s", "h"), layer) for name in _TAPS]
            for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
                points.append(self._point(f"{of}.attention.{name}", ("b", "n", "s", "d"), layer, heads))
            seen = self._point(f"{of}.attention.map", ("b", "n", "s", "d"), layer, shape.heads)
            attention.append(OwnAttentionPoint(replace(seen.tap, kind="attention"), self.taps))
        points.append(self._point("final_norm.output", ("b", "s", "h")))
        points.append(self._point("logits", ("b", "s", "v")))
        return ModelPoints(points, attention)

    def _point(self, name: str, labels: tuple[str, ...], layer: int = -1, heads: int | None = None) -> OwnPoint:
        dtype = str(self.embedding.weight.dtype).removeprefix("torch.")
        of = None if heads is None else (0, heads, heads)
        return OwnPoint(Tap(name, "activation", labels, dtype=dtype, layer=layer, heads=of), self.taps)


def load(file: GgufFile, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Llama:
    """The model in a GGUF file. Raises ValueError for an architecture other than llama, and for a damaged file."""
    shape = Shape.of(file)
    left = set(file.tensors)

    def take(name: str, expected: tuple[int, ...]) -> torch.Tensor:
        values = torch.from_numpy(file.tensor(name))
        if tuple(values.shape) != expected:
            raise ValueError(f"{file.path}: {name} is of shape {tuple(values.shape)}, not {expected}; it is damaged")
        left.discard(name)
        return values.to(device=device, dtype=dtype)

    factors = take("rope_freqs.weight", (shape.rotary // 2,)) if "rope_freqs.weight" in left else None
    model = Llama(shape, take, tied="output.weight" not in left, factors=factors)
    if left:
        raise ValueError(f"{file.path}: a llama with {min(left)}, which is not known here")
    return model.eval()
