"""Who a process is, from what its launcher left in the environment."""

from __future__ import annotations

import sys

import pytest
from spool_files import header

from trimtab.events import SCHEMA_VERSION
from trimtab.record.run_identity import identify

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_abc/none_xyz/attempt_2/3/error.json",
}


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_torchrun() -> None:
    identity = identify(TORCHRUN)
    assert (identity.rank, identity.world_size, identity.attempt) == (3, 4, 2)


def test_ranks_and_restarts_of_a_run_share_its_name_and_the_next_run_does_not() -> None:
    name = identify(TORCHRUN).run_id
    errors = "TORCHELASTIC_ERROR_FILE"
    other_rank = TORCHRUN | {"RANK": "0", errors: "/tmp/torchelastic_abc/none_xyz/attempt_2/0/error.json"}
    restarted = TORCHRUN | {errors: "/tmp/torchelastic_abc/none_xyz/attempt_3/3/error.json"}
    next_run = TORCHRUN | {errors: "/tmp/torchelastic_def/none_uvw/attempt_0/3/error.json"}
    assert identify(other_rank).run_id == name
    assert identify(restarted).run_id == name
    assert identify(next_run).run_id != name


def test_hosts_of_a_run_share_its_name() -> None:
    first = TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}
    second = first | {"TORCHELASTIC_ERROR_FILE": "/tmp/elsewhere/none_q/attempt_2/0/error.json"}
    assert identify(first).run_id == identify(second).run_id


def test_restarts_are_counted_by_whoever_restarts() -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77"}
    assert identify(slurm).attempt == 0
    requeued = identify(slurm | {"SLURM_RESTART_COUNT": "3"})
    assert (requeued.attempt, requeued.run_id) == (3, identify(slurm).run_id)
    assert identify(TORCHRUN | {"SLURM_RESTART_COUNT": "1"}).attempt == 2
    with pytest.raises(ValueError, match="SLURM_RESTART_COUNT='x' is not a number"):
        identify(slurm | {"SLURM_RESTART_COUNT": "x"})


def test_names_in_order_of_preference() -> None:
    slurm = TORCHRUN | {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}
    assert identify(slurm, "mine").run_id == "mine"
    assert identify(slurm | {"TORCHELASTIC_RUN_ID": "elastic"}).run_id == "elastic"
    assert identify(slurm).run_id == "slurm-77.1"


def test_other_launchers_and_none() -> None:
    slurm = identify({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert (slurm.rank, slurm.world_size) == (1, 2)
    mpi = identify({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"})
    assert (mpi.rank, mpi.world_size) == (5, 8)
    alone = identify({})
    assert (alone.rank, alone.world_size, alone.attempt) == (0, 1, 0)
    assert alone.run_id == identify({}).run_id != ""


def test_short_error_file_paths_do_no_harm() -> None:
    assert identify(TORCHRUN | {"TORCHELASTIC_ERROR_FILE": "e.json"}).run_id


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"RANK": "4"}, "rank 4 is not in a world of 4"),
        ({"RANK": "three"}, "RANK='three' is not a number"),
        ({"WORLD_SIZE": "0"}, "rank 3 is not in a world of 0"),
    ],
)
def test_contradictions_are_one_line(changes: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        identify(TORCHRUN | changes)


def test_the_header_says_what_the_contract_asks_for() -> None:
    found = header(rank=2)
    expected = (
        "schema_version run_id attempt rank world_size host pid device device_name clock_domain unix_offset_ns "
        "granularity versions started_unix_ns"
    )
    assert list(found) == expected.split()
    assert found["schema_version"] == SCHEMA_VERSION
    assert {"python", "trimtab", "torch", "numpy", "pyarrow"} <= set(found["versions"])
