"""The callback of Megatron-Bridge, called by a stand-in, and its base class where the real one is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import bridge_stand_in
import polars as pl
import pytest
import torch.distributed as dist
from harness import load_script, run_ranks
from megatron.core import parallel_state, tensor_parallel

import trimtab
from trimtab.attach import current_session
from trimtab.engines import cpu
from trimtab.traces.read import read

SCRIPT = "examples/pretrain_gpt.py"
STEPS = 4
load_script(SCRIPT)  # before the fork


def _pretrain(callbacks: list[Any]) -> list[float]:
    script = load_script(SCRIPT)
    functions = dict(vars(script))
    try:
        return bridge_stand_in.pretrain(script, ["--pp", "2", "--steps", str(STEPS)], callbacks)
    finally:
        vars(script).update(functions)


def _job(rank: int, folder: str, attached_before: bool) -> dict[str, Any]:
    bridge_stand_in.put_in_place()
    from trimtab.callbacks.megatron_bridge import TrimtabCallback

    undo = cpu.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 2)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    expected = _pretrain([])
    session = trimtab.attach(record={"dir": folder}) if attached_before else None
    callback = TrimtabCallback(record={"dir": folder})
    assert isinstance(callback, bridge_stand_in.Callback)
    losses = _pretrain([callback])
    stays = current_session() is session
    if session is not None:
        session.detach()
    undo()
    return {"expected": expected, "losses": losses, "as_before": stays}


@pytest.mark.parametrize("attached_before", [False, True], ids=["own_session", "attached_before"])
def test_a_pretraining_is_recorded_and_nothing_else_changes(attached_before: bool, tmp_path: Path) -> None:
    results = run_ranks(2, _job, str(tmp_path), attached_before)
    assert [len(result["losses"]) for result in results] == [0, STEPS]
    for result in results:
        assert result["losses"] == result["expected"]
        assert result["as_before"]
    trace = read(tmp_path)
    assert trace.missing_ranks == ()
    assert all(info.closed and info.dropped == 0 for info in trace.ranks.values())
    events = trace.events.with_columns(pl.col("kind", "name").cast(pl.String))
    for rank in range(2):
        own = events.filter(pl.col("rank") == rank)
        assert own.filter(pl.col("name") == "step")["step"].sort().to_list() == list(range(STEPS))
        assert own.filter(pl.col("kind") == "optimizer")["step"].sort().to_list() == list(range(STEPS))
        assert own.filter((pl.col("kind") == "evaluation") & (pl.col("name") == "validation")).height == STEPS // 2
        assert own.filter((pl.col("kind") == "forward") & (pl.col("name") == "layer")).height > 0
        assert own.filter(pl.col("kind").is_in(["send", "recv"])).height > 0


def test_the_library_is_not_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.bridge", raising=False)
    monkeypatch.delitem(sys.modules, "trimtab.callbacks.megatron_bridge", raising=False)
    with pytest.raises(ImportError, match=r"import megatron.bridge before"):
        importlib.import_module("trimtab.callbacks.megatron_bridge")


def _installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ImportError:
        return False


@pytest.mark.skipif(not _installed(), reason="megatron-bridge is not installed: only the stand-in was tried")
def test_the_real_library_has_every_event_that_is_used() -> None:
    importlib.import_module("megatron.bridge")
    real = importlib.import_module("megatron.bridge.training.callbacks")
    callback = importlib.import_module("trimtab.callbacks.megatron_bridge").TrimtabCallback
    events = {name for name in vars(callback) if name.startswith("on_")}
    assert issubclass(callback, real.Callback)
    assert events <= set(real.CallbackManager().events)
