"""Tensor parallel ranks of stock Megatron-Core as threads: what processes compute, bit for bit, dropout included."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, load_script, run_ranks

from trimtab.engines import cpu
from trimtab.engines.threads.megatron import MegatronGlobals
from trimtab.engines.threads.worlds import BACKEND, Worlds
from trimtab.fbd.split.places import Places
from trimtab.fbd.split.skeleton import shipment_of
from trimtab.fbd.threads.together import together
from trimtab.fbd.threads.turns import OwnRandom, Turns

pytestmark = [pytest.mark.dist, pytest.mark.timeout(150)]
MICROBATCHES, TOKENS, PATIENCE = 3, 16, 30.0


def forwards(tp: int, changes: dict[str, Any], fails: int = -1) -> list[Any]:
    """Losses and a digest of all that a rank would ship of some microbatches, in a world that is there; ``fails``: the
    rank that does after one of them."""
    from megatron.core import parallel_state, tensor_parallel

    script = load_script("examples/pretrain_gpt.py")
    args = script.parse_arguments(["--tp", str(tp), "--num-layers", "2", "--seq-length", str(TOKENS)])
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
    torch.manual_seed(11)
    tensor_parallel.model_parallel_cuda_manual_seed(11)
    config = script.transformer_config(args)
    for name, value in {"hidden_dropout": 0.1, "attention_dropout": 0.1, **changes}.items():
        setattr(config, name, value)
    (model,) = script.build_chunks(args, config)
    places = Places([*model.parameters(), *model.buffers()])
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    found: list[Any] = []
    for number in range(MICROBATCHES):
        words = torch.randint(256, (2, TOKENS + 1), generator=torch.Generator().manual_seed(number))
        positions = torch.arange(TOKENS).expand(2, -1)

        def forward(words: torch.Tensor = words, positions: torch.Tensor = positions) -> tuple[torch.Tensor]:
            return (model(words[:, :-1], positions, mask, labels=words[:, 1:].contiguous()).mean(),)

        (loss,), shipment = shipment_of(forward, places)
        digest = hashlib.sha256()
        for one in shipment.tensors:
            digest.update(one.numpy().tobytes())
        found.append([float(loss), digest.hexdigest()])
        if dist.get_rank() == fails:
            raise ValueError("this one fails")
    found.append([float(torch.rand(1)), parallel_state.get_tensor_model_parallel_rank()])
    return found


def _process(rank: int, tp: int, changes: dict[str, Any]) -> list[Any]:
    dist.init_process_group("gloo")
    undo = cpu.install()
    try:
        return forwards(tp, changes)
    finally:
        undo()


def _threads(process: int, tp: int, processes: int, changes: dict[str, Any], fails: int = -1) -> list[Any]:
    """All of this process's ranks."""
    store: Any = dist.HashStore()
    if processes > 1:
        dist.init_process_group("gloo")
        store = dist.PrefixStore("forwards", dist.distributed_c10d._get_default_store())
    each = tp // processes
    ranks = range(process * each, (process + 1) * each)
    undo = cpu.install()
    try:
        with Worlds(store, PATIENCE) as worlds:
            turns = worlds.turns = Turns(each, [OwnRandom(), worlds, MegatronGlobals()])

            def one(rank: int) -> list[Any]:
                worlds.initialize(rank, tp)
                assert dist.get_backend() == BACKEND
                return forwards(tp, changes, fails)

            found = together(ranks, one, turns)
    finally:
        undo()
    assert dist.is_initialized() == (processes > 1)
    assert BACKEND not in dist.Backend.backend_list
    return found


def flat(results: list[list[Any]]) -> list[Any]:
    return [one for process in results for one in process]


@pytest.mark.parametrize(
    ("tp", "processes"),
    [
        pytest.param(2, 1, id="tp2-in-one-process"),
        pytest.param(4, 2, id="tp4-in-two-processes"),
        pytest.param(4, 1, id="tp4-in-one-process", marks=pytest.mark.slow),
    ],
)
def test_threads_compute_and_draw_what_processes_do(tp: int, processes: int) -> None:
    apart = run_ranks(tp, _process, tp, {}, allow_warnings=True)
    beside = flat(run_ranks(processes, _threads, tp, processes, {}, allow_warnings=True))
    assert beside == apart
    assert len({rank[-1][1] for rank in apart}) == tp
    assert len({rank[0][1] for rank in apart}) == tp  # dropout of model parallel regions differs from rank to rank


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rank_that_fails_ends_those_that_wait_for_it_in_a_collective(processes: int) -> None:
    with pytest.raises(RankError) as refused:
        run_ranks(processes, _threads, 2 * processes, processes, {}, 1, allow_warnings=True, timeout=25)
    text = str(refused.value)
    assert "ValueError: this one fails" in text
    assert "trimtab: in the thread of 1" in text
    assert "OtherFailed" not in text
    assert text.count("--- rank") == processes


def test_a_process_with_groups_of_its_own_is_refused() -> None:
    def run(_: int) -> str:
        from megatron.core import parallel_state

        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        with pytest.raises(ValueError, match="threads have each to make their own"):
            MegatronGlobals()
        parallel_state.destroy_model_parallel()
        with Worlds(dist.HashStore()), pytest.raises(ValueError, match="one Worlds is open at a time"):
            Worlds(dist.HashStore()).__enter__()
        return "refused"

    assert run_ranks(1, run, allow_warnings=True) == ["refused"]
