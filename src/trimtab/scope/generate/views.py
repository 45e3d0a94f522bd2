"""What is looked at in a model while it answers: attention rows, hidden states, and what each layer would say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.scope.device.attention import AttentionState, measure_attention
from trimtab.scope.generate.model import LanguageModel
from trimtab.scope.generate.result import Components, Hidden
from trimtab.scope.moment import Moment
from trimtab.scope.subscription import MOST_RAW_BYTES, Subscription, numbers
from trimtab.scope.taps.points import AttentionInput
from trimtab.scope.vector import vector_of

ALL: Final = "all"
_COMPONENTS: Final = 3
_OUTPUT: Final = ".output"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be looked at."""

    attention: tuple[tuple[int, int], ...] = ()
    """(layer, head)."""
    hidden: bool = False
    lens: bool = False


def heads_of(texts: list[str], layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """From ``LAYERS/HEADS`` (``17/5``, ``0-3/all``, ``17``); raises ValueError for what the model does not have."""
    found: dict[tuple[int, int], None] = {}
    for text in texts:
        of_layer, slash, of_head = text.partition("/")
        chosen = _chosen(of_layer, layers, text), _chosen(of_head if slash else ALL, heads, text)
        for layer in chosen[0]:
            found |= dict.fromkeys((layer, head) for head in chosen[1])
    return tuple(found)


def _chosen(text: str, count: int, whole: str) -> tuple[int, ...]:
    if text in (ALL, "*"):
        return tuple(range(count))
    chosen = numbers(text, f"--attention {whole!r}: LAYERS/HEADS")
    if any(number >= count for number in chosen):
        raise ValueError(f"--attention {whole!r}: the model has only 0 to {count - 1}")
    return chosen


class Views:
    """Connected to a model, it sees what each step brings."""

    def __init__(self, model: LanguageModel, wanted: Wanted) -> None:
        self._model = model
        self._wanted = wanted
        self._maps: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._kept: dict[int, list[torch.Tensor]] = {}
        """Hidden states of all tokens, by layer."""
        self._undo: list[Callable[[], None]] = []
        of_layers = {layer for layer, _ in wanted.attention}
        for point in model.points.attention:
            if point.tap.layer in of_layers:
                self._undo.append(point.connect(self._attention(point.tap.layer)))
        if wanted.hidden or wanted.lens:
            for point in model.points.points:
                if point.tap.name == f"layers.{point.tap.layer}{_OUTPUT}":
                    self._undo.append(point.connect(self._hidden(point.tap.layer, point.tap.labels)))

    def close(self) -> None:
        """Disconnect."""
        while self._undo:
            self._undo.pop()()

    def attention(self) -> dict[tuple[int, int], NDArray[np.float32]]:
        """Of the step that was made last."""
        maps, self._maps = self._maps, {}
        whole = {layer: self._model.gather_heads(rows).float().cpu().numpy() for layer, rows in sorted(maps.items())}
        return {(layer, head): whole[layer][head] for layer, head in self._wanted.attention if layer in whole}

    def outputs(self) -> dict[int, torch.Tensor]:
        """Hidden states (tokens, h) after each layer, of the step that was made last."""
        outputs, self._outputs = self._outputs, {}
        if self._wanted.hidden:
            for layer, states in outputs.items():
                self._kept.setdefault(layer, []).append(states.float().cpu())
        return dict(sorted(outputs.items()))

    def components(self) -> tuple[Components, ...]:
        """Of all steps so far."""
        return tuple(principal(layer, torch.cat(parts)) for layer, parts in sorted(self._kept.items()))

    def _attention(self, layer: int) -> Callable[[AttentionInput, Moment], None]:
        state = AttentionState()

        def receive(inputs: AttentionInput, moment: Moment) -> None:
            queries, keys = inputs.q.shape[2], inputs.k.shape[2]
            fits = 4 * inputs.q.shape[1] * queries * keys <= MOST_RAW_BYTES
            rows = range(queries) if moment.step == 0 and fits else (queries - 1,)
            wish = Subscription(f"layers.{layer}.attention.map", "attention", parameters={"rows": rows})
            with torch.no_grad():
                self._maps[layer] = measure_attention(inputs, wish, state)["probabilities"]

        return receive

    def _hidden(self, layer: int, labels: tuple[str, ...]) -> Callable[[torch.Tensor, Moment], None]:
        batch = labels.index("b")

        def receive(x: torch.Tensor, moment: Moment) -> None:
            states = x.detach().select(batch, 0)
            self._outputs[layer] = states if moment.step == 0 else states[-1:]

        return receive


def hidden_of(layer: int, states: torch.Tensor) -> Hidden:
    """Of the last token of (tokens, h)."""
    return Hidden(layer, vector_of(states[-1].double().cpu().numpy()))


def principal(layer: int, states: torch.Tensor) -> Components:
    """Principal components of (tokens, h). Each axis points to where its largest weight is positive."""
    centred = states.double() - states.double().mean(0)
    count = min(_COMPONENTS, *centred.shape)
    if not torch.isfinite(centred).all():
        nothing = np.full((len(states), count), np.nan, np.float32)
        return Components(layer, nothing, (float("nan"),) * count)
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    largest = right.abs().argmax(1, keepdim=True)
    sign = right.gather(1, largest)[:, 0].sign()
    total = values.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    coordinates = (left * values * sign)[:, :count].float().numpy()
    return Components(layer, coordinates, tuple((values.square() / total)[:count].tolist()))
