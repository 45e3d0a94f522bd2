"""Checkpoints of Megatron-Core, opened in one process, or with tensor parallelism under torchrun.

What is opened is a distributed checkpoint (``torch_dist``) of a GPT model, as Megatron-LM writes it, whatever layout
it was trained in. Such a checkpoint contains pickles that Megatron-Core itself reads: open only those of your own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.api import CheckpointException

from trimtab.scope.generate.engine import Engine
from trimtab.scope.generate.model import Facts
from trimtab.scope.generate.vocabulary import ByteVocabulary, Vocabulary, from_tokenizer_file
from trimtab.scope.moment import Moment

_LATEST: Final = "latest_checkpointed_iteration.txt"
_LONGEST: Final = 160
"""Of a reason, in characters."""
_REFUSED: Final = {
    "num_experts": "a mixture of experts",
    "multi_latent_attention": "multi-latent attention",
    "is_hybrid_model": "a hybrid model",
    "mtp_num_layers": "multi-token prediction",
    "use_rope_scaling": "scaled rotary positions",
}
"""Arguments of a model that is not known here."""


def find_checkpoint(path: Path) -> Path:
    """The folder of the newest checkpoint in ``path``, or ``path`` itself. Raises ValueError where there is none."""
    if (path / _LATEST).is_file():
        said = (path / _LATEST).read_text().strip()
        path = path / (said if said == "release" or not said.isdecimal() else f"iter_{int(said):07d}")
    if (path / "metadata.json").is_file() and (path / "common.pt").is_file():
        return path
    if (path / "latest").is_file():
        raise ValueError(
            f"{path}: a checkpoint of ranks, which only the same layout can read; write one with --export of "
            "examples/pretrain_gpt.py, or with --ckpt-format torch_dist of Megatron-LM"
        )
    raise ValueError(f"{path}: no distributed checkpoint of Megatron-Core (metadata.json and common.pt are missing)")


def read_arguments(folder: Path) -> argparse.Namespace:
    """The arguments of the training. Raises ValueError for a file that holds anything but plain values."""
    try:
        with _plain_values():
            state = torch.load(folder / "common.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # what is wrong in a pickle can be anything
        raise ValueError(f"{folder}/common.pt: cannot be read ({_reason(error)})") from None
    found = state.get("args") if isinstance(state, dict) else None
    if not isinstance(found, argparse.Namespace):
        raise ValueError(f"{folder}/common.pt: it does not say with which arguments the model was made")
    for name, what in _REFUSED.items():
        if getattr(found, name, None):
            raise ValueError(f"{folder}: {what} ({name}), which cannot be opened here")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "max_position_embeddings"):
        if not isinstance(getattr(found, name, None), int):
            raise ValueError(f"{folder}/common.pt: {name} is missing in the model's arguments")
    return found


def _plain_values() -> contextlib.AbstractContextManager[Any]:
    """Within it torch.load reads arguments, too, and no code."""
    from megatron.core.transformer.enums import AttnBackend

    return torch.serialization.safe_globals([argparse.Namespace, AttnBackend, type(Path("/")), torch.dtype])


def vocabulary_of(arguments: argparse.Namespace, tokenizer: str, folder: Path) -> Vocabulary:
    """``tokenizer``: ``bytes``, a ``tokenizer.json``, or empty for what the checkpoint says."""
    if tokenizer == "bytes":
        return ByteVocabulary()
    if tokenizer:
        return from_tokenizer_file(Path(tokenizer))
    if arguments.padded_vocab_size == 256 or getattr(arguments, "tokenizer_type", "") == "ByteLevelTokenizer":
        return ByteVocabulary()
    said = Path(str(getattr(arguments, "tokenizer_model", None) or ""))
    for path in (said, said / "tokenizer.json"):
        if path.suffix == ".json" and path.is_file():
            return from_tokenizer_file(path)
    raise ValueError(f"{folder}: its tokenizer is not found; give --tokenizer FILE (a tokenizer.json) or bytes")


def open_checkpoint(path: Path, engine: Engine, tokenizer: str = "") -> CheckpointModel:
    """The model, with its weights. Raises ValueError, in one line, for what cannot be opened."""
    folder = find_checkpoint(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            undo: list[Callable[[], None]] = [engine.cpu()]
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"a checkpoint of Megatron-Core needs it: pip install 'trimtab[megatron]' ({error})") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what it would be faster with
            arguments = read_arguments(folder)
            vocabulary = vocabulary_of(arguments, tokenizer, folder)
            undo += _processes()
            model = _build(arguments)
            _load(model, folder)
            return CheckpointModel(folder.name, model, arguments, vocabulary, engine, undo)
    except BaseException:
        _all(undo)
        raise


@dataclass(slots=True)
class _Layout:
    rank: int
    size: int


class CheckpointModel:
    """A GPT model of Megatron-Core. It has no cache of keys: each step runs the whole text anew."""

    def __init__(
        self,
        name: str,
        model: Any,
        arguments: argparse.Namespace,
        vocabulary: Vocabulary,
        engine: Engine,
        undo: list[Callable[[], None]],
    ) -> None:
        from megatron.core import parallel_state as state

        inner = _inner(model)
        self._model, self._inner, self._undo = model, inner, undo
        self._layout = _Layout(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size())
        self._group: Any = state.get_tensor_model_parallel_group()
        self._position = engine.position()
        self._position.aside = True
        self._text: list[int] = []
        self.points = engine.points(0, model, self._position)
        self.vocabulary = vocabulary
        self.speaks = self._layout.rank == 0
        count = torch.tensor(sum(parameter.numel() for parameter in model.parameters()))
        self.facts = Facts(
            name,
            int(count) * self._layout.size,
            arguments.num_layers,
            arguments.num_attention_heads,
            arguments.padded_vocab_size,
            arguments.max_position_embeddings,
        )

    def begin(self, capacity: int) -> None:
        del capacity
        self._text = []

    def step(self, tokens: Sequence[int], moment: Moment) -> torch.Tensor:
        self._text += tokens
        self._position.step, self._position.microbatch = moment.step, moment.microbatch
        device = next(self._model.parameters()).device
        x = torch.tensor([self._text], device=device)
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        with torch.no_grad():
            logits = self._model(x, torch.arange(length, device=device)[None], mask)
        return logits[0, -1].float().cpu()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            normed = self._inner.decoder.final_layernorm(hidden[:, None])
            weight = self._inner.shared_embedding_or_output_weight() if self._tied else None
            return self._inner.output_layer(normed, weight=weight)[0][:, 0]

    @property
    def _tied(self) -> bool:
        return bool(self._inner.share_embeddings_and_output_weights)

    def gather_heads(self, rows: torch.Tensor) -> torch.Tensor:
        if self._layout.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self._layout.size)]
        dist.all_gather(parts, rows.contiguous(), group=self._group)
        return torch.cat(parts)

    def close(self) -> None:
        _all(self._undo)


def _processes() -> list[Callable[[], None]]:
    """Join the other processes of torchrun, or be alone; how to leave."""
    from megatron.core import parallel_state, tensor_parallel

    undo: list[Callable[[], None]] = []
    if not dist.is_initialized():
        world = int(os.environ.get("WORLD_SIZE", "1"))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if world > 1:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        undo.insert(0, dist.destroy_process_group)
    parallel_state.initialize_model_parallel(dist.get_world_size())
    undo.insert(0, parallel_state.destroy_model_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return undo


def _build(arguments: argparse.Namespace) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    def said(name: str, default: Any) -> Any:
        value = getattr(arguments, name, None)
        return default if value is None else value

    config = _config(arguments, said)
    normalization = said("normalization", "LayerNorm")
    try:
        spec = get_gpt_layer_local_spec(qk_layernorm=said("qk_layernorm", False), normalization=normalization)
        model: Any = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=arguments.padded_vocab_size,
            max_sequence_length=arguments.max_position_embeddings,
            parallel_output=False,
            share_embeddings_and_output_weights=not said("untie_embeddings_and_output_weights", False),
            position_embedding_type=said("position_embedding_type", "learned_absolute"),
            rotary_percent=said("rotary_percent", 1.0),
            rotary_base=said("rotary_base", 10_000),
        )
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"Megatron-Core cannot build this model here ({error})") from None
    model = model.cuda() if torch.cuda.is_available() else model
    model = Float16Module(config, model) if config.bf16 or config.fp16 else model
    return model.eval().requires_grad_(False)


def _config(arguments: argparse.Namespace, said: Callable[[str, Any], Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

    half = torch.bfloat16 if said("bf16", False) else torch.float16 if said("fp16", False) else torch.float32
    size = dist.get_world_size()
    if arguments.num_attention_heads % size or arguments.padded_vocab_size % size:
        raise ValueError(f"{size} processes do not divide {arguments.num_attention_heads} heads and the vocabulary")
    grouped = said("group_query_attention", False)
    more: dict[str, Any] = {}
    if said("swiglu", False):
        more |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    elif said("squared_relu", False):
        raise ValueError("a model with squared ReLU cannot be opened here")
    return TransformerConfig(
        num_layers=arguments.num_layers,
        hidden_size=arguments.hidden_size,
        num_attention_heads=arguments.num_attention_heads,
        num_query_groups=said("num_query_groups", None) if grouped else None,
        ffn_hidden_size=said("ffn_hidden_size", 4 * arguments.hidden_size),
        kv_channels=said("kv_channels", arguments.hidden_size // arguments.num_attention_heads),
        normalization=said("normalization", "LayerNorm"),
        layernorm_epsilon=said("norm_epsilon", 1e-5),
        add_bias_linear=said("add_bias_linear", True),
        add_qkv_bias=said("add_qkv_bias", False),
        qk_layernorm=said("qk_layernorm", False),
        layernorm_zero_centered_gamma=said("apply_layernorm_1p", False),
        tensor_model_parallel_size=size,
        params_dtype=half,
        pipeline_dtype=half,
        bf16=half is torch.bfloat16,
        fp16=half is torch.float16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **more,
    )


def _load(model: Any, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    wanted = {"model": model.sharded_state_dict()}
    try:
        with _plain_values():
            loaded: Any = dist_checkpointing.load(wanted, str(folder))
        missing, _ = _inner(model).load_state_dict(loaded["model"], strict=False)
    except (Exception, CheckpointException) as error:  # of whatever kind: the folder is what is wrong
        raise ValueError(f"{folder}: its weights cannot be read ({_reason(error)})") from None
    lost = [name for name in missing if not name.endswith("_extra_state")]
    if lost:
        raise ValueError(f"{folder}: {lost[0]} is missing in it")


def _reason(error: BaseException) -> str:
    """In one short line; what went wrong on the first rank, where it was on several."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "..."


def _inner(model: Any) -> Any:
    return getattr(model, "module", model)


def _all(undo: list[Callable[[], None]]) -> None:
    """Undo everything, the last thing first."""
    while undo:
        try:
            undo.pop()()
        except Exception as error:
            sys.stderr.write(f"trimtab: closing the checkpoint failed in part ({error})\n")
