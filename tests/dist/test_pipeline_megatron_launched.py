"""The example script as users start it: by the launcher, under ``trimtab run``, with a policy in the configuration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import REPOSITORY, free_port

JOB = ("--steps", "2", "--hidden-size", "16", "--heads", "2", "--seq-length", "16", "--data", __file__)


def _losses(folder: Path, ranks: int, policy: str, *arguments: str) -> list[str]:
    settings = folder / f"{policy}.toml"
    settings.write_text(
        f'[pipeline]\npolicy = "{policy}"\n[engine]\ncpu_shim = true\n[record]\ndir = "{folder}/{policy}"\n'
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-port", str(free_port()), "-m", "trimtab", "run", "--config", str(settings)]
    script = [str(REPOSITORY / "examples" / "pretrain_gpt.py"), *JOB, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*launcher, *script], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "trimtab:" not in done.stderr
    return re.findall(r"loss (\d+\.\d+)", done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)  # each rank imports torch and Megatron-Core
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [(2, ("--pp", "2")), (4, ("--pp", "2", "--vpp", "2")), (4, ("--tp", "2", "--pp", "2"))],
    ids=["pp2", "pp2_vpp2_dp2", "tp2_pp2"],
)
def test_the_example_trains_with_the_same_losses(tmp_path: Path, ranks: int, arguments: tuple[str, ...]) -> None:
    losses = _losses(tmp_path, ranks, "auto", *arguments)
    assert len(losses) == 2
    assert losses == _losses(tmp_path, ranks, "off", *arguments)
