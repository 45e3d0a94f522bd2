"""Prompts as batches of tokens, alike on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from trimtab.scope.probe.running import Runner
from trimtab.scope.probe.spec import Positions, ProbeSpec, Prompt

_JOB: Final = "megatron.training.global_vars"
_TOKENS_A_PASS: Final = 4096
"""In one batch, padding included, unless a single prompt is longer: logits take memory."""
_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that run together, padded on the right, which a causal model does not see."""

    tokens: torch.Tensor
    """(b, s)."""
    rows: tuple[torch.Tensor, torch.Tensor]
    """Of each answer wanted: which prompt in the batch, after which of its tokens."""
    first: int
    """Number of its first prompt in the probe."""
    targets: torch.Tensor | None
    """(rows,): token that should come next, -1: none given."""


def tokens_of(spec: ProbeSpec, runner: Runner) -> list[tuple[int, ...]]:
    """Tokens of each prompt. Raises ValueError for what the model does not know or cannot hold."""
    found: list[tuple[int, ...]] = []
    for number, prompt in enumerate(spec.prompts):
        tokens = prompt.tokens or _tokenised(prompt, spec.tokenizer, runner)
        if not tokens:
            raise ValueError(f"prompt {number}: the tokenizer makes no token of it")
        highest = max((*tokens, prompt.target or 0))
        if runner.vocabulary is not None and highest >= runner.vocabulary:
            raise ValueError(
                f"prompt {number}: token {highest}, but the model knows those from 0 to {runner.vocabulary - 1}"
            )
        if runner.vocabulary is None and runner.device.type == "cuda":
            raise ValueError("how many tokens the model knows is not found out, and one too high would end the job")
        length = -(-len(tokens) // runner.multiple) * runner.multiple
        if runner.longest is not None and length > runner.longest:
            raise ValueError(f"prompt {number}: {len(tokens)} tokens, but the model takes {runner.longest} at most")
        found.append(tokens)
    return found


def batches(spec: ProbeSpec, tokens: Sequence[tuple[int, ...]], runner: Runner) -> Iterator[Batch]:
    """The prompts in order, some at a time; one by one where anything else is measured of them, which padding would be
    in otherwise."""
    room = 0 if spec.also else _TOKENS_A_PASS
    begin = 0
    while begin < len(tokens):
        end, longest = begin, 0
        while end < len(tokens):
            longest_then = max(longest, len(tokens[end]))
            if end > begin and (end + 1 - begin) * longest_then > room:
                break
            end, longest = end + 1, longest_then
        yield _batch(spec, tokens[begin:end], begin, runner)
        begin = end


def _batch(spec: ProbeSpec, chosen: Sequence[tuple[int, ...]], first: int, runner: Runner) -> Batch:
    longest = max(len(tokens) for tokens in chosen)
    padded = -(-longest // runner.multiple) * runner.multiple
    filled = [[*tokens, *([0] * (padded - len(tokens)))] for tokens in chosen]
    places = [
        (index, position) for index, tokens in enumerate(chosen) for position in _positions(tokens, spec.positions)
    ]
    targets = [_target(spec.prompts[first + index], chosen[index], position) for index, position in places]
    device = runner.device
    rows = torch.tensor(places, device=device).T
    asked = torch.tensor(targets, device=device) if max(targets) >= 0 else None
    return Batch(torch.tensor(filled, device=device), (rows[0], rows[1]), first, asked)


def _positions(tokens: tuple[int, ...], wanted: Positions) -> Iterator[int]:
    yield from range(len(tokens)) if wanted == "all" else (len(tokens) - 1,)


def _target(prompt: Prompt, tokens: tuple[int, ...], position: int) -> int:
    """What comes next in the prompt itself, and after its end what its author said."""
    if position + 1 < len(tokens):
        return tokens[position + 1]
    return -1 if prompt.target is None else prompt.target


def _tokenised(prompt: Prompt, tokenizer: str, runner: Runner) -> tuple[int, ...]:
    of_job = None if tokenizer == "bytes" else _tokenizer_of_job()
    if of_job is not None:
        return tuple(int(token) for token in of_job.tokenize(prompt.text))
    if tokenizer == "bytes" or (tokenizer == "auto" and runner.vocabulary == _BYTES):
        return tuple(prompt.text.encode())
    raise ValueError(
        "the job's tokenizer is not known here (that of Megatron-LM's training is, and a byte a token): give token ids "
        "instead of a text"
    )


def _tokenizer_of_job() -> Any:
    """Megatron-LM's, if this process trains with it."""
    module = sys.modules.get(_JOB)
    if module is None:
        return None
    try:
        return module.get_tokenizer()
    except Exception:  # it asserts that it has been made
        return None
