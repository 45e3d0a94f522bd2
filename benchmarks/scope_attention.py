"""How long an attention map takes, beside the whole matrix in plain torch and the model's own attention.

    python benchmarks/scope_attention.py [--tokens 4096] [--heads 32] [--groups 8] [--width 128] [--runs 20]

On a GPU if there is one, in bfloat16. Rounds are interleaved; medians of the device's time are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention

from trimtab.scope.device.attention import AttentionState, fused, measure_attention
from trimtab.scope.device.attention.tiling import Tiling
from trimtab.scope.subscription import Subscription
from trimtab.scope.taps.points import AttentionInput

PATIENCE = 60.0


def _naive(inputs: AttentionInput) -> torch.Tensor:
    """The whole matrix in float32, and its tiles."""
    k = inputs.k.repeat_interleave(inputs.q.shape[1] // inputs.k.shape[1], 1).float()
    found = inputs.q.float() @ k.transpose(2, 3) * inputs.scale
    size = found.shape[-1]
    found = found.masked_fill(torch.ones(size, size, dtype=torch.bool, device=found.device).triu(1), -torch.inf)
    chance = torch.softmax(found, -1)
    edge = size // 64
    return chance.view(1, -1, 64, edge, 64, edge).mean((3, 5))


def _by_operators(inputs: AttentionInput, subscription: Subscription, state: AttentionState) -> object:
    """As long as there are no kernels."""
    with mock.patch.object(fused, "fits", return_value=False):
        return measure_attention(inputs, subscription, state)


def _compiled(inputs: AttentionInput) -> bool:
    """Wait for the kernels; whether they are there."""
    if not fused.fits(inputs):
        return False
    shape = fused.shape_of(inputs, Tiling(inputs.q.shape[2], inputs.k.shape[2], (64, 64), runs=1))
    until = time.monotonic() + PATIENCE
    while not fused.ready(inputs, shape) and time.monotonic() < until:
        time.sleep(0.1)
    return fused.ready(inputs, shape)


def _timed(what: Callable[[], object], cuda: bool) -> float:
    """Milliseconds."""
    if not cuda:
        began = time.perf_counter()
        what()
        return 1e3 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    what()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 4096), ("heads", 32), ("groups", 8), ("width", 128), ("runs", 20)):
        options.add_argument(f"--{name}", type=int, default=value)
    said = options.parse_args()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    kind = torch.bfloat16
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, said.tokens, said.width, dtype=kind, device=device)
        for heads in (said.heads, said.groups, said.groups)
    )
    inputs = AttentionInput(q, k, said.width**-0.5)
    all_heads, one_head = (Subscription("**", "attention", heads=heads) for heads in (None, (0,)))
    few_rows = Subscription("**", "attention", parameters={"rows": list(range(0, said.tokens, said.tokens // 8))})
    state = AttentionState()
    kernels = cuda and _compiled(inputs)
    tasks: dict[str, Callable[[], object]] = {
        "all heads": lambda: measure_attention(inputs, all_heads, state),
        "all heads, by operators": lambda: _by_operators(inputs, all_heads, state),
        "one head": lambda: measure_attention(inputs, one_head, state),
        "8 rows, all heads": lambda: measure_attention(inputs, few_rows, state),
        "whole matrix in torch": lambda: _naive(inputs),
        "the model's own (SDPA)": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }
    times: dict[str, list[float]] = {name: [] for name in tasks}
    peaks: dict[str, int] = {}
    before = 0
    for run in range(said.runs + 1):
        for name, task in tasks.items():
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            taken = _timed(task, cuda)
            if cuda:
                peaks[name] = torch.cuda.max_memory_allocated() - before
            if run:
                times[name].append(taken)
    said_of = f"{said.heads} heads in {said.groups} groups, {said.tokens} tokens, bf16"
    print(f"{device}, torch {torch.__version__}, {'kernels' if kernels else 'no kernels'}: {said_of}")
    for name, found in times.items():
        memory = f", {peaks[name] / 2**20:.0f} MiB" if cuda else ""
        print(f"{name}: {statistics.median(found):.2f} ms (of {len(found)}, most {max(found):.2f}){memory}")


if __name__ == "__main__":
    main()
