"""The example script under our schedules or Megatron's own: its losses, gradients and parameters, to be compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import free_port, run_ranks
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import moe_utils
from megatron_job import change_config, train

from trimtab.config import Config, PipelineConfig, TransportConfig
from trimtab.engines.megatron_pipeline import MegatronPipeline

STEPS = 2
SMALL = (
    *("--hidden-size", "16", "--heads", "2", "--seq-length", "16", "--data", __file__),
    *("--micro-batch-size", "1", "--global-batch-size", "8"),
)
STOCK: Mapping[str, Any] = {}
"""In place of pipeline settings: Megatron-Core's own schedule."""
Settings = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """What the example script cannot be told by its arguments."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the TransformerConfig."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the DistributedDataParallelConfig."""
    tied: bool = False
    experts: int = 0
    expert_ranks: int = 1
    """That share them."""
    tokens: bool = False
    """The loss function returns a sum and how many tokens it is of."""
    evaluations: bool = False
    """Two after each step: losses, and what a loss function collects."""
    scale: float = 0.0
    """Of the gradients, as a loss scaler has it."""
    aligned: bool = False
    """The script sets ``grad_sync_func`` and ``param_sync_func``."""

    def prepare(self, script: Any, seen: list[Any]) -> None:
        """Change the script's functions for this run; ``seen`` gets what evaluations return."""
        changes = dict(self.config)
        if self.experts:
            moe_utils.te_general_gemm = None
            changes |= {"num_moe_experts": self.experts, "moe_router_topk": 2, "moe_router_dtype": "fp64"}
            changes |= {
                "moe_token_dispatcher_type": "allgather",
                "moe_aux_loss_coeff": 1e-2,
                "moe_ffn_hidden_size": 32,
                "add_bias_linear": False,
            }
        change_config(**changes)(script)
        script.check_arguments = lambda args, world: None  # it refuses what Megatron-Core's schedules do
        self._prepare_layers(script)
        self._prepare_model(script)
        if self.tied:
            _tie(script)
        if self.tokens:
            script.forward_step = _token_step
        if self.evaluations:
            script.train_step = partial(_step_and_evaluate, script, script.train_step, seen)

    def _prepare_layers(self, script: Any) -> None:
        spec = script.get_gpt_layer_local_spec
        parallel = self.config.get("sequence_parallel", False)

        def make_spec() -> Any:
            layer = spec(num_experts=self.experts or None)
            if parallel:
                layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
            return layer

        script.get_gpt_layer_local_spec = make_spec
        if parallel:
            transformer_block.LayerNormImpl = SequenceParallelNorm  # the final norm; the process is a test's own

    def _prepare_model(self, script: Any) -> None:
        build, make, optimize = script.build_model, script.DistributedDataParallelConfig, script.OptimizerConfig
        script.DistributedDataParallelConfig = lambda **given: make(**(given | dict(self.ddp)))
        # the norm of all gradients is summed stage by stage, so that clipping rounds differently on one rank
        script.OptimizerConfig = lambda **given: optimize(**(given | {"clip_grad": 0.0}))

        def build_model(args: Any, config: Any) -> Any:
            chunks = build(args, config)
            if self.scale:
                config.grad_scale_func = lambda loss: loss * self.scale
            if self.aligned:
                several = len(chunks) > 1
                starts = [chunk.start_grad_sync for chunk in chunks]
                config.grad_sync_func = starts if several else starts[0]
                if self.ddp.get("overlap_param_gather"):
                    starts = [chunk.start_param_sync for chunk in chunks]
                    config.param_sync_func = starts if several else starts[0]
            return chunks

        script.build_model = build_model


class SequenceParallelNorm(torch.nn.LayerNorm):
    """Megatron's own refuses sequence parallelism; this one marks its parameters for the reduction over it."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


def _tie(script: Any) -> None:
    """The embedding is the output layer, too."""
    make, initialise = script.GPTModel, script.initialise
    script.GPTModel = lambda **given: make(**given, share_embeddings_and_output_weights=True)

    def initialise_both(model: Any, args: Any) -> None:
        initialise(model, args)
        if model.post_process and not model.pre_process:  # its copy has the name of an output layer
            weights = [("embedding.word_embeddings.weight", model.output_layer.weight)]
            initialise(SimpleNamespace(decoder=model.decoder, named_parameters=lambda: weights), args)

    script.initialise = initialise_both


def _token_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """As the script's forward step, with a loss over the tokens that are spaces or letters."""
    window = next(data)
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    length = tokens.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    counted = (labels % 3 != 0).float()

    def loss(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
        total, count = (losses.float() * counted).sum(), counted.sum().to(torch.int)
        if non_loss_data:
            return losses.detach().clone()
        return total, count, {"loss": (total / count).detach().clone()}

    return model(tokens, torch.arange(length).expand_as(tokens), mask, labels=labels), loss


def _step_and_evaluate(
    script: Any, step: Callable[..., Any], seen: list[Any], args: Any, model: Any, optimizer: Any, data: Any
) -> Any:
    loss = step(args, model, optimizer, data)
    for chunk in model:
        chunk.eval()
    for collect in (False, True):
        with torch.no_grad():
            seen += schedules.get_forward_backward_func()(
                forward_step_func=_token_step if collect else script.forward_step,
                data_iterator=data if args.vpp > 1 else data[0],
                model=model if args.vpp > 1 else model[0],
                num_microbatches=4,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=True,
                collect_non_loss_data=collect,
            )
    for chunk in model:
        chunk.train()
    return loss


@dataclass
class Outcome:
    """Of a run, on all ranks together."""

    losses: list[float]
    evaluations: list[Any]
    gradients: list[Tensors]
    """By step: whole gradients by the global name of the parameter, before they are clipped."""
    parameters: Tensors
    """At the end."""

    def same(self, other: Outcome) -> bool:
        """Bit for bit."""
        return _same(list(vars(self).values()), list(vars(other).values()))

    def distance(self, other: Outcome) -> float:
        """The largest relative difference of losses, and of the gradients as one vector, over the steps."""
        apart = [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        for mine, theirs in zip(self.gradients, other.gradients, strict=True):
            assert set(mine) >= set(theirs)  # a tied weight has a second name on the last stage
            squares = [((mine[n] - theirs[n]).double().norm() ** 2, theirs[n].double().norm() ** 2) for n in theirs]
            apart.append(float(sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)
        return max(apart)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(_same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(_same, a, b)) if isinstance(a, list) else a == b


def outcomes(
    world: int,
    arguments: Sequence[str],
    *runs: Settings,
    variant: Variant | None = None,
    kind: str = "auto",
    **more: Any,
) -> list[Outcome]:
    """The example script in each of the settings, in the same processes."""
    ports = [free_port() for _ in runs]
    with tempfile.TemporaryDirectory(prefix="trimtab-outcomes-") as folder:
        variant = variant or Variant()
        run_ranks(world, _job, variant, [*SMALL, *arguments], runs, ports, folder, kind, **more)
        return [
            _merge([torch.load(Path(folder, f"{run}-{rank}.pt")) for rank in range(world)]) for run in range(len(runs))
        ]


def _job(
    rank: int, variant: Variant, arguments: list[str], runs: list[Settings], ports: list[int], folder: str, kind: str
) -> None:
    for run, settings in enumerate(runs):
        os.environ["MASTER_PORT"] = str(ports[run])
        kept: dict[str, Any] = {"seen": [], "gradients": []}
        pipeline = None
        if settings:
            config = Config(pipeline=PipelineConfig(**settings), transport=TransportConfig(kind=kind))  # pyright: ignore[reportArgumentType]
            pipeline = MegatronPipeline(config, strict=True)
            pipeline.install()
        try:
            kept["losses"] = train(*arguments, steps=STEPS, prepare=partial(_prepare, variant, kept))
        finally:
            if pipeline is not None:
                pipeline.remove()
        torch.save(kept, Path(folder, f"{run}-{rank}.pt"))


def _prepare(variant: Variant, kept: dict[str, Any], script: Any) -> None:
    variant.prepare(script, kept["seen"])
    build, train_all = script.build_optimizer, script.train

    def build_and_watch(args: Any, model: Any) -> Any:
        optimizer = build(args, model)
        step = optimizer.step
        kept["model"] = model

        def step_and_keep() -> Any:
            kept["gradients"].append(_shards(model, "main_grad"))
            return step()

        optimizer.step = step_and_keep
        return optimizer

    def train_and_keep(args: Any, text: Any) -> Any:
        losses = train_all(args, text)
        model = kept.pop("model")
        kept["parameters"] = _shards(model, "data")
        kept["at"] = [parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()]
        kept["sharded"] = args.distributed_optimizer
        return losses

    script.build_optimizer, script.train = build_and_watch, train_and_keep


def _shards(model: Sequence[Any], attribute: str) -> dict[str, tuple[torch.Tensor, int | None]]:
    """By global name, this rank's part and the dimension along which it is cut."""
    found: dict[str, tuple[torch.Tensor, int | None]] = {}
    for chunk in model:
        layers = next(module for name, module in chunk.named_modules() if name.endswith("decoder")).layers
        for name, parameter in chunk.named_parameters():
            parts = name.removeprefix("module.").removeprefix("module.").split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(layers[int(parts[2])].layer_number)
            cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            found[".".join(parts)] = getattr(parameter, attribute).clone(), cut
    return found


def _merge(ranks: list[dict[str, Any]]) -> Outcome:
    first = [kept for kept in ranks if kept["at"][1] == 0]
    steps = len(ranks[0]["gradients"])
    return Outcome(
        losses=next(kept["losses"] for kept in reversed(ranks) if kept["losses"]),
        evaluations=next((kept["seen"] for kept in reversed(ranks) if kept["seen"]), []),
        # with a sharded optimizer no rank has all of a reduced gradient
        gradients=[] if first[0]["sharded"] else [_whole([k["gradients"][i] for k in first]) for i in range(steps)],
        parameters=_whole([kept["parameters"] for kept in first]),
    )


def _whole(shards: list[dict[str, tuple[torch.Tensor, int | None]]]) -> Tensors:
    """The parameters of all stages, those that are cut put together; ranks of a stage are in tensor parallel order."""
    parts: dict[str, list[tuple[torch.Tensor, int | None]]] = {}
    for rank in shards:
        for name, part in rank.items():
            parts.setdefault(name, []).append(part)
    return {name: found[0][0] if found[0][1] is None else _joined(found) for name, found in parts.items()}


def _joined(parts: list[tuple[torch.Tensor, int | None]]) -> torch.Tensor:
    dimension = parts[0][1]
    assert dimension is not None
    return torch.cat([part for part, _ in parts], dim=dimension)
