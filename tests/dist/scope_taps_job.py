"""Everything that a model offers to scope, collected while it trains, and put together from the ranks' parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron_job import FakeRecorder, Listener, train

from trimtab.engines.megatron import MegatronEngine
from trimtab.scope.moment import Moment
from trimtab.scope.taps.points import AttentionInput, ModelPoints

Piece = dict[str, Any]
"""What one rank saw of one tensor: {"tap", "moment", "tensor"}."""


class Collector:
    """In the place of a session of scope: connects every point, and keeps what comes in some steps."""

    def __init__(
        self,
        steps: Sequence[int] = (0,),
        change: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
        compiled: bool = False,
    ) -> None:
        """``change``: what is given in return for what was kept, by the tap's name."""
        self.job = SimpleNamespace(chunks=[], lookahead=None, config=SimpleNamespace(compiled_taps=compiled))
        self.position: Any = None
        self.coordinates: dict[str, int] = {}
        self.pieces: list[Piece] = []
        self.attention: list[Piece] = []
        self.offered: list[ModelPoints] = []
        self._steps = steps
        self._change = dict(change or {})
        self._waiting: list[Any] = []
        self._state: dict[str, Any] = {}

    def meet(self, _chunk: int, points: ModelPoints, model: Any) -> None:
        self.job.chunks.append(model)
        self.offered.append(points)
        self._waiting.extend([*points.points, *points.attention])
        self._add_state(points.state)

    def meet_optimizer(self, _optimizer: Any, points: Sequence[Any]) -> None:
        self._add_state(points)

    def _add_state(self, points: Sequence[Any]) -> None:
        self._state.update({point.tap.name: point for point in points})

    def step_begin(self, _step: int, _schedule: Any = None) -> None:
        while self._waiting:
            self._connect(self._waiting.pop())

    def _connect(self, point: Any) -> None:
        tap = point.tap

        def keep(tensor: torch.Tensor, moment: Moment) -> torch.Tensor | None:
            if moment.step in self._steps:
                self.pieces.append({"tap": tap, "moment": moment, "tensor": tensor.detach().clone()})
            change = self._change.get(tap.name)
            return None if change is None else change(tensor)

        def keep_attention(given: AttentionInput, moment: Moment) -> None:
            if moment.step in self._steps:
                self.attention.append({"tap": tap, "moment": moment, "input": given})

        if tap.kind == "attention":
            point.connect(keep_attention)
        else:
            point.connect(keep)

    def optimizer_begin(self) -> None:
        step = self.position.step
        if step in self._steps:
            for name, point in self._state.items():
                tensor = point.tensor()
                if tensor is None:
                    continue
                assert point.tap.shape == tuple(tensor.shape), name
                self.pieces.append({"tap": point.tap, "moment": Moment(step), "tensor": tensor.clone()})

    def step_aside(self, subject: str, error: Exception) -> None:
        raise AssertionError(subject) from error

    def __getattr__(self, name: str) -> Any:
        """Whatever else an engine tells is passed over."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None


def collect(collector: Any, *arguments: str, **more: Any) -> list[float]:
    """Losses of the Megatron job, with ``collector`` as its scope. Records no layers: scope does without."""
    engine = MegatronEngine(Listener(), FakeRecorder(), "step", scope=collector)  # pyright: ignore[reportArgumentType]
    engine.install()
    try:
        return train(*arguments, **more)
    finally:
        engine.remove()


def save(folder: str, rank: int, collector: Collector) -> None:
    """For the process that compares."""
    torch.save(collector.pieces, Path(folder) / f"{rank}.pt")


def load(folder: Path, world: int, step: int = 0, recompute: bool = False) -> dict[tuple[str, int], list[Piece]]:
    """By name and microbatch, what the ranks saw in a step: in the first pass, or what was recomputed."""
    found: dict[tuple[str, int], list[Piece]] = {}
    for rank in range(world):
        for piece in torch.load(folder / f"{rank}.pt", weights_only=False):
            if piece["moment"].step == step and piece["moment"].recompute == recompute:
                found.setdefault((piece["tap"].name, piece["moment"].microbatch), []).append(piece)
    return found


def whole(pieces: list[Piece]) -> torch.Tensor:
    """One tensor from its shards. Replicas agree, and each has a number of its own; no shard lacks."""
    by_shard: dict[Any, dict[int, torch.Tensor]] = {}
    for piece in pieces:
        tap = piece["tap"]
        replicas = by_shard.setdefault(tap.shard, {})
        assert tap.replica not in replicas, f"{tap.name}: two are replica {tap.replica} of {tap.shard}"
        replicas[tap.replica] = piece["tensor"]
    parts = {}
    for shard, replicas in by_shard.items():
        first, *others = replicas.values()
        assert sorted(replicas) == list(range(len(replicas)))
        assert all(torch.equal(first, other) for other in others), pieces[0]["tap"].name
        parts[tuple(index for _, index, _ in shard)] = first
    tap = pieces[0]["tap"]
    for axis, _, count in reversed(tap.shard):
        dimension = _divided(axis, tap.labels)
        joined: dict[Any, list[torch.Tensor]] = {}
        for indices in sorted(parts):
            joined.setdefault(indices[:-1], []).append(parts[indices])
        assert all(len(pieces) == count for pieces in joined.values()), tap.name
        parts = {indices: torch.cat(pieces, dimension) for indices, pieces in joined.items()}
    return parts[()]


def _divided(axis: str, labels: tuple[str, ...]) -> int:
    said = [index for index, label in enumerate(labels) if label.endswith(f"/{axis}")]
    wanted = {"sp": "s", "cp": "s", "dp": "b"}.get(axis, "n")
    if said:
        return said[0]
    return labels.index(wanted) if wanted in labels else len(labels) - 1
