"""The example whose forwards and backwards are apart, by torchrun, on GPUs that its processes may share.

``torchrun --nproc-per-node N -m tests.gpu.megatron_fbd DIR CASE ...`` trains each case, and once more in the ordinary
way, and writes what each process has to ``DIR/CASE-PROCESS.json``. NCCL refuses two ranks on one GPU, so that
collectives are gloo's, and what goes between forwards and backwards goes over UCX.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import fbd_megatron
import pretrain_gpt
from megatron.core.distributed import param_and_grad_buffer

from trimtab.config import TransportConfig
from trimtab.engines.megatron_fbd import join

SIZE = "--num-layers 2 --hidden-size 256 --heads 4 --seq-length 256 --micro-batch-size 1 --global-batch-size 4 --check"
LARGE = (
    "--num-layers 1 --hidden-size 4096 --heads 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 2 --check"
)
NARROW = "--tp 2 --forward-tp 1"


@dataclass(frozen=True)
class Case:
    """Arguments of the example, and changes of Megatron-Core's configuration."""

    arguments: str
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: int = 4


SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
LLAMA = {"gated_linear_unit": True, "num_query_groups": 2, "activation_func": torch.nn.functional.silu}
CASES = {
    "ship": Case(SIZE),
    "ship-bf16": Case(f"{SIZE} --bf16 --dropout 0.1"),
    "recompute-bf16": Case(f"{SIZE} --bf16 --dropout 0.1 --mode recompute"),
    "selective": Case(SIZE, SELECTIVE),
    "narrow": Case(f"{SIZE} {NARROW}"),
    "narrow-selective-bf16": Case(f"{SIZE} {NARROW} --bf16", SELECTIVE),
    "narrow-swiglu-gqa": Case(f"{SIZE} {NARROW}", LLAMA),
    "narrow-large-bf16": Case(f"{LARGE} {NARROW} --bf16 --lr 1e-5 --check", SELECTIVE, 2),
}


def run(case: Case) -> dict[str, Any]:
    """Losses of this process, and on backward processes the greatest difference from ordinary training."""
    make, compare = pretrain_gpt.transformer_config, fbd_megatron.check
    found: dict[str, Any] = {}

    def configured(args: Any) -> Any:
        config = make(args)
        for name, value in case.config.items():
            setattr(config, name, value)
        return config

    def compared(*given: Any) -> float:
        found["difference"] = compare(*given)
        return found["difference"]

    pretrain_gpt.transformer_config, fbd_megatron.check = configured, compared
    args = fbd_megatron.parse_arguments(f"{case.arguments} --steps {case.steps} --log-interval 100".split())
    settings = replace(fbd_megatron.settings_of(args), transport=TransportConfig(kind="ucx"))
    try:
        with join(settings) as job:
            found["role"] = str(job.role)
            found["losses"] = fbd_megatron.run(args, job)
    finally:
        pretrain_gpt.transformer_config, fbd_megatron.check = make, compare
    return found


def main(folder: str, *names: str) -> None:
    """Each case in turn."""
    process, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    torch.cuda.set_device(process % torch.cuda.device_count())
    torch.use_deterministic_algorithms(True)
    text = pretrain_gpt.load_text(None, 1)
    pretrain_gpt.load_text = lambda *_, **__: text
    begin = dist.init_process_group
    dist.init_process_group = lambda *_: begin("cpu:gloo,cuda:gloo")
    # gloo reduces tensors of a GPU one by one, but not together
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: nullcontext()
    for number, name in enumerate(names):
        os.environ |= {"MASTER_PORT": str(port + 1 + number), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        found = run(CASES[name])
        Path(folder, f"{name}-{process}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
