"""Stock Megatron-Core trained with its forward ranks as threads of one process: what processes of their own make."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbd_megatron_job import _TEXT, SCRIPT, SMALL
from harness import RankError, load_script, run_ranks

from trimtab.engines import cpu
from trimtab.engines.megatron_fbd import FbdJob, Role, Settings
from trimtab.engines.threads.fbd import run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]
STEPS = 8
slow = pytest.mark.slow


def _rank(process: int, arguments: list[str], together: int, fails: bool = False) -> list[Any]:
    script: Any = load_script(SCRIPT)
    args = script.parse_arguments(["--steps", str(STEPS), *SMALL, *arguments])
    settings: Settings = script.settings_of(args)

    def main(job: FbdJob, initialize: Callable[[], None]) -> list[Any]:
        from megatron.core import parallel_state

        initialize()
        backward = job.role is Role.BACKWARD  # whose optimizer needs them
        parallel_state.initialize_model_parallel(job.tp, args.pp, create_gloo_process_groups=backward)
        schedule = job.schedule
        if fails and job.role is Role.FORWARD and job.rank.tp == 1:
            schedule = _failing(job.schedule)
        try:
            losses, model = script.train(args, _TEXT, schedule, job.role)
            job.close()
        finally:
            if backward:
                parallel_state.destroy_model_parallel()
        digest = hashlib.sha256()
        for one in model.parameters():
            digest.update(one.detach().float().numpy().tobytes())
        return [str(job.rank), losses, digest.hexdigest(), float(torch.rand(1))]

    undo = cpu.install()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = run(settings, together, main)
    finally:
        undo()
    if dist.is_initialized():  # a backward process, or a forward rank of its own
        dist.destroy_process_group()
    return found


def _failing(schedule: Callable[..., Any]) -> Callable[..., Any]:
    left = [3]

    def failing(**keywords: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("this forward rank cannot go on")
        return schedule(**keywords)

    return failing


def trained(world: int, arguments: list[str], together: int) -> dict[str, Any]:
    results = run_ranks(world, _rank, arguments, together, allow_warnings=True)
    return {name: rest for process in results for name, *rest in process}


@pytest.mark.parametrize(
    ("backwards", "forwards", "together", "arguments"),
    [
        pytest.param(2, 2, 2, ["--tp", "2", "--dropout", "0.1"], id="tp2"),
        pytest.param(2, 2, 2, ["--pp", "2", "--dropout", "0.1", "--bf16"], id="pp2-bf16", marks=slow),
        pytest.param(4, 4, 4, ["--tp", "2", "--pp", "2"], id="tp2-pp2", marks=slow),
        pytest.param(1, 2, 2, ["--forwards", "2", "--mode", "recompute"], id="2:1-recompute", marks=slow),
        pytest.param(4, 2, 2, ["--tp", "2", "--forward-tp", "1", "--pp", "2"], id="tp1-tp2-pp2", marks=slow),
    ],
)
def test_threads_train_what_processes_do(backwards: int, forwards: int, together: int, arguments: list[str]) -> None:
    apart = trained(backwards + forwards, arguments, 1)
    assert len(apart) == backwards + forwards
    assert trained(backwards + forwards // together, arguments, together) == apart
    losses = next(one[0] for one in apart.values() if one[0])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


def test_a_thread_that_fails_ends_the_job() -> None:
    with pytest.raises(RankError) as refused:
        run_ranks(3, _rank, ["--tp", "2"], 2, True, allow_warnings=True, timeout=60)
    text = str(refused.value)
    assert "ValueError: this forward rank cannot go on" in text
    assert "trimtab: in the thread of forward rank of stage 0, instance 0, tensor parallel 1" in text
    assert "PeerLost" in text


def test_processes_that_cannot_be_divided_so_are_refused() -> None:
    with pytest.raises(RankError, match="3 processes cannot be divided: 2 backward ranks and 2 forward ranks"):
        run_ranks(3, _rank, ["--tp", "2"], 3, allow_warnings=True, timeout=60)
