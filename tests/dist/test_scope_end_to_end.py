"""A live TP2 x PP2 job under ``trimtab run``, looked into and disturbed by command line, as a user would.

What the commands say is held against what plain hooks of the job itself have seen of the same steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import run_ranks
from scope_live_job import STOP

from trimtab import launch
from trimtab.scope.vector import derive, vector_of

WORLD = 4
MODEL = ("--tp", "2", "--pp", "2", "--num-layers", "4", "--hidden-size", "32", "--heads", "4", "--seq-length", "16")
JOB = (*MODEL, "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "0", "--data", __file__)
"""The weights stay as they are, so that one can see that they are again what they were."""
SETTINGS = ("record.enabled=false", "engine.name=megatron", "engine.cpu_shim=true", "live.enabled=false")
SCOPE = ("scope.look_seconds=0.1", "scope.allow_perturb=true", "scope.budget=1.0")
WEIGHT = "parameters.decoder.layers.1.mlp.linear_fc2.weight"
STARTED = "started-"
AHEAD_SECONDS = 4.0
"""From seeing a step to the one that is chosen for the flip: a command has to start and to connect meanwhile."""


def _rank(rank: int, folder: str) -> None:
    Path(folder, f"{STARTED}{rank}").touch()
    script = Path(__file__).with_name("scope_live_job.py")
    settings = (*SETTINGS, *SCOPE, f"record.dir={folder}")
    launch.run(str(script), [folder, *JOB], settings=settings)


class Commands(threading.Thread):
    """Types commands while the job runs, and ends it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.said: dict[str, Any] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._type()
        except BaseException as error:
            self.error = error
        finally:
            (self.folder / STOP).touch()

    def _type(self) -> None:
        said = self.said
        until = time.monotonic() + 60
        while len(list(self.folder.glob(f"{STARTED}*"))) < WORLD:  # a rank forked now would hold the commands' pipes
            assert time.monotonic() < until
            time.sleep(0.01)
        (said["taps"],) = self.scope("taps", "layers.**", "--json", "-", "--wait", "60")
        said["frames"] = self.scope(
            *("stream", "--tap", "layers.*.mlp.hidden", "--for", "2", "--record", "--label", "clean", "--json", "-")
        )
        began, step = time.monotonic(), said["frames"][-1]["step"]
        self.scope("attention", "--layer", "3", "--heads", "1,2", "--rows", "5,15", "--npz", str(self.folder / "a.npz"))
        flip = ("--kind", "bit-flip", "--bits", "28", "--elements", "4", "--json", "-")
        said["paired"] = self.scope("paired", "--tap", "layers.1.mlp.output", "--steps", "2", *flip, whole=True)
        passed = said["paired"]["first_step"] - step
        chosen = said["paired"]["first_step"] + int(AHEAD_SECONDS * passed / (time.monotonic() - began)) + 1
        steps = f"{chosen}-{chosen}"
        said["notices"] = self.scope("perturb", "--tap", WEIGHT, "--steps", steps, "--follow", *flip)
        (said["reverted"],) = self.scope("revert", said["notices"][0]["id"], "--json", "-")
        said["chosen"] = chosen

    def scope(self, command: str, *arguments: str, whole: bool = False) -> Any:
        """Lines of JSON that the command has written; with ``whole`` all of it is one value."""
        words = [sys.executable, "-m", "trimtab", "scope", command, str(self.folder), *arguments]
        done = subprocess.run(words, capture_output=True, text=True, timeout=40)
        assert done.returncode == 0, (words, done.stderr)
        if whole:
            return json.loads(done.stdout)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def test_a_live_job_by_command_line(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    commands.start()
    try:
        run_ranks(WORLD, _rank, str(tmp_path), timeout=90)
    finally:
        (tmp_path / STOP).touch()
        commands.join(120)
    if commands.error is not None:
        raise commands.error
    said = commands.said
    seen = [np.load(tmp_path / f"reference-{rank}.npz") for rank in range(WORLD)]
    _taps(said["taps"])
    _statistics(said["frames"], seen)
    _recording(tmp_path, said["frames"])
    _attention(np.load(tmp_path / "a.npz"), seen)
    _paired(said["paired"])
    _flipped_and_back(said, tmp_path, seen)


def _taps(taps: list[dict[str, Any]]) -> None:
    by_name = {one["name"]: one["on"] for one in taps}
    for layer in range(4):
        holders = ["0", "1"] if layer < 2 else ["2", "3"]
        assert list(by_name[f"layers.{layer}.mlp.hidden"]) == holders
        assert list(by_name[f"layers.{layer}.attention.map"]) == holders
    assert by_name["layers.1.attention.q"]["1"]["heads"] == [2, 2, 4]
    assert by_name["layers.1.attention.q"]["1"]["shard"] == [["tp", 1, 2]]


def _whole(seen: list[Any], name: str, step: int, microbatch: int, axis: int = -1) -> np.ndarray:
    """A tensor of both tensor-parallel ranks, as the hooks saw it."""
    first = 0 if int(name.split(".")[1]) < 2 else 2
    return np.concatenate([seen[rank][f"{name}/{step}/{microbatch}"] for rank in (first, first + 1)], axis=axis)


def _statistics(frames: list[dict[str, Any]], seen: list[Any]) -> None:
    steps = {one["step"] for one in frames}
    assert len(steps) == 2
    moments = {(one["tap"], one["step"], one["microbatch"]) for one in frames}
    assert moments == {
        (f"layers.{layer}.mlp.hidden", step, mb) for layer in range(4) for step in steps for mb in (0, 1)
    }
    for one in frames:
        assert one["missing"] == []
        whole = derive(vector_of(_whole(seen, one["tap"], one["step"], one["microbatch"]))).as_dict()
        for name, value in whole.items():
            np.testing.assert_allclose(one["statistics"][name], value, rtol=2e-5, atol=1e-9, err_msg=f"{one} {name}")


def _recording(folder: Path, frames: list[dict[str, Any]]) -> None:
    """The trainer is gone."""
    words = [
        sys.executable,
        "-m",
        "trimtab",
        "scope",
        "show",
        str(folder),
        "--tap",
        "layers.2.mlp.hidden",
        "--json",
        "-",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    live = {
        (one["step"], one["microbatch"]): one["statistics"] for one in frames if one["tap"] == "layers.2.mlp.hidden"
    }
    found = {(one["step"], one["microbatch"]): one for one in shown}
    assert live.keys() <= found.keys()
    for moment, statistics in live.items():
        for name in ("mean", "std", "absmax"):
            np.testing.assert_allclose(found[moment][name], statistics[name], rtol=1e-12)


def _attention(found: Any, seen: list[Any]) -> None:
    (where,) = {name.rpartition("/")[0] for name in found.files}
    _, step, microbatch = where.split("/")
    q, k = (_whole(seen, f"layers.3.{name}", int(step), int(microbatch), axis=2).astype(np.float64) for name in "qk")
    scores = np.einsum("sbnd,tbnd->bnst", q, k)[0] / np.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[[1, 2]][:, [5, 15]]
    assert found[f"{where}/heads"].tolist() == [1, 2]  # one of each tensor-parallel rank
    np.testing.assert_allclose(found[f"{where}/probabilities"], weights, atol=2e-6)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    np.testing.assert_allclose(found[f"{where}/entropy"], entropy, atol=1e-5)
    np.testing.assert_allclose(found[f"{where}/first"], weights[..., 0], atol=2e-6)


def _paired(result: dict[str, Any]) -> None:
    assert result["parts_at"]["tap"] == "layers.1.output"
    assert result["missing"] == []
    apart = {(row["step"] - result["first_step"], row["tap"]): row["l2"] for row in result["rows"]}
    assert apart[0, "layers.0.output"] == 0
    assert all(apart[0, f"layers.{layer}.output"] > 0 for layer in (1, 2, 3))
    assert all(apart[1, f"layers.{layer}.output"] == 0 for layer in range(4))  # nothing is learned from it
    assert result["loss"][0]["clean"] != result["loss"][0]["disturbed"]


def _flipped_and_back(said: dict[str, Any], folder: Path, seen: list[Any]) -> None:
    chosen = said["chosen"]
    active = [one for one in said["notices"] if one["event"] == "notice" and one["kind"] == "activated"]
    assert {(one["rank"], one["step"]) for one in active} <= {(0, chosen), (1, chosen)}
    assert active
    entries = [
        json.loads(line) for path in folder.glob("scope/audit-r*.jsonl") for line in path.read_text().splitlines()
    ]
    flips = [one for one in entries if one["tap"] == WEIGHT and one["event"] == "activated"]
    assert sum(one["elements"] for one in flips) == 4
    for one in flips:
        pairs = zip(one["old_bits"], one["new_bits"], strict=True)
        assert {int(old, 16) ^ int(new, 16) for old, new in pairs} == {1 << 28}
    assert said["reverted"]["silent"] == []
    for rank in {one["rank"] for one in flips}:
        weights = [bytes(seen[rank][f"layers.1.mlp.linear_fc2.weight/{step}"]) for step in range(_steps(seen[rank]))]
        changes = [step for step in range(1, len(weights)) if weights[step] != weights[step - 1]]
        assert changes[0] == chosen + 1  # as the step begins, which is after the hook that looks
        assert len(changes) == 2
        assert weights[-1] == weights[0]


def _steps(seen: Any) -> int:
    return sum(name.startswith("layers.1.mlp.linear_fc2.weight/") for name in seen.files)
