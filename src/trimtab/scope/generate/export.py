"""What generation has shown, as files: arrays for programs, and a recording that can be replayed in the browser."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.output import replacing
from trimtab.scope.frame import Frame, encode, split
from trimtab.scope.generate.result import Result, Step
from trimtab.scope.recording.recorder import Recorder
from trimtab.scope.shards import cut
from trimtab.scope.subscription import Subscription

_LABEL: Final = "generate"
_NEXT_TOKEN: Final = "nexttoken"


def write_npz(path: Path, result: Result) -> None:
    """All steps as arrays: ``top_ids``, ``top_probabilities`` (steps, k), ``tokens``, ``entropy``, and for each step
    ``attention/<step>/<layer>/<head>`` (rows, keys); ``components/<layer>`` (tokens, 3).

    Raises ValueError where it cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {
        "prompt_tokens": np.array([token for token, _ in result.prompt_tokens], np.int64),
        "labels": np.array(result.labels),
        "tokens": np.array([step.chosen.id for step in result.steps], np.int64),
        "entropy": np.array([step.entropy for step in result.steps]),
        "top_ids": np.array([[one.id for one in step.top] for step in result.steps], np.int64),
        "top_probabilities": np.array([[one.probability for one in step.top] for step in result.steps]),
    }
    for step in result.steps:
        for (layer, head), rows in step.attention.items():
            arrays[f"attention/{step.number}/{layer}/{head}"] = rows
        if step.hidden:
            arrays[f"hidden/{step.number}"] = np.stack([one.vector for one in step.hidden])
    for one in result.components:
        arrays[f"components/{one.layer}"] = one.coordinates
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


class Tape:
    """A recording below ``folder``, as those of a job: steps are those of the generation."""

    def __init__(self, folder: Path, result: Result, tell: Callable[[str], None]) -> None:
        """``tell``: what goes wrong with the disk. ValueError where nothing can be written there."""
        try:
            (folder / "scope").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--record {folder}: cannot be written ({error.strerror})") from None
        self._result = result
        self._recorder = Recorder(folder / "scope", _LABEL, 0, lambda notice: tell(notice.text))
        self._subscriptions: dict[str, str] = {}
        self._recorder.note("generate", {"model": result.model, "prompt": result.prompt, "sampling": result.sampling})
        self._tokens()

    def step(self, step: Step) -> None:
        """One step more."""
        top = step.top
        probabilities = np.array([[one.probability for one in top]])
        with np.errstate(divide="ignore"):
            logits = np.log(probabilities).astype(np.float32)  # logits so shifted that their log-sum-exp is 0
        position = len(self._result.prompt_tokens) + step.number - 1
        arrays = {
            "ids": np.array([[one.id for one in top]], np.int32),
            "logits": logits,
            "lse": np.zeros(1, np.float32),
            "expected": np.array([-step.entropy], np.float32),
            "prompt": np.zeros(1, np.int32),
            "position": np.array([position], np.int32),
            "chosen": np.array([step.chosen.id], np.int32),
            "chosen_probability": np.array([step.chosen.probability], np.float32),
            "texts": _texts([step.chosen.text, *(one.text for one in top)]),
        }
        self._frame("logits", _NEXT_TOKEN, step.number, arrays, {"labels": ["row", "k"]})
        self._attention(step)
        for one in step.hidden:
            statistics = {"vector": one.vector, "shift": np.zeros(1)}
            self._frame(f"layers.{one.layer}.output", "statistics", step.number, statistics, {"labels": ["h"]})

    def close(self) -> None:
        """The text has ended: what is known only then, and the end of the file."""
        result = self._result
        last = result.steps[-1].number if result.steps else 0
        for one in result.components:
            explained = np.array(one.explained, np.float32)
            arrays = {
                "coordinates": one.coordinates,
                "variance": explained,
                "total": np.ones(1, np.float32),
                "index": np.arange(len(one.coordinates), dtype=np.int64),
            }
            self._frame(f"layers.{one.layer}.output", "pca", last, arrays, {"labels": ["s", "h"]})
        self._recorder.note("notice", {"kind": _LABEL, "text": result.text, "step": last, "rank": 0})
        self._tokens()
        self._recorder.close()

    def _tokens(self) -> None:
        """All tokens so far; what is said later counts."""
        self._recorder.note("tokens", {"labels": self._result.labels, "prompt": len(self._result.prompt_tokens)})

    def _attention(self, step: Step) -> None:
        layers = sorted({layer for layer, _ in step.attention})
        for layer in layers:
            heads = [head for of, head in step.attention if of == layer]
            rows = np.stack([step.attention[layer, head] for head in heads])
            arrays = attention_arrays(heads, rows) | {"texts": _texts(self._result.labels[: rows.shape[2]])}
            meta = {"labels": ["b", "n", "s", "d"]}
            self._frame(f"layers.{layer}.attention.map", "attention", step.number, arrays, meta)

    def _frame(self, tap: str, what: str, step: int, arrays: Mapping[str, NDArray[Any]], meta: dict[str, Any]) -> None:
        name = self._subscriptions.get(f"{tap} {what}")
        if name is None:
            name = self._subscriptions[f"{tap} {what}"] = str(len(self._subscriptions) + 1)
            known: Any = what if what != _NEXT_TOKEN else "statistics"
            said = Subscription(tap, known, id=name).as_dict() | {"what": what}
            self._recorder.note("subscription", said)
        frame = Frame(tap, what, name, step, 0, 0, arrays=dict(arrays), meta=meta, unix_ns=time.time_ns())
        for piece in cut(frame):
            self._recorder.frame(split(encode(piece))[0])


def attention_arrays(heads: list[int], rows: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Rows (heads, q, keys), the last q of a sequence, as :mod:`trimtab.scope.attention` describes them."""
    _, queries, keys = rows.shape
    wide = rows.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(wide > 0, wide * np.log(wide), 0.0).sum(-1)
    return {
        "heads": np.array(heads, np.int32),
        "position": np.arange(keys - queries, keys, dtype=np.int32),
        "key_position": np.arange(keys, dtype=np.int32),
        "entropy": entropy.astype(np.float32),
        "first": np.ascontiguousarray(rows[:, :, 0]),
        "received": wide.sum(1).astype(np.float32),
        "queries": np.array([queries], np.int32),
        "probabilities": np.ascontiguousarray(rows),
    }


def _texts(labels: list[str]) -> NDArray[np.uint8]:
    """Labels of tokens as UTF-8 JSON."""
    return np.frombuffer(json.dumps(labels, ensure_ascii=False).encode(errors="replace"), np.uint8)
