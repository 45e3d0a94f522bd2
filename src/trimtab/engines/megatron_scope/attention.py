"""Core attention of Megatron-Core: what it is given, and by which rules it looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.engines.megatron_scope.place import Axis
from trimtab.scope.moment import Moment
from trimtab.scope.names import Tap
from trimtab.scope.taps.points import AttentionInput, Disconnect
from trimtab.scope.taps.where import Aside, Where, moment_of

_ARGUMENTS = ("query", "key", "value", "attention_mask", "attn_mask_type")


class MegatronAttention:
    """The core attention of one layer, by a pre-hook on it."""

    def __init__(self, tap: Tap, core: Any, where: Where, aside: Aside, cp: Axis) -> None:
        self.tap = tap
        self._core = core
        self._where = where
        self._aside = aside
        self._cp = cp

    def connect(self, receive: Callable[[AttentionInput, Moment], None]) -> Disconnect:
        """From now on ``receive`` gets what the core attention is given."""
        aside, where = self._aside, self._where

        def before(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not aside.working:
                return
            try:
                moment = moment_of(where)
                if moment is not None:
                    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
                    receive(self._input(core, given), moment)
            except Exception as error:
                aside.failed(self.tap.name, error)

        return self._core.register_forward_pre_hook(before, with_kwargs=True).remove

    def _input(self, core: Any, given: dict[str, Any]) -> AttentionInput:
        query, key, value = given["query"], given["key"], given["value"]
        packed = _packed(given.get("packed_seq_params"))
        kind = given.get("attn_mask_type") or getattr(core, "attn_mask_type", None)
        bias = given.get("attention_bias")
        return AttentionInput(
            q=_by_head(query),
            k=_by_head(key),
            v=_by_head(value),
            scale=scale_of(core, query.shape[-1]),
            causal="causal" in getattr(kind, "name", "causal"),
            window=window_of(core),
            softcap=getattr(core.config, "attn_logit_softcapping", None),
            mask=_mask(core, given.get("attention_mask"), query, key),
            packed=packed,
            context=(*self._cp, "zigzag") if self._cp[1] > 1 else None,
            group=_context_group() if self._cp[1] > 1 else None,
            head_offset=self.tap.heads[0] if self.tap.heads else 0,
            bias=bias if isinstance(bias, torch.Tensor) else None,
        )


def has_plain_softmax(core: Any) -> bool:
    """No sink and no offset in its softmax: then scores alone give the probabilities."""
    return getattr(core.config, "softmax_type", "vanilla") == "vanilla"


def scale_of(core: Any, head_size: int) -> float:
    """What scores are multiplied with. Megatron-Core's own attention divides it by the layer's number and multiplies
    again in the softmax, if ``apply_query_key_layer_scaling`` says so."""
    scale = getattr(core, "softmax_scale", None)
    if not isinstance(scale, (int, float)):
        scale = getattr(core.config, "softmax_scale", None)
    if not isinstance(scale, (int, float)):
        return head_size**-0.5
    again = getattr(getattr(core, "scale_mask_softmax", None), "scale", None)
    return float(scale) * (float(again) if isinstance(again, (int, float)) else 1.0)


def window_of(core: Any) -> tuple[int, int] | None:
    """Sliding window of this layer; None where it sees all."""
    window = getattr(core.config, "window_size", None)
    if window is None:
        return None
    frequency = getattr(core.config, "window_attn_skip_freq", None)
    if frequency is not None:
        from megatron.core.transformer.utils import is_layer_window_attention

        if not is_layer_window_attention(window, frequency, core.layer_number):
            return None
    return int(window[0]), int(window[1])


def _context_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def _by_head(tensor: torch.Tensor) -> torch.Tensor:
    """(s, b, heads, d) or packed (t, heads, d) as a view (b, heads, s, d)."""
    return tensor.permute(1, 2, 0, 3) if tensor.dim() == 4 else tensor.permute(1, 0, 2)[None]


def _mask(core: Any, mask: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The job's mask; its fused kernels look at it only where they are not causal."""
    if not isinstance(mask, torch.Tensor) or query.dim() != 4:
        return None
    softmax = getattr(core, "scale_mask_softmax", None)
    if softmax is None:  # Transformer Engine: only where the kind says so
        kind = getattr(getattr(core, "attn_mask_type", None), "name", "")
        return mask if kind in ("padding", "arbitrary", "padding_causal") else None
    fused = softmax.is_kernel_available(mask, query.shape[1], query.shape[2], query.shape[0], key.shape[0])
    return None if fused and "causal" in softmax.attn_mask_type.name else mask


def _packed(parameters: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    if parameters is None or getattr(parameters, "qkv_format", "thd") != "thd":
        return None
    lengths = []
    for which in ("q", "kv"):
        padded = getattr(parameters, f"cu_seqlens_{which}_padded", None)
        lengths.append(padded if padded is not None else getattr(parameters, f"cu_seqlens_{which}"))
    return lengths[0], lengths[1]
