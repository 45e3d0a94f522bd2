"""What scope sees in stock Megatron-Core: put together over the ranks, it is what the whole model computes."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from harness import free_port, run_ranks
from megatron.core.transformer.moe import moe_utils
from megatron_job import change_config, train
from scope_taps_job import Collector, Piece, collect, load, save, whole

LAYERS, HIDDEN, HEADS, GROUPS, LENGTH, BATCH, MICROBATCHES = 4, 32, 4, 2, 16, 2, 4
SIZE = HIDDEN // HEADS
JOB = (
    *("--num-layers", str(LAYERS), "--hidden-size", str(HIDDEN), "--heads", str(HEADS), "--seq-length", str(LENGTH)),
    *("--micro-batch-size", str(BATCH), "--global-batch-size", str(BATCH * MICROBATCHES)),
)
MODEL = {"num_query_groups": GROUPS, "gated_linear_unit": True, "activation_func": F.silu}
IN_STATE = ("parameters", "optimizer")


def _prepare(script: Any, **changes: Any) -> None:
    """Grouped queries, rotary positions, SwiGLU; with sequence parallelism, norms that allow it."""
    script.GPTModel = functools.partial(script.GPTModel, position_embedding_type="rope")
    change_config(**MODEL, **changes)(script)
    if not changes.get("sequence_parallel"):
        return
    from megatron.core.transformer import torch_norm

    build = torch_norm.WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *args: Any, **keywords: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = build(cls, alone, *args, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    torch_norm.WrappedTorchNorm.__new__ = marked


# -------------------------------------------------------------------- the reference


def reference(state: dict[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every tensor of one microbatch, and its gradient, in float64; dimensions as Megatron-Core's."""
    seen: dict[str, torch.Tensor] = {}

    def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor.retain_grad()
        seen[name] = tensor
        return tensor

    def linear(x: torch.Tensor, path: str, bias: bool = True) -> torch.Tensor:
        return x @ state[f"{path}.weight"].T + (state[f"{path}.bias"] if bias else 0)

    def norm(x: torch.Tensor, path: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{path}.weight"], state[f"{path}.bias"], 1e-5)

    x = state["embedding.word_embeddings.weight"][tokens.T]
    x = note("embedding.output", x)
    for layer in range(LAYERS):
        name, path = f"layers.{layer}", f"decoder.layers.{layer}"
        x = seen[f"{name}.input"] = x
        normed = note(f"{name}.attention.input", norm(x, f"{path}.input_layernorm"))
        mixed = linear(normed, f"{path}.self_attention.linear_qkv").view(LENGTH, BATCH, GROUPS, -1, SIZE)
        each = HEADS // GROUPS
        q = note(f"{name}.attention.q", _rotate(mixed[:, :, :, :each].flatten(2, 3)))
        k = note(f"{name}.attention.k", _rotate(mixed[:, :, :, each]))
        v = note(f"{name}.attention.v", mixed[:, :, :, each + 1].clone())
        scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(each, 2)) * SIZE**-0.5
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        core = note(f"{name}.attention.core", torch.einsum("bnst,tbnd->sbnd", weights, v.repeat_interleave(each, 2)))
        out = note(f"{name}.attention.output", linear(core.flatten(2), f"{path}.self_attention.linear_proj", False))
        x = note(f"{name}.residual", x + out + state[f"{path}.self_attention.linear_proj.bias"])
        gate, up = linear(norm(x, f"{path}.pre_mlp_layernorm"), f"{path}.mlp.linear_fc1").chunk(2, -1)
        inner = note(f"{name}.mlp.hidden", F.silu(gate) * up)
        out = note(f"{name}.mlp.output", linear(inner, f"{path}.mlp.linear_fc2", False))
        x = note(f"{name}.output", x + out + state[f"{path}.mlp.linear_fc2.bias"])
    x = note("final_norm.output", norm(x, "decoder.final_layernorm"))
    logits = note("logits", x @ state["output_layer.weight"].T)
    losses = F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.flatten(), reduction="none")
    losses = note("loss", losses.view(BATCH, LENGTH))
    (losses.mean() / MICROBATCHES).backward()
    gradients = {f"{name}.grad": tensor.grad for name, tensor in seen.items() if tensor.grad is not None}
    return seen | gradients


def _rotate(x: torch.Tensor) -> torch.Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    angles = torch.outer(torch.arange(LENGTH, dtype=torch.float64), frequencies)[:, None, None]
    left, right = x.chunk(2, -1)
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


def _unzipped(weight: torch.Tensor, ranks: int) -> torch.Tensor:
    """The gate's rows before the others: each tensor parallel rank holds its part of both."""
    return weight.unflatten(0, (ranks, 2, -1)).transpose(0, 1).flatten(0, 2)


def _parameters(found: dict[tuple[str, int], list[Piece]], ranks: int) -> dict[str, torch.Tensor]:
    state = {}
    for (name, _), pieces in found.items():
        if name.startswith("parameters.") and not name.endswith(".grad"):
            value = whole(pieces)
            value = _unzipped(value, ranks) if ".linear_fc1." in name else value
            state[name.removeprefix("parameters.")] = value.double().requires_grad_()
    return state


def _check_activations(found: dict[tuple[str, int], list[Piece]], windows: list[torch.Tensor], ranks: int) -> None:
    """All that the ranks saw in the first step against the reference, whose parameters are theirs put together."""
    state = _parameters(found, ranks)
    names = {name for name, _ in found if not name.startswith(IN_STATE)}
    for microbatch, window in enumerate(windows):
        expected = reference(state, window[:, :-1], window[:, 1:])
        assert names == set(expected)
        for name, value in expected.items():
            seen = whole(found[name, microbatch])
            assert seen.shape == value.shape, name
            error = (seen.double() - value).abs().max() / value.abs().max()
            assert error < 1e-4, f"{name}, microbatch {microbatch}: {error:.1e}"
    for path, value in state.items():
        seen = whole(found[f"parameters.{path}.grad", 0])
        seen = _unzipped(seen, ranks) if ".linear_fc1." in path else seen
        assert value.grad is not None
        assert (seen.double() - value.grad).abs().max() <= 1e-4 * value.grad.abs().max(), path


def _keep_windows(windows: list[Any]) -> Any:
    def prepare(script: Any) -> None:
        forward = script.forward_step

        class Kept:
            def __init__(self, data: Any) -> None:
                self.data = data

            def __next__(self) -> torch.Tensor:
                window = next(self.data)
                windows.append(window.tolist())
                return window

        script.forward_step = lambda data, model: forward(Kept(data), model)

    return prepare


# -------------------------------------------------------------------------- layouts


def _interleaved(rank: int, folder: str, port: int) -> dict[str, Any]:
    layout = (*JOB, "--tp", "2", "--pp", "2", "--vpp", "2")
    prepare = functools.partial(_prepare, sequence_parallel=True)
    plain = train(*layout, prepare=prepare)
    collector, windows = Collector(), []
    os.environ["MASTER_PORT"] = str(port)  # for the second job

    def prepare_and_keep(script: Any) -> None:
        prepare(script)
        _keep_windows(windows)(script)

    losses = collect(collector, *layout, prepare=prepare_and_keep)
    save(folder, rank, collector)
    return {"plain": plain, "losses": losses, "windows": windows[: 2 * MICROBATCHES]}


def test_every_tap_is_what_the_whole_model_computes(tmp_path: Path) -> None:
    """TP 2 x PP 2 x VPP 2 with sequence parallelism. Losses are bitwise those without a tap."""
    results = run_ranks(4, _interleaved, str(tmp_path), free_port())
    assert [result["losses"] for result in results] == [result["plain"] for result in results]
    assert any(result["losses"] for result in results)
    found = load(tmp_path, 4)
    windows = list(dict.fromkeys(str(window) for window in results[0]["windows"]))
    assert len(windows) == MICROBATCHES, "each chunk reads the same data"
    by_text = {str(window): torch.tensor(window) for window in results[0]["windows"]}
    _check_activations(found, [by_text[text] for text in windows], 2)
    heads = {piece["tap"].heads for piece in found["layers.1.attention.q", 0]}
    assert heads == {(0, 2, 4), (2, 2, 4)}
    assert {piece["tap"].heads for piece in found["layers.1.attention.k", 0]} == {(0, 1, 2), (1, 1, 2)}


# ------------------------------------------------------------ optimizer and recompute


SHARDED = ("--bf16", "--distributed-optimizer")
BETA_1, BETA_2 = 0.9, 0.999
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _experts(script: Any) -> None:
    """Blocks of four experts, two for a token; after each step an evaluation."""
    moe_utils.te_general_gemm = None  # 0.16 forgets to define it where Transformer Engine is missing
    script.get_gpt_layer_local_spec = functools.partial(script.get_gpt_layer_local_spec, num_experts=4)
    moe = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
    change_config(**moe, add_bias_linear=False, moe_ffn_hidden_size=32, moe_aux_loss_coeff=1e-2)(script)
    step = script.train_step

    def step_and_evaluate(args: Any, model: Any, optimizer: Any, data: Any) -> Any:
        loss = step(args, model, optimizer, data)
        more = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": BATCH, "forward_only": True}
        schedule = script.get_forward_backward_func()
        schedule(forward_step_func=script.forward_step, data_iterator=data[0], model=model[0], **more)
        return loss

    script.train_step = step_and_evaluate


def _sharded(rank: int, folder: str, port: int) -> list[int]:
    """Two jobs of two data parallel ranks."""
    collector = Collector(steps=(1, 2))
    collect(collector, *JOB, *SHARDED, "--num-layers", "3", steps=3, prepare=functools.partial(_prepare, **RECOMPUTE))
    save(f"{folder}/sharded", rank, collector)
    os.environ["MASTER_PORT"] = str(port)
    collector = Collector(change={f"layers.{LAYERS - 1}.residual": lambda tensor: 2 * tensor})
    collect(collector, *JOB, steps=1, prepare=_experts)
    save(f"{folder}/experts", rank, collector)
    return [len(collector.attention), len(collector.offered)]


def test_state_of_a_distributed_optimizer_recompute_and_experts(tmp_path: Path) -> None:
    for job in ("sharded", "experts"):
        (tmp_path / job).mkdir()
    results = run_ranks(2, _sharded, str(tmp_path), free_port())
    assert results == [[LAYERS * MICROBATCHES // 2, 1]] * 2
    _check_optimizer(load(tmp_path / "sharded", 2, 1), load(tmp_path / "sharded", 2, 2))
    _check_recompute(tmp_path / "sharded")
    _check_experts(load(tmp_path / "experts", 2))


def _flat(pieces: list[Piece]) -> torch.Tensor:
    """Shards of a distributed optimizer, which must make up the whole parameter."""
    pieces = sorted(pieces, key=lambda piece: piece["tap"].part)
    ends = [piece["tap"].part[1] for piece in pieces]
    assert [piece["tap"].part[0] for piece in pieces] == [0, *ends[:-1]]
    assert {piece["tap"].shard[-1][0] for piece in pieces} == {"dp"}
    return torch.cat([piece["tensor"] for piece in pieces])


def _check_optimizer(before: dict[Any, list[Piece]], after: dict[Any, list[Piece]]) -> None:
    """Masters are their parameters, but for the rounding; moments are those that Adam makes of the gradients."""
    paths = [name.removeprefix("optimizer.").removesuffix(".master") for name, _ in before if name.endswith(".master")]
    assert len(paths) == len({name for name, _ in before if name.startswith("parameters.")}) // 2
    assert any(len(before[f"optimizer.{path}.master", 0]) == 2 for path in paths), "none lies on both ranks"
    clipped = set()
    for path in paths:
        parameter = whole(before[f"parameters.{path}", 0]).flatten()
        assert torch.equal(_flat(before[f"optimizer.{path}.master", 0]).bfloat16(), parameter), path
        first = [_flat(before[f"optimizer.{path}.{key}", 0]).double() for key in ("exp_avg", "exp_avg_sq")]
        expected = (1 - BETA_2) * (first[0] / (1 - BETA_1)) ** 2
        assert torch.allclose(first[1], expected, rtol=1e-4, atol=1e-20), path
        moment = _flat(after[f"optimizer.{path}.exp_avg", 0]).double()
        used = (moment - BETA_1 * first[0]) / (1 - BETA_1)
        gradient = _flat(before[f"parameters.{path}.grad", 0]).double()
        place = gradient.abs().argmax()
        clipped.add(round(float(used[place] / gradient[place]), 3))
    assert len(clipped) == 1, "all gradients are clipped by the same factor"


def _check_recompute(folder: Path) -> None:
    """Blocks come twice, told apart; their gradients once."""
    first, again = load(folder, 2, 1), load(folder, 2, 1, recompute=True)
    assert {name for name, _ in again} == {
        name for name, _ in first if name.startswith("layers.") and not name.endswith(".grad")
    }
    for key, pieces in again.items():
        assert all(torch.equal(a["tensor"], b["tensor"]) for a, b in zip(pieces, first[key], strict=True)), key
    for (name, microbatch), pieces in first.items():
        assert len(pieces) == 2 or name.startswith(IN_STATE), f"{name}, {microbatch}: one of each rank"
    gradients = {name for name, _ in first if name.startswith("layers.") and name.endswith(".grad")}
    assert gradients == {f"{name}.grad" for name, _ in again}


def _check_experts(found: dict[Any, list[Piece]]) -> None:
    """Two experts a token with the softmax of their logits; no evaluation is among it."""
    assert {microbatch for name, microbatch in found if name == "layers.0.output"} == {0, 1}
    assert all(len(pieces) == 2 for (name, _), pieces in found.items() if name.startswith("layers."))
    for layer in range(LAYERS):
        logits = [piece["tensor"].flatten(0, 1) for piece in found[f"layers.{layer}.router.logits", 0]]
        for scores, piece in zip(logits, found[f"layers.{layer}.router.probabilities", 0], strict=True):
            best = scores.topk(2).indices
            expected = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best).softmax(-1))
            assert torch.allclose(piece["tensor"], expected, atol=1e-6)
        assert (f"layers.{layer}.router.logits.grad", 1) in found
    last = f"layers.{LAYERS - 1}"
    parts = (found[f"{last}.{part}", 0] for part in ("residual", "mlp.output", "output"))
    for residual, mlp, output in zip(*parts, strict=True):  # what was given in return goes both ways
        assert torch.allclose(output["tensor"], 2 * residual["tensor"] + mlp["tensor"], atol=1e-6)
    experts = [name for name, _ in found if ".local_experts." in name and name.endswith(".weight")]
    assert len(experts) == LAYERS * 4 * 2
