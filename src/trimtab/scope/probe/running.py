"""Prompts through a model that trains, on all of its ranks together."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from trimtab.scope.names import Shard
from trimtab.scope.probe.quiet import aside

_WRAPPED: Final = "_orig_mod"
"""Where torch.compile keeps the module that it wraps."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Logits of a batch, or of a part of the vocabulary."""

    logits: torch.Tensor
    """(b, s, vocabulary or this rank's part of it)."""
    first: int = 0
    """Token of the first logit."""
    shard: Shard = ()


class Runner(Protocol):
    """Runs prompts through the chunks of a model."""

    vocabulary: int | None
    """Tokens that it knows, if that is known."""
    longest: int | None
    """Tokens of a prompt at most, if that is known."""
    multiple: int
    """The length of a batch is a multiple of it."""
    speaks: bool
    """Whether this rank tells what it finds: one of those that find the same."""
    group: Any
    """Ranks that share the vocabulary; None: this one has all of it."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Around :meth:`forward`: nothing of it is left in the model."""
        ...

    def forward(self, tokens: torch.Tensor) -> Answer | None:
        """Run ``tokens`` (b, s); None where the logits are not on this rank. On all ranks together. Raises ValueError
        where the model does not answer, or another stage of it has failed."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tokens are wanted."""
        ...


class PlainRunner:
    """A model in plain PyTorch that takes tokens: replicated (DDP), or sharded (FSDP).

    It may return logits, or take labels, too, and return a loss; then its logits are what its last linear layer with an
    output for each token gives.
    """

    multiple = 1
    group = None

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Raises ValueError where it is not clear which of several models is to be asked, or for stages of one."""
        fit = [chunk for chunk in chunks if _limits(_unwrapped(chunk))[0] is not None] if len(chunks) > 1 else chunks
        if len(fit) != 1:
            raise ValueError(
                f"{len(chunks)} models or stages are on this rank, {len(fit)} of which take tokens; a probe in plain "
                "PyTorch needs exactly one"
            )
        self._outer = fit[0]
        self._model = _unwrapped(fit[0])
        self.vocabulary, self.longest = _limits(self._model)
        self._labels = _takes_labels(self._model)
        self.speaks = not dist.is_initialized() or dist.get_rank() == 0

    @property
    def device(self) -> torch.device:
        return next((weight.device for weight in self._model.parameters()), torch.device("cpu"))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        with aside([self._outer]):
            yield

    def forward(self, tokens: torch.Tensor) -> Answer | None:
        with _output_of(_head(self._model, self.vocabulary)) as seen:
            output = self._model(tokens, tokens) if self._labels else self._model(tokens)
        for logits in (_logits(output), *(_logits(one) for one in seen)):
            # a stage of a pipeline gives hidden states, which are narrower
            if logits is not None and logits.shape[:-1] == tokens.shape and logits.shape[-1] >= (self.vocabulary or 2):
                full = getattr(logits, "full_tensor", None)
                return Answer(full() if full is not None else logits)
        raise ValueError("the model's answer has no logits of (batch, sequence, vocabulary)")


def runner_for(chunks: Sequence[nn.Module]) -> Runner:
    """For the model chunks of this rank, as the job calls them. Raises ValueError where none can be asked."""
    if not chunks:
        raise ValueError("no model has been seen yet; ask again when the first step is done")
    if "megatron.core.transformer.module" in sys.modules:
        from trimtab.scope.probe.megatron import MegatronRunner, is_megatron

        if is_megatron(chunks[0]):
            return MegatronRunner(chunks)
    return PlainRunner(chunks)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Inside of torch.compile and DDP. DDP's own forward would hand buffers on among ranks."""
    while True:
        inner = model._modules.get(_WRAPPED)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _logits(output: Any) -> torch.Tensor | None:
    """Of what a model returns: the tensor, an attribute or an entry ``logits``, or the first of several."""
    if isinstance(output, torch.Tensor):
        return output
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    return found if isinstance(found, torch.Tensor) else None


def _takes_labels(model: nn.Module) -> bool:
    """Must its forward be given something besides tokens? Raises ValueError where it is more than one thing."""
    given = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [one for one in parameters if one.kind in given and one.default is inspect.Parameter.empty]
    if len(needed) > 2 or any(one.kind is inspect.Parameter.KEYWORD_ONLY for one in needed):
        names = ", ".join(one.name for one in needed)
        raise ValueError(f"the model's forward must be given {names}; a probe can give tokens, and labels at most")
    return len(needed) == 2


def _head(model: nn.Module, vocabulary: int | None) -> nn.Module | None:
    """The last linear layer with an output for each token."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return next((module for module in reversed(linear) if module.out_features == vocabulary), None)


@contextlib.contextmanager
def _output_of(module: nn.Module | None) -> Iterator[list[Any]]:
    """What a module gives while the context lasts."""
    seen: list[Any] = []
    if module is None:
        yield seen
        return
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


def _limits(model: nn.Module) -> tuple[int | None, int | None]:
    """How many tokens a model knows and how long a prompt may be, as its configuration or its embeddings say. A token
    beyond them would end a job on a GPU."""
    config = getattr(model, "config", None)
    known, longest = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding):
            continue
        if any(part.startswith("pos") or part == "wpe" for part in name.lower().split(".")):
            longest = min(module.num_embeddings, longest or module.num_embeddings)
        elif known is None:
            known = module.num_embeddings
    return (known if isinstance(known, int) else None), (longest if isinstance(longest, int) else None)
