"""Models as Hugging Face writes them, and a plain job with somebody in the place of scope who connects every tap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from plain_models import Listener
from torch import nn

from trimtab.engines.plain import PlainEngine
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.taps.points import AttentionInput, ModelPoints

HIDDEN, HEADS, GROUPS, LENGTH, WORDS = 16, 4, 2, 6, 32
SIZE = HIDDEN // HEADS


class LlamaAttention(nn.Module):
    """Grouped queries; keeps what a tap should have seen."""

    def __init__(self, config: Any, repeats: bool) -> None:
        super().__init__()
        self.config = config
        self.repeats = repeats
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, GROUPS * SIZE, bias=False)
        self.v_proj = nn.Linear(HIDDEN, GROUPS * SIZE, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None) -> Any:
        batch, length, _ = hidden_states.shape

        def heads(x: torch.Tensor) -> torch.Tensor:
            return x.view(batch, length, -1, SIZE).transpose(1, 2)

        q, k, v = (heads(part(hidden_states)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = q * position_embeddings, k * position_embeddings
        if self.repeats:
            k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        core = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeats)
        output = self.o_proj(core.transpose(1, 2).reshape(batch, length, -1))
        if not torch.compiler.is_compiling():
            self.kept = {"attention.q": q, "attention.k": k, "attention.v": v, "attention.core": core}
        return output, None


class LlamaMLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    """Called by keywords, answers with a tuple."""

    def __init__(self, config: Any, repeats: bool) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, repeats)
        self.mlp = LlamaMLP()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None) -> Any:
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, position_embeddings=position_embeddings)[0]
        return (hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)),)


class LlamaModel(nn.Module):
    """Without the head. ``around`` says how a layer is called."""

    def __init__(self, config: Any, repeats: bool, around: Callable[..., Any] | None, layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, repeats) for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.around = around or (lambda layer, x, turn: layer(hidden_states=x, position_embeddings=turn))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        turn = torch.linspace(0.5, 1.5, LENGTH, dtype=x.dtype)[:, None]
        for layer in self.layers:
            x = self.around(layer, x, turn)[0]
        return self.norm(x)


class Llama(nn.Module):
    """Logits, or the loss with them."""

    def __init__(self, repeats: bool = False, around: Callable[..., Any] | None = None, layers: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=GROUPS)
        self.model = LlamaModel(self.config, repeats, around, layers)
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.lm_head(self.model(input_ids=input_ids))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens(seed: int = 0) -> torch.Tensor:
    """A batch of (2, LENGTH)."""
    return torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


class Scope:
    """In the place of a session of scope: connects what it is shown at the begin of the next step."""

    def __init__(self, compiled: bool = False) -> None:
        self.job = SimpleNamespace(chunks=[], config=SimpleNamespace(compiled_taps=compiled))
        self.position: Any = None
        self.coordinates: dict[str, int] = {}
        self.offered = ModelPoints()
        self.state: dict[str, Any] = {}
        self.seen: dict[str, list[tuple[Moment, torch.Tensor]]] = {}
        self.attended: list[tuple[str, Moment, AttentionInput]] = []
        self.receive: dict[str, Callable[[torch.Tensor, Moment], Any]] = {}
        """In place of keeping, by the tap's name."""
        self._undo: list[Callable[[], None]] = []

    def meet(self, _chunk: int, points: ModelPoints, model: nn.Module) -> None:
        self.offered = points
        self.job.chunks.append(model)
        self.state |= {point.tap.name: point for point in points.state}

    def meet_optimizer(self, _optimizer: Any, points: Sequence[Any]) -> None:
        self.state |= {point.tap.name: point for point in points}

    def optimizer_begin(self) -> None: ...

    def step_aside(self, subject: str, error: Exception) -> None:
        raise AssertionError(subject) from error

    def __getattr__(self, name: str) -> Any:
        """Whatever else an engine tells is passed over."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None

    @property
    def taps(self) -> dict[str, Tap]:
        return {point.tap.name: point.tap for point in (*self.offered.points, *self.offered.attention)}

    def connect(self, *names: str) -> None:
        """These taps, or all."""
        for point in self.offered.points:
            if not names or point.tap.name in names:
                self._undo.append(point.connect(self.receive.get(point.tap.name, self._keep(point.tap.name))))
        for point in self.offered.attention:
            if not names or point.tap.name in names:
                self._undo.append(point.connect(self._keep_attention(point.tap.name)))

    def disconnect(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _keep(self, name: str) -> Callable[[torch.Tensor, Moment], None]:
        def keep(tensor: torch.Tensor, moment: Moment) -> None:
            self.seen.setdefault(name, []).append((moment, tensor.detach().clone()))

        return keep

    def _keep_attention(self, name: str) -> Callable[[AttentionInput, Moment], None]:
        return lambda given, moment: self.attended.append((name, moment, given))


class Job:
    """A model trained under the plain engine, with scope and without records of layers."""

    def __init__(self, model: nn.Module, scope: Scope | None = None, met: bool = True) -> None:
        """``met``: the model is shown at once."""
        self.scope = scope or Scope()
        self.engine = PlainEngine(Listener(), granularity="step", scope=self.scope)  # pyright: ignore[reportArgumentType]
        self.engine.install()
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self._step = -1
        if met:
            self.engine.watch(model)

    def use(self, model: nn.Module) -> None:
        """Train this one from now on."""
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.engine.watch(model)

    def step(self, microbatches: int = 1, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> list[float]:
        """Losses of the microbatches of one step."""
        self._step += 1
        self.engine.step_begin(self._step)
        losses = []
        for number in range(microbatches):
            batch = tokens(10 * self._step + number)
            loss = self.model(batch, labels=batch.clone())["loss"] if forward is None else forward(batch)
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses
