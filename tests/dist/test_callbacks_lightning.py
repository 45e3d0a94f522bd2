"""The callback of Lightning, under both its names: what is recorded of a fit, and what is left after it."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

import trimtab
from trimtab.attach import Session, current_session
from trimtab.callbacks.held import HeldSession
from trimtab.events import Kind
from trimtab.traces.read import read

LIBRARIES = ("lightning.pytorch", "pytorch_lightning")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    LIGHTNING = {name: pytest.importorskip(name, reason=f"{name} is not installed") for name in LIBRARIES}
    from trimtab.callbacks.lightning import TrimtabCallback

STEPS = 4
ACCUMULATE = 2


def _fit(library: str, folder: Path, callbacks: list[Any], fail_at: int = -1) -> tuple[Any, list[float]]:
    """Train on each rank's own data; the trainer and this rank's losses."""
    lightning = importlib.import_module(library)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            if batch_idx == fail_at:
                raise RuntimeError("training fails")
            loss = (self(batch) - 1).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.rand(8 * STEPS * ACCUMULATE, 8), batch_size=4)
    saver = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 2,
        strategy="ddp",
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=2 * ACCUMULATE,
        limit_val_batches=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver, *callbacks],
    )
    model = Model()
    trainer.fit(model, data, data)
    return trainer, model.losses


def _job(rank: int, library: str, folder: str) -> dict[str, Any]:
    expected = _fit(library, Path(folder, "plain"), [])[1]
    callback = TrimtabCallback(engine={"name": "torch"}, record={"dir": f"{folder}/run"})
    trainer, losses = _fit(library, Path(folder, "watched"), [callback])
    return {
        "expected": expected,
        "losses": losses,
        "attached_after": current_session() is not None,
        "left_on_trainer": "save_checkpoint" in vars(trainer),
    }


@pytest.mark.parametrize("library", [LIBRARIES[0], pytest.param(LIBRARIES[1], marks=pytest.mark.slow)])
def test_a_fit_is_recorded_and_nothing_else_changes(library: str, tmp_path: Path) -> None:
    for result in run_ranks(2, _job, library, str(tmp_path)):
        assert result["losses"] == result["expected"]
        assert len(result["losses"]) == STEPS * ACCUMULATE
        assert not result["attached_after"]
        assert not result["left_on_trainer"]
    trace = read(tmp_path / "run")
    assert trace.missing_ranks == ()
    assert all(info.closed and info.dropped == 0 for info in trace.ranks.values())
    events = trace.events.with_columns(pl.col("kind", "name").cast(pl.String))
    for rank in range(2):
        own = events.filter(pl.col("rank") == rank)
        assert own.filter(pl.col("name") == "step")["step"].sort().to_list() == list(range(STEPS))
        optimizer = own.filter(pl.col("kind") == "optimizer")
        assert optimizer["step"].sort().to_list() == list(range(STEPS))
        in_steps = own.filter(pl.col("step") >= 0)
        evaluation = in_steps.filter(pl.col("kind") == "evaluation")
        assert evaluation.filter(pl.col("name") == "validation").height == 2
        assert in_steps.filter(pl.col("kind") == "checkpoint").height == 2
        assert own.filter(pl.col("kind") == "data").height >= STEPS * ACCUMULATE
        assert in_steps.filter(pl.col("name") == "all_reduce").height >= STEPS
        forward = in_steps.filter((pl.col("kind") == "forward") & (pl.col("name") == "layer"))
        backward = in_steps.filter((pl.col("kind") == "backward") & (pl.col("name") == "layer"))
        assert forward.height >= backward.height >= 3 * STEPS * ACCUMULATE


def _attached_before(rank: int, folder: str) -> list[Any]:
    with trimtab.attach(engine={"name": "torch"}, record={"dir": f"{folder}/run"}) as session:
        _fit(LIBRARIES[0], Path(folder, "model"), [TrimtabCallback(record={"dir": f"{folder}/other"})])
        return [current_session() is session, Path(folder, "other").exists()]


def test_a_session_that_was_there_is_used_and_stays(tmp_path: Path) -> None:
    assert run_ranks(2, _attached_before, str(tmp_path)) == [[True, False]] * 2
    events = read(tmp_path / "run").events.with_columns(pl.col("kind").cast(pl.String))
    assert events.filter((pl.col("kind") == "evaluation") & (pl.col("step") >= 0)).height >= 2


def _failing(rank: int, folder: str) -> bool:
    callback = TrimtabCallback(engine={"name": "torch"}, record={"dir": f"{folder}/run"})
    with pytest.raises(RuntimeError, match="training fails"):
        _fit(LIBRARIES[0], Path(folder, "model"), [callback], fail_at=2)
    return current_session() is None


def test_a_fit_that_fails_is_detached(tmp_path: Path) -> None:
    assert run_ranks(2, _failing, str(tmp_path)) == [True, True]
    assert all(info.closed for info in read(tmp_path / "run").ranks.values())


def _broken(rank: int, folder: str) -> list[float]:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("within trimtab")

    Session.step = fails  # type: ignore[method-assign]  (of this rank's own process)
    callback = TrimtabCallback(engine={"name": "torch"}, record={"dir": f"{folder}/run"})
    return _fit(LIBRARIES[0], Path(folder, "model"), [callback])[1]


def test_what_fails_in_the_callback_does_not_fail_the_fit(tmp_path: Path) -> None:
    losses = run_ranks(2, _broken, str(tmp_path), allow_warnings=True)
    assert [len(one) for one in losses] == [STEPS * ACCUMULATE] * 2


def test_nor_does_a_failure_around_a_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        active = True
        detached = False

        def span(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("within trimtab")

        @property
        def recorder(self) -> Broken:
            return self

    held = HeldSession(None, {})
    held.session = Broken()  # type: ignore[assignment]
    held.begin(Kind.CHECKPOINT)
    held.end(Kind.CHECKPOINT, "save")
    assert held.session is None
    assert "within trimtab" in caplog.text


def test_it_is_a_callback_of_both_libraries() -> None:
    assert issubclass(TrimtabCallback, tuple(library.Callback for library in LIGHTNING.values()))
    assert all(issubclass(TrimtabCallback, library.Callback) for library in LIGHTNING.values())


def test_no_library_is_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LIBRARIES, "trimtab.callbacks.lightning"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"import lightning.pytorch \(or pytorch_lightning\) before"):
        importlib.import_module("trimtab.callbacks.lightning")
