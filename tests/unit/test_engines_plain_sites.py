"""Which modules of a model are taken for its layers, embedding and head."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plain_models import WIDTH, Block, Decoder  # noqa: E402
from torch import nn  # noqa: E402

from trimtab.engines.plain.sites import find  # noqa: E402


def _found(model: nn.Module, parts: bool = False) -> list[tuple[str, int, str]]:
    """(name, layer, path) of each site."""
    paths = {id(module): path for path, module in model.named_modules()}
    return [(site.name, site.layer, paths[id(site.module)]) for site in find(model, parts).sites]


def _enclosing(model: nn.Module) -> list[str]:
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths[id(module)] for module in find(model, False).enclosing]


class Of(nn.Module):
    """A module of named modules, which nobody calls."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def _linear(width: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, width)


class OtherBlock(Block):
    """Another class of layers."""


def test_a_decoder() -> None:
    assert _found(Decoder()) == [
        ("layer", 0, "layers.0"),
        ("layer", 1, "layers.1"),
        ("embedding", -1, "embedding"),
        ("output", -1, "head"),
    ]
    assert _enclosing(Decoder()) == [""]


def test_parts_of_layers_without_norms() -> None:
    parts = [found for found in _found(Decoder(1), parts=True) if found[2].count(".") == 2]
    assert parts == [("attention", 0, "layers.0.attention"), ("mlp", 0, "layers.0.mlp")]


def test_layers_in_a_dictionary_keep_their_numbers() -> None:
    """As in torchtitan, where a pipeline stage holds some of them."""
    model = Of(layers=nn.ModuleDict({"5": Block(), "6": Block()}), norm=nn.LayerNorm(WIDTH))
    assert _found(model) == [("layer", 5, "layers.5"), ("layer", 6, "layers.6")]


def test_layers_within_models_within_wrappers() -> None:
    """As in Hugging Face's models under DistributedDataParallel."""
    inner = Of(wte=nn.Embedding(8, WIDTH), wpe=nn.Embedding(8, WIDTH), h=nn.ModuleList([Block(), Block()]))
    model = Of(module=Of(transformer=inner, lm_head=_linear()))
    assert [name for name, _, _ in _found(model)] == ["layer", "layer", "embedding", "embedding", "output"]
    assert _enclosing(model) == ["", "module", "module.transformer"]


def test_encoder_and_decoder_are_counted_through() -> None:
    encoder, decoder = (nn.ModuleList([cls(), cls()]) for cls in (Block, OtherBlock))
    model = Of(encoder=Of(block=encoder), decoder=Of(block=decoder))
    assert _found(model) == [
        ("layer", 0, "encoder.block.0"),
        ("layer", 1, "encoder.block.1"),
        ("layer", 2, "decoder.block.0"),
        ("layer", 3, "decoder.block.1"),
    ]


def test_stages_of_one_class_and_of_any_size_are_layers() -> None:
    """As in a ResNet, whose first stage has a hundredth of the last one's weights."""

    class Convolution(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

    stages = {f"layer{i}": nn.Sequential(Convolution(4**i), Convolution(4**i)) for i in (1, 2, 3)}
    model = Of(stem=_linear(), **stages, fc=_linear())
    assert [layer for name, layer, _ in _found(model) if name == "layer"] == [0, 1, 2, 3, 4, 5]
    assert [name for name, layer, _ in _found(model) if layer < 0] == ["stem", "output"]


def test_a_small_tower_beside_the_layers_is_one_site() -> None:
    tower = Of(blocks=nn.ModuleList([nn.Sequential(_linear()), nn.Sequential(_linear())]))
    model = Of(tower=tower, layers=nn.ModuleList(Block() for _ in range(20)), head=_linear())
    assert [found for found in _found(model) if found[0] != "layer"] == [
        ("tower", -1, "tower"),
        ("output", -1, "head"),
    ]


def test_experts_are_no_layers() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = _linear(8)
            self.experts = nn.ModuleList(_linear(64) for _ in range(8))

    model = Of(layers=nn.ModuleList([Sparse(), Sparse()]))
    assert [(name, layer) for name, layer, _ in _found(model)] == [("layer", 0), ("layer", 1)]
    assert [name for name, _, _ in _found(model, parts=True)[2:]] == ["router", "router"]


def test_a_sequential_of_many_kinds() -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH), Block(), Block(), nn.ReLU(), Block(), _linear())
    assert _found(model) == [
        ("layer", 0, "1"),
        ("layer", 1, "2"),
        ("layer", 2, "4"),
        ("embedding", -1, "0"),
        ("output", -1, "5"),
    ]
    assert _enclosing(model) == [""]


def test_without_layers_the_children_of_the_first_branching_are_sites() -> None:
    model = Of(module=Of(first=_linear(), second=_linear(), norm=nn.LayerNorm(WIDTH), third=_linear()))
    assert _found(model) == [
        ("first", -1, "module.first"),
        ("second", -1, "module.second"),
        ("output", -1, "module.third"),
    ]


@pytest.mark.parametrize("model", [_linear(), nn.LayerNorm(WIDTH)], ids=["linear", "norm"])
def test_a_single_module_is_the_model(model: nn.Module) -> None:
    assert _found(model) == [("model", -1, "")]
    assert _enclosing(model) == [""]


def test_nothing_without_weights() -> None:
    assert _found(nn.Sequential(nn.ReLU(), nn.ReLU())) == []


def test_shared_layers_are_one_site() -> None:
    block = Block()
    assert _found(Of(layers=nn.ModuleList([block, block, Block()])))[:2] == [
        ("layer", 0, "layers.0"),
        ("layer", 2, "layers.2"),
    ]


def test_tied_embedding_and_head() -> None:
    model = Decoder()
    model.head = nn.Linear(WIDTH, 8, bias=False)
    model.head.weight = model.embedding.weight
    assert [name for name, _, _ in _found(model)] == ["layer", "layer", "embedding", "output"]


def test_the_layer_in_a_checkpoint_wrapper_is_the_site() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Decoder()
    model.layers[1] = checkpoint_wrapper(model.layers[1])  # selective: every second layer
    assert _found(model)[:2] == [("layer", 0, "layers.0"), ("layer", 1, "layers.1._checkpoint_wrapped_module")]


def _compiled(module: nn.Module, in_place: bool) -> Any:
    if not in_place:
        return torch.compile(module, backend="eager")
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_layers_are_sites_without_parts(in_place: bool) -> None:
    model = Decoder()
    for index, layer in enumerate(model.layers):
        model.layers[index] = _compiled(layer, in_place)
    assert _found(model, parts=True)[:3] == [
        ("layer", 0, "layers.0"),
        ("layer", 1, "layers.1"),
        ("embedding", -1, "embedding"),
    ]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_one_site(in_place: bool) -> None:
    wrapper = Of(module=_compiled(Decoder(), in_place))
    assert _found(wrapper) == [("model", -1, "module")]
