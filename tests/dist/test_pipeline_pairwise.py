"""Real pipelines in real processes: orders, policies, layouts, caps, transports, split and delays, in all pairs."""

from __future__ import annotations

import itertools

import pytest
from harness import run_ranks
from pipeline_matrix import Case, pairwise, possible, run_cases, transports

MOST = 60
POSSIBLE = list(possible(transports()))
CHOSEN = pairwise(POSSIBLE)
WORLDS = sorted({(case.stages, case.transport) for case in POSSIBLE})


def test_few_runs_cover_every_pair_that_can_be() -> None:
    def pairs(cases: list[Case]) -> set[object]:
        return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}

    assert pairs(CHOSEN) == pairs(POSSIBLE)
    assert len(CHOSEN) <= MOST


@pytest.mark.parametrize(("stages", "transport"), WORLDS)
def test_chosen_pairwise(stages: int, transport: str) -> None:
    cases = [case for case in CHOSEN if (case.stages, case.transport) == (stages, transport)]
    assert run_ranks(stages, run_cases, cases) == [len(cases)] * stages


@pytest.mark.nightly
@pytest.mark.parametrize("order", sorted({case.order for case in POSSIBLE}))
@pytest.mark.parametrize(("stages", "transport"), WORLDS)
def test_all(order: str, stages: int, transport: str) -> None:
    cases = [case for case in POSSIBLE if (case.order, case.stages, case.transport) == (order, stages, transport)]
    assert run_ranks(stages, run_cases, cases, timeout=280) == [len(cases)] * stages
