"""The harness itself: results, failures, hangs, and nobody left behind."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch
import torch.distributed as dist
from harness import RankError, run_ranks


def _sum_of_ranks(rank: int, factor: int) -> dict[str, float]:
    dist.init_process_group("gloo")
    value = torch.tensor([float(rank * factor)])
    dist.all_reduce(value)
    return {"sum": value.item(), "pid": os.getpid()}


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise KeyError("the reason")


def _one_hangs(rank: int) -> None:
    if rank == 0:
        threading.Event().wait()


def _dies(rank: int) -> None:
    os._exit(7)


def _warns(rank: int) -> int:
    logging.getLogger("trimtab.engine").warning("stepping aside")
    logging.getLogger("megatron").warning("not ours")
    return rank


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(3, _sum_of_ranks, 10)
    assert [r["sum"] for r in results] == [30.0, 30.0, 30.0]
    assert os.getpid() not in {r["pid"] for r in results}
    assert len({r["pid"] for r in results}) == 3


def test_a_traceback_is_passed_on() -> None:
    with pytest.raises(RankError, match=r"rank 1(.|\n)*KeyError: 'the reason'"):
        run_ranks(2, _one_raises)


def test_a_hang_ends_at_the_timeout_and_says_where() -> None:
    with pytest.raises(RankError, match=r"rank 0(.|\n)*_one_hangs"):
        run_ranks(2, _one_hangs, timeout=3)


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(RankError, match="exit code 7"):
        run_ranks(1, _dies)


def test_trimtab_must_not_warn_unless_allowed() -> None:
    with pytest.raises(RankError, match="stepping aside"):
        run_ranks(1, _warns)
    assert run_ranks(2, _warns, allow_warnings=True) == [0, 1]


def test_the_parent_may_have_used_autograd() -> None:
    torch.ones(2, requires_grad=True).sum().backward()
    assert run_ranks(1, _backward) == [3.0]


def _backward(rank: int) -> float:
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    assert x.grad is not None
    return x.grad.sum().item()
