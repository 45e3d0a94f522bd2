"""What a model would say next, from what each part of its vocabulary says of itself.

Under tensor parallelism a rank has the logits of some tokens only. With the log-sum-exp of its part and its largest
logits, the probabilities over all tokens follow: ``p = exp(logit - LSE)``, where ``LSE`` is that of the parts' (as in
the online softmax of Milakov and Gimelshein, 2018), and the likeliest of all are among the likeliest of the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
NEEDED: Final = ("ids", "logits", "lse", "expected", "prompt", "position")
"""Of a part: ``ids`` and ``logits`` (rows, k) of its likeliest tokens, likeliest first; ``lse`` (rows,) log-sum-exp of
all its logits; ``expected`` (rows,) their mean under its own softmax; ``prompt`` and ``position`` (rows,) of which
prompt, after which of its tokens."""
TARGET: Final = ("target", "target_logit", "above")
"""Where a token was asked for: its id or -1, its logit (that of the whole vocabulary) and how many logits of this part
are above it."""


def merge_shards(parts: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """The whole vocabulary's answer from that of its parts, in any order.

    Gives ``ids`` int32 and ``probabilities`` float64 (rows, k), ``entropy`` (rows,) in nats, ``prompt`` and
    ``position``, and with a target ``target``, ``target_probability`` and ``target_rank`` (0: it is the likeliest; -1:
    no target), and whatever else the first part says. Raises ValueError where the parts do not belong together.
    """
    if not parts:
        raise ValueError("nothing to merge: no part of a vocabulary is there")
    _check(parts)
    lse = np.stack([np.asarray(part["lse"], np.float64) for part in parts])
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        whole = np.logaddexp.reduce(lse, axis=0)
        weight = np.exp(lse - whole)
        expected = np.stack([np.asarray(part["expected"], np.float64) for part in parts])
        # a part that has no weight may have no finite mean either
        mean = np.where(weight > 0, weight * expected, 0.0).sum(axis=0)
        merged = _likeliest(parts, whole) | {"entropy": np.maximum(whole - mean, 0.0)}
        if all(name in parts[0] for name in TARGET):
            merged |= _target(parts, whole)
    known = {*NEEDED, *TARGET} - {"prompt", "position"}
    return merged | {name: np.asarray(array) for name, array in parts[0].items() if name not in known}


def _likeliest(parts: Sequence[Arrays], whole: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    ids = np.concatenate([part["ids"] for part in parts], axis=1)
    logits = np.concatenate([np.asarray(part["logits"], np.float64) for part in parts], axis=1)
    count = max(part["ids"].shape[1] for part in parts)
    # equal logits in the order of the ids, so that it does not depend on the order of the parts
    order = np.lexsort((ids, -logits), axis=1)[:, :count]
    chosen = np.take_along_axis(logits, order, axis=1)
    return {
        "ids": np.take_along_axis(ids, order, axis=1).astype(np.int32),
        "probabilities": np.exp(chosen - whole[:, None]),
    }


def _target(parts: Sequence[Arrays], whole: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    target = np.asarray(parts[0]["target"])
    asked = target >= 0
    logit = np.asarray(parts[0]["target_logit"], np.float64)
    above = np.sum([np.asarray(part["above"], np.int64) for part in parts], axis=0)
    return {
        "target": target.astype(np.int32),
        "target_probability": np.where(asked, np.exp(logit - whole), np.nan),
        "target_rank": np.where(asked, above, -1),
    }


def _check(parts: Sequence[Arrays]) -> None:
    first = parts[0]
    for part in parts:
        for name in NEEDED:
            if name not in part:
                raise ValueError(f"{name} is missing in a part of a vocabulary")
        rows = part["lse"].shape
        wide = part["ids"].ndim == 2 and part["ids"].shape == part["logits"].shape
        if len(rows) != 1 or not wide or part["ids"].shape[0] != rows[0]:
            raise ValueError("a part of a vocabulary has arrays that do not fit each other")
        alike = ("prompt", "position") + (("target", "target_logit") if "target" in first else ())
        if any(
            name not in part or not np.array_equal(part[name], first[name], equal_nan=name == "target_logit")
            for name in alike
        ):
            raise ValueError("the parts of the vocabulary are not of the same prompts")
