"""A live job for a browser: TP2 x PP2 on emulated devices, which leave the processor to the browser most of the time.

    python browser_live_job.py FOLDER

trains until FOLDER/stop is there; rank 3 is slow from step 60 on. One process imports, and forks the ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from harness import load_script, run_ranks
from scope_live_job import MOST_STEPS, Stopped, stop_together

WORLD = 4
MODEL = ("--tp", "2", "--pp", "2", "--num-layers", "4", "--hidden-size", "32", "--heads", "4", "--seq-length", "32")
JOB = (*MODEL, "--micro-batch-size", "1", "--global-batch-size", "2", "--steps", str(MOST_STEPS))
SETTINGS = (
    *("engine.name=megatron", "engine.cpu_shim=true", "emulate.enabled=true", "emulate.layer_forward_ms=12"),
    *("scope.look_seconds=0.1", "scope.allow_perturb=true", "scope.budget=1.0"),
    'faults.inject=["slow_compute:rank=3,factor=2,steps=60-"]',
)


def _rank(rank: int, folder: str) -> None:
    from trimtab import launch

    launch.run(__file__, [folder, *JOB], settings=(*SETTINGS, f"record.dir={folder}"))


def train(folder: Path, arguments: list[str]) -> None:
    """On one rank."""
    script = load_script("examples/pretrain_gpt.py")
    plain_step, steps = script.train_step, iter(range(MOST_STEPS))

    def train_step(*given: Any) -> Any:
        stop_together(folder, next(steps))
        return plain_step(*given)

    script.train_step = train_step
    try:
        script.main(arguments)
    except Stopped:
        pass
    finally:
        script.train_step = plain_step


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(Path(sys.argv[1]), sys.argv[2:])
    else:
        run_ranks(WORLD, _rank, sys.argv[1], timeout=900, allow_warnings=True)
