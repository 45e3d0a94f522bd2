"""Activations and their gradients, core attentions and parameters of a model chunk.

Recognised by Megatron-Core's names for its modules, which are the same with local layers and with Transformer
Engine's. Where the two differ is what an input means: Transformer Engine's linear layers have the norm inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, TypeGuard

import torch

from trimtab.engines.megatron_scope.attention import MegatronAttention, has_plain_softmax
from trimtab.engines.megatron_scope.parameters import dtype_name, held_parameters, layer_numbers
from trimtab.engines.megatron_scope.place import Place, find_place, unwrap
from trimtab.scope.names import Shard, Tap, gradient_name, layer_name
from trimtab.scope.taps.activations import ActivationPoint, GradientPoint
from trimtab.scope.taps.points import ModelPoints, Point, StatePoint
from trimtab.scope.taps.sources import InputSource, MethodSource, OutputSource, Source
from trimtab.scope.taps.state import ParameterGradientPoint, ParameterPoint
from trimtab.scope.taps.where import Aside, Where

_DECODER: Final = "decoder.layers"
_HIDDEN: Final = ("s", "b", "h")
_HEADS: Final = ("s", "b", "n", "d")


def megatron_points(chunk: int, model: torch.nn.Module, where: Where) -> ModelPoints:
    """What a model chunk offers on this rank, in its wrappers or without. Hooks nothing."""
    return _Builder(chunk, unwrap(model), where).build(model)


class _Builder:
    def __init__(self, chunk: int, model: Any, where: Where) -> None:
        self._chunk = chunk
        self._model = model
        self._where = where
        self._aside = Aside()
        self._place: Place = find_place()
        self._config = getattr(model, "config", None)
        self._tokens = self._place.tokens(bool(getattr(self._config, "sequence_parallel", False)))
        self._dtype = dtype_name(getattr(self._config, "params_dtype", torch.float32))
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._points: list[Point] = []
        self._attention: list[MegatronAttention] = []

    def build(self, wrapped: Any) -> ModelPoints:
        model = self._model
        embedding = getattr(model, "embedding", None)
        if isinstance(embedding, torch.nn.Module):
            self._hidden("embedding.output", OutputSource(embedding, self._aside), embedding)
        for path, number in _main_layers(model):
            self._layer(number, model.get_submodule(path))
        norm = getattr(getattr(model, "decoder", None), "final_layernorm", None)
        if is_real(norm):
            self._hidden("final_norm.output", OutputSource(norm, self._aside), norm)
        self._head()
        return ModelPoints(self._points, self._attention, list(self._state(wrapped)))

    def _head(self) -> None:
        model, aside = self._model, self._aside
        output = getattr(model, "output_layer", None)
        if not is_real(output) or not getattr(model, "post_process", True):
            return
        if not getattr(model, "fuse_linear_cross_entropy", False):  # else the layer returns losses
            gathered = not getattr(model, "parallel_output", True)
            spread = self._place.tokens(False) if gathered else self._place.columns()
            self._add("logits", ("s", "b", "v"), OutputSource(output, aside), output, spread)
        losses = OutputSource(model, aside, accept=lambda tensor: tensor.dim() == 2)  # with labels: (b, s)
        self._add("loss", ("b", "s"), losses, model, self._place.tokens(False))

    # ------------------------------------------------------------------ layers

    def _layer(self, number: int, layer: Any) -> None:
        """One block, in the order of its forward."""
        aside = self._aside
        self._hidden(layer_name(number, "input"), InputSource(layer, aside, 0, "hidden_states"), layer, number)
        attention = getattr(layer, "self_attention", None)
        if is_real(attention):
            self._attention_of(number, attention)
            self._residual(number, layer)
        mlp = getattr(layer, "mlp", None)
        if is_real(mlp):
            self._mlp(number, mlp)
        self._hidden(layer_name(number, "output"), OutputSource(layer, aside), layer, number)

    def _residual(self, number: int, layer: Any) -> None:
        """After the attention's bias, dropout and add, which are functions. What follows them are a cross attention
        (in a decoder an identity, through which both the residual and the MLP's branch go) and the MLP's norm."""
        name, aside = layer_name(number, "residual"), self._aside
        cross, norm = getattr(layer, "cross_attention", None), getattr(layer, "pre_mlp_layernorm", None)
        if isinstance(cross, torch.nn.Module) and not is_real(cross):
            self._hidden(name, OutputSource(cross, aside), cross, number)
        elif isinstance(norm, torch.nn.Module):
            self._hidden(name, InputSource(norm, aside, 0, "hidden_states"), norm, number)

    def _attention_of(self, number: int, attention: Any) -> None:
        aside = self._aside
        source = InputSource(attention, aside, 0, "hidden_states")
        self._hidden(layer_name(number, "attention.input"), source, attention, number)
        core = getattr(attention, "core_attention", None)
        if is_real(core):
            self._core(number, attention, core)
        source = OutputSource(attention, aside)
        self._hidden(layer_name(number, "attention.output"), source, attention, number)

    def _core(self, number: int, attention: Any, core: Any) -> None:
        """Queries, keys and values come apart and turned by their positions as its arguments, whatever the layout of
        the projection was (Megatron-Core's is by query group)."""
        place, aside, config = self._place, self._aside, attention.config
        queries = config.num_attention_heads
        each = queries // place.tp[1]
        heads = (place.tp[0] * each, each, queries)
        latent = bool(getattr(config, "multi_latent_attention", False))
        total = queries if latent else (getattr(config, "num_query_groups", None) or queries)
        group_shard, replica, first = place.groups(total)
        groups = (first, max(total // place.tp[1], 1), total)
        for index, (letter, name) in enumerate((("q", "query"), ("k", "key"), ("v", "value"))):
            self._add(
                layer_name(number, f"attention.{letter}"),
                _HEADS,
                InputSource(core, aside, index, name),
                core,
                place.columns() if letter == "q" else (group_shard, replica),
                number,
                heads if letter == "q" else groups,
            )
        output = OutputSource(core, aside)
        self._add(
            layer_name(number, "attention.core"), _HEADS, output, core, place.columns(), number, heads, split=each
        )
        if has_plain_softmax(core):
            tap = self._tap(layer_name(number, "attention.map"), _HEADS, core, place.columns(), number, heads)
            tap = replace(tap, kind="attention")
            self._attention.append(MegatronAttention(tap, core, self._where, aside, place.cp))

    def _mlp(self, number: int, mlp: Any) -> None:
        aside = self._aside
        router = getattr(mlp, "router", None)
        if is_real(router):
            name = layer_name(number, "router.logits")
            self._add(name, ("s", "b", "e"), MethodSource(router, aside, "gating"), router, self._tokens, number)
            name = layer_name(number, "router.probabilities")
            self._add(name, ("t", "e"), OutputSource(router, aside), router, self._tokens, number)
        last = getattr(mlp, "linear_fc2", None)
        if isinstance(last, torch.nn.Module):
            source = InputSource(last, aside)
            name = layer_name(number, "mlp.hidden")
            self._add(name, ("s", "b", "f"), source, last, self._place.columns(), number)
        self._hidden(layer_name(number, "mlp.output"), OutputSource(mlp, aside), mlp, number)

    # ------------------------------------------------------------------ making

    def _hidden(self, name: str, source: Source, module: Any, layer: int = -1) -> None:
        self._add(name, _HIDDEN, source, module, self._tokens, layer)

    def _add(
        self,
        name: str,
        labels: tuple[str, ...],
        source: Source,
        module: Any,
        spread: tuple[Shard, int],
        layer: int = -1,
        heads: tuple[int, int, int] | None = None,
        split: int = 0,
    ) -> None:
        """A tensor and its gradient. ``split``: its last dimension is shown as that many heads."""
        tap = self._tap(name, labels, module, spread, layer, heads)
        of_gradient = replace(tap, name=gradient_name(name), kind="gradient")
        self._points.append(ActivationPoint(tap, source, self._where, split))
        self._points.append(GradientPoint(of_gradient, source, self._where, self._aside, split))

    def _tap(
        self,
        name: str,
        labels: tuple[str, ...],
        module: Any,
        spread: tuple[Shard, int],
        layer: int,
        heads: tuple[int, int, int] | None,
    ) -> Tap:
        return Tap(
            name=name,
            kind="activation",
            labels=labels,
            dtype=self._dtype,
            shard=spread[0],
            replica=spread[1],
            layer=layer,
            heads=heads,
            module=self._paths.get(id(module), ""),
            chunk=self._chunk,
        )

    def _state(self, wrapped: Any) -> Iterator[StatePoint]:
        """Parameters. With a distributed optimizer their gradients are known when it is: a rank's is a part."""
        sharded = getattr(getattr(wrapped, "ddp_config", None), "use_distributed_optimizer", False)
        for held in held_parameters(self._chunk, self._model, self._place):
            name = f"parameters.{held.path}"
            yield ParameterPoint(held.tap(name, "parameter"), held.parameter)
            if held.parameter.requires_grad and not sharded:
                gradient = getattr(held.parameter, "main_grad", None)
                dtype = gradient.dtype if isinstance(gradient, torch.Tensor) else None
                yield ParameterGradientPoint(held.tap(gradient_name(name), "gradient", dtype), held.parameter)


def _main_layers(model: torch.nn.Module) -> list[tuple[str, int]]:
    """Path and number of the layers that are called ``layers.<n>``: the decoder's, else those that come first."""
    numbers = layer_numbers(model)
    lists = list(dict.fromkeys(path.rpartition(".")[0] for path in numbers))
    if not lists:
        return []
    chosen = _DECODER if _DECODER in lists else lists[0]
    return [(path, number) for path, number in numbers.items() if path.rpartition(".")[0] == chosen]


def is_real(module: Any) -> TypeGuard[torch.nn.Module]:
    """A module that computes something; Megatron-Core fills gaps with identities."""
    return isinstance(module, torch.nn.Module) and not type(module).__name__.startswith("Identity")
