"""Who this process is: its rank, the run it belongs to, and which attempt at that run it is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trimtab import __version__
from trimtab.events import SCHEMA_VERSION

# Launchers in order of preference: torchrun and whoever follows it, Slurm, Open MPI.
_RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, slots=True)
class Identity:
    """A process's place in a run."""

    rank: int
    world_size: int
    run_id: str
    """Equal on all ranks of a run, different for the next run wherever the launcher gives something to tell by."""
    attempt: int
    """Restarts of the run so far, as the launcher counts them."""


def identify(environment: Mapping[str, str], run_id: str = "") -> Identity:
    """From the launcher's variables, and from torch.distributed where that is initialised already.

    Raises ValueError in one line where the variables contradict each other.
    """
    rank, world_size = _initialised() or _launched(environment)
    if not 0 <= rank < world_size:
        raise ValueError(f"environment: rank {rank} is not in a world of {world_size}; check RANK and WORLD_SIZE")
    attempt = max(_number(environment, name) for name in _RESTARTS)
    return Identity(rank, world_size, run_id or _run_id(environment, world_size), attempt)


def _initialised() -> tuple[int, int] | None:
    torch = sys.modules.get("torch")  # never imported for this
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _launched(environment: Mapping[str, str]) -> tuple[int, int]:
    for rank, world in _RANKS:
        if rank in environment and world in environment:
            return _number(environment, rank), _number(environment, world)
    return 0, 1


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment: {name}={text!r} is not a number") from None


def _run_id(environment: Mapping[str, str], world_size: int) -> str:
    """The launcher's name for the run. Where it has none that is its own, a digest of what all ranks share."""
    elastic = environment.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return elastic
    if environment.get("SLURM_JOB_ID"):
        return f"slurm-{environment['SLURM_JOB_ID']}.{environment.get('SLURM_STEP_ID', '0')}"
    if world_size == 1:
        return f"{os.getpid()}-{_digest(str(_started(os.getpid())))}"
    shared = [environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE")]
    if environment.get("LOCAL_WORLD_SIZE") == str(world_size):
        # .../<launch>/attempt_0/<rank>/error.json, where the folder <launch> is new each time
        shared.extend(str(folder) for folder in list(Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parents)[2:3])
    return f"run-{_digest('|'.join(shared))}"


def directory_of(configured: str) -> Path:
    """``record.dir`` on this host: ``{host}`` stands for the host's name, so that each node may have a folder."""
    path = Path(configured.replace("{host}", socket.gethostname().replace("/", "_") or "localhost"))
    return path.resolve()  # the job may change to another directory


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _started(pid: int) -> float:
    try:
        return Path(f"/proc/{pid}").stat().st_ctime
    except OSError:
        return 0.0


def make_header(
    identity: Identity, *, device: str, device_name: str, granularity: str, unix_offset_ns: int, clock_domain: str
) -> dict[str, Any]:
    """The file header of :data:`trimtab.events.HEADER_KEY`; the spool adds the number of the file."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": identity.run_id,
        "attempt": identity.attempt,
        "rank": identity.rank,
        "world_size": identity.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": device,
        "device_name": device_name,
        "clock_domain": clock_domain,
        "unix_offset_ns": unix_offset_ns,
        "granularity": granularity,
        "versions": _versions(),
        "started_unix_ns": time.time_ns(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "trimtab": __version__}
    for name in ("torch", "megatron-core", "numpy", "pyarrow"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
