"""The example script with Megatron-Core's pipelines under our policies, where stages may share a GPU; by torchrun.

``torchrun --nproc-per-node N -m tests.gpu.megatron_pipeline DIR STAGES CHUNKS [POLICY[+ORDER] ...]`` writes what each
rank has after each policy, ``stock`` being Megatron-Core's own. NCCL refuses two ranks on one GPU, so that collectives
are gloo's, and messages go over UCX.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from harness import load_script
from megatron.core.distributed import param_and_grad_buffer
from megatron_job import SCRIPT
from megatron_pipeline_job import SMALL, Variant, _prepare

from trimtab.config import Config, PipelineConfig, TransportConfig
from trimtab.engines.megatron_pipeline import MegatronPipeline

VARIANT = Variant(config={"hidden_dropout": 0.0})


def run(policy: str, arguments: list[str]) -> dict[str, Any]:
    """What this rank has after the job under a policy."""
    script, kept = load_script(SCRIPT), {"seen": [], "gradients": []}
    functions = dict(vars(script))
    _prepare(VARIANT, kept, script)
    pipeline = None
    if policy != "stock":
        transport = TransportConfig(kind="ucx")
        name, _, order = policy.partition("+")
        config = Config(pipeline=PipelineConfig(name, order or "auto"), transport=transport)  # pyright: ignore[reportArgumentType]
        pipeline = MegatronPipeline(config, strict=True)
        pipeline.install()
    try:
        kept["losses"] = script.main(arguments)
    finally:
        vars(script).update(functions)
        if pipeline is not None:
            pipeline.remove()
    return kept


def main(folder: str, stages: str, chunks: str, *policies: str) -> None:
    """Each policy in turn."""
    join, set_device = dist.init_process_group, torch.cuda.set_device
    dist.init_process_group = lambda *_: join("cpu:gloo,cuda:gloo")
    # gloo reduces tensors of a GPU one by one, but not together
    param_and_grad_buffer._coalescing_manager = lambda *_, **__: nullcontext()
    devices = torch.cuda.device_count()
    torch.cuda.set_device = lambda device: set_device(device % devices if isinstance(device, int) else device)
    port = int(os.environ["MASTER_PORT"])
    for number, policy in enumerate(policies):
        os.environ["MASTER_PORT"] = str(port + 1 + number)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        kept = run(policy, [*SMALL, "--steps", "2", "--pp", stages, "--vpp", chunks])
        torch.save(kept, Path(folder, f"{policy}-{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
