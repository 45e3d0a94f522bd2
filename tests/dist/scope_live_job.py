"""The example script, started by ``trimtab run`` in a forked rank: trains until it is told to stop, and writes down
with hooks of its own what passed through it, to be compared with what trimtab saw.

    scope_live_job.py FOLDER [arguments of the example]
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import load_script
from torch import nn

STOP = "stop"
"""A file of this name in FOLDER ends the job, some steps later."""
MOST_STEPS = 100_000


class Stopped(Exception):  # noqa: N818  (nothing is wrong)
    """On all ranks at the same step."""


class Reference:
    """What passes through the model, by plain hooks, and the weights after each step."""

    def __init__(self, model: nn.Module) -> None:
        self.step = -1
        self.kept: dict[str, np.ndarray] = {}
        self.weights: dict[str, nn.Parameter] = {}
        for layer in next(module for name, module in model.named_modules() if name.endswith("decoder")).layers:
            number = layer.layer_number - 1
            layer.mlp.linear_fc2.register_forward_pre_hook(self._input(f"layers.{number}.mlp.hidden"))
            core = layer.self_attention.core_attention
            core.register_forward_pre_hook(self._attention(f"layers.{number}"), with_kwargs=True)
            self.weights[f"layers.{number}.mlp.linear_fc2.weight"] = layer.mlp.linear_fc2.weight

    def begin(self, step: int) -> None:
        self.step = step
        self.microbatch: dict[str, int] = {}
        for name, weight in self.weights.items():  # as the step before has left them
            digest = hashlib.sha256(weight.detach().numpy().tobytes()).digest()
            self.kept[f"{name}/{step}"] = np.frombuffer(digest, np.uint8)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        number = self.microbatch.get(name, 0)
        self.microbatch[name] = number + 1
        self.kept[f"{name}/{self.step}/{number}"] = tensor.detach().numpy().copy()

    def _input(self, name: str) -> Any:
        return lambda _module, arguments: self._keep(name, arguments[0])

    def _attention(self, name: str) -> Any:
        def keep(_module: nn.Module, arguments: Any, named: Any) -> None:
            query, key = (*arguments, *named.values())[:2]
            self._keep(f"{name}.q", query)
            self._keep(f"{name}.k", key)

        return keep


def main(folder: Path, arguments: list[str]) -> None:
    script = load_script("examples/pretrain_gpt.py")
    plain_step = script.train_step
    references: list[Reference] = []

    def train_step(args: Any, model: list[Any], optimizer: Any, data: list[Any]) -> Any:
        if not references:
            references.append(Reference(model[0]))
        reference = references[0]
        stop_together(folder, reference.step + 1)
        reference.begin(reference.step + 1)
        return plain_step(args, model, optimizer, data)

    script.train_step = train_step
    try:
        script.main([*arguments, "--steps", str(MOST_STEPS)])
    except Stopped:
        pass
    finally:
        script.train_step = plain_step
        np.savez(folder / f"reference-{dist_rank()}.npz", **references[0].kept)


def dist_rank() -> int:
    import os

    return int(os.environ["RANK"])


def stop_together(folder: Path, step: int) -> None:
    """Rank 0 says at which step, ahead of it: no rank is ever a whole step before another."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0 and (folder / STOP).exists() and not store.check([STOP]):
        store.set(STOP, str(step + 3))
    if store.check([STOP]) and step >= int(store.get(STOP)):
        raise Stopped


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
