"""Which module of a block is its attention, its MLP, the norm between them: by the names that models give them.

Hugging Face's models, torchtitan's and those written by hand agree on a few dozen names. What has none of them is
offered by its path in the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, Final

from torch import nn

from trimtab.engines.plain.wrappers import class_of, unwrapped
from trimtab.scope.taps.spots import Spot

_ATTENTION: Final = ("self_attn", "self_attention", "attention", "attn")
_MLP: Final = ("mlp", "feed_forward", "ffn", "feedforward", "ff", "moe", "block_sparse_moe")
_BETWEEN: Final = (
    *("pre_feedforward_layernorm", "pre_mlp_layernorm", "post_attention_layernorm", "post_attention_norm"),
    *("mlp_norm", "ffn_norm", "ln_2", "ln2", "norm2", "norm_2"),
)
"""Norms whose input is the residual stream after the attention's add."""
_AFTER_MLP: Final = ("post_feedforward_layernorm", "post_mlp_layernorm")
"""A block with one of these, but none before its MLP, norms what it adds, and not what it adds to."""
_LAST: Final = ("down_proj", "linear_fc2", "c_proj", "w2", "down", "fc2", "dense_4h_to_h", "fc_out", "linear2", "wo")
_ROUTER: Final = ("gate", "router")
_NORM: Final = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "norm_f", "ln_final", "norm_final")


def spots_of_block(block: nn.Module) -> Iterator[Spot]:
    """The tensors of a block, in the order in which they come to be, by what follows ``layers.<n>.`` in their names."""
    inner = opened(block)
    yield Spot("input", block, "input", first_argument(inner))
    attention = _child(inner, _ATTENTION, ("attention",))
    if attention is not None:
        yield Spot("attention.input", attention, "input", first_argument(opened(attention)))
        if not isinstance(opened(attention), nn.MultiheadAttention):  # whose call nobody can see into
            for side in ("q", "k", "v", "map", "core"):
                yield Spot(f"attention.{side}", opened(attention), side)
        yield Spot("attention.output", attention, "output")
        between = _between(inner)
        if between is not None:
            yield Spot("residual", between, "input", first_argument(opened(between)))
    mlp = _child(inner, _MLP, ("mlp", "feedforward", "moe"))
    if mlp is not None:
        yield from _spots_of_mlp(mlp)
    yield Spot("output", block, "output")


def is_block(module: nn.Module) -> bool:
    """Whether it has an attention or an MLP of its own, rather than a list of blocks."""
    inner = opened(module)
    return _child(inner, _ATTENTION, ()) is not None or _child(inner, _MLP, ()) is not None


def final_norm(model: nn.Module, layers: Iterable[nn.Module]) -> nn.Module | None:
    """The norm behind the last layer."""
    inside = {id(part) for layer in layers for part in opened(layer).modules()}
    found = None
    for path, module in opened(model).named_modules():
        name = path.rpartition(".")[2]
        if name in _NORM and id(module) not in inside:
            found = module
    return found


def first_argument(module: nn.Module) -> str:
    """Name of the first argument of a module's forward."""
    forward = class_of(module).forward
    names = [name for name in inspect.signature(forward).parameters if name != "self"]
    return names[0] if names else ""


def opened(module: nn.Module) -> nn.Module:
    """A module without wrappers, torch.compile's and those of distributed data parallelism among them."""
    while True:
        inner: Any = unwrapped(module)
        if "_orig_mod" in inner._modules:
            inner = inner._modules["_orig_mod"]
        elif type(inner).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = inner._modules["module"]
        if inner is module:
            return module
        module = inner


def _spots_of_mlp(mlp: nn.Module) -> Iterator[Spot]:
    inner = opened(mlp)
    router = _child(inner, _ROUTER, ())
    if router is not None and "experts" in inner._modules:
        gate = router if _is_linear(router) else _child(router, _ROUTER, ())
        if gate is not None and _is_linear(gate):
            yield Spot("router.logits", gate, "output")
    else:
        last = _last_linear(inner)
        if last is not None:
            yield Spot("mlp.hidden", last, "input", first_argument(last))
    yield Spot("mlp.output", mlp, "output")


def _between(block: nn.Module) -> nn.Module | None:
    if any(name in block._modules for name in _AFTER_MLP) and "pre_feedforward_layernorm" not in block._modules:
        return None
    if getattr(block, "norm_first", None) is False:  # torch.nn.TransformerEncoderLayer: norms come after the adds
        return None
    return _child(block, _BETWEEN, ())


def _last_linear(mlp: nn.Module) -> nn.Module | None:
    named = _child(mlp, _LAST, ())
    if named is not None:
        return named if _is_linear(named) else None
    if not isinstance(mlp, nn.Sequential):
        return None
    linears = [child for child in mlp.children() if _is_linear(child)]
    return linears[-1] if len(linears) > 1 else None


def _child(module: nn.Module, names: Iterable[str], in_class: Iterable[str]) -> nn.Module | None:
    """The child of the first of the names that there is, else of a class that says it."""
    for name in names:
        child = module._modules.get(name)
        if child is not None:
            return child
    for child in module.children():
        said = class_of(child).__name__.lower().replace("_", "")
        if any(word in said for word in in_class) and "norm" not in said:
            return child
    return None


def _is_linear(module: nn.Module) -> bool:
    """Also Hugging Face's Conv1D, and linear layers that hold adapters."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)
