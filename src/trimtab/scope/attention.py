"""Attention maps of several ranks put together: heads side by side, rows of a sequence in their order.

What a rank measures (:mod:`trimtab.scope.device.attention`), with n heads, q query rows and k keys:

- ``heads`` i32[n], ``position`` i32[q], ``key_position`` i32[k]: which they are in the whole model and sequence;
- ``entropy`` f32[n, q] of each row, in nats, and ``first`` f32[n, q], the mass on its sequence's first key (the sink);
- ``received`` f32[n, k]: the mass that each key gets, summed over ``queries`` i32[1] rows;
- of whole maps ``tiles`` u8[n, R, C] with ``scale`` f32[n], which stand for the mean in each tile as
  ``scale * (tile / 255)**2``; ``peaks`` and ``peak_scale`` in the same way for the largest in each tile; ``tile_row``
  i32[R] and ``tile_key`` i32[C] say where tiles begin;
- of chosen rows ``probabilities`` f32[n, q, k], exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
_BY_ROW: Final = ("entropy", "first", "probabilities")
_TILED: Final = (("tiles", "scale"), ("peaks", "peak_scale"))
_LEVELS: Final = 255.0


def levels_to_values(tiles: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Probabilities (n, R, C) that the levels of ``tiles`` stand for; ``scale`` (n) is the largest of each head."""
    return np.square(tiles.astype(np.float32) / np.float32(_LEVELS)) * scale[:, None, None].astype(np.float32)


def merge_attention(parts: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """One map from those of several ranks, which hold other heads (tensor parallel), other rows (context parallel), or
    both. ValueError where they do not fit together."""
    if not parts:
        raise ValueError("attention: nothing to put together")
    groups: dict[tuple[int, ...], list[Arrays]] = {}
    for part in parts:
        groups.setdefault(tuple(int(head) for head in part["heads"]), []).append(part)
    chosen = [head for heads in groups for head in heads]
    if len(set(chosen)) != len(chosen):
        raise ValueError("attention: ranks overlap in their heads")
    return _beside([_below(groups[heads]) for heads in sorted(groups)])


def _below(parts: list[Arrays]) -> dict[str, NDArray[Any]]:
    """Rows of the same heads."""
    if len(parts) == 1:
        return dict(parts[0])
    whole = dict(parts[0])
    if any(not np.array_equal(part["key_position"], whole["key_position"]) for part in parts):
        raise ValueError("attention: ranks differ in the keys that they saw")
    position = np.concatenate([part["position"] for part in parts])
    order = np.argsort(position, kind="stable")
    whole["position"] = position[order]
    for name in _BY_ROW:
        if name in whole:
            whole[name] = np.concatenate([part[name] for part in parts], axis=1)[:, order]
    for name in ("received", "queries"):
        whole[name] = np.stack([part[name] for part in parts]).sum(0, dtype=whole[name].dtype)
    if "tiles" in whole:
        rows = np.concatenate([part["tile_row"] for part in parts])
        order = np.argsort(rows, kind="stable")
        whole["tile_row"] = rows[order]
        for levels, scale in _TILED:
            largest = np.max([part[scale] for part in parts], axis=0)
            lined_up = [_rescaled(part[levels], part[scale], largest) for part in parts]
            whole[levels], whole[scale] = np.concatenate(lined_up, axis=1)[:, order], largest
    return whole


def _rescaled(tiles: NDArray[Any], scale: NDArray[Any], largest: NDArray[Any]) -> NDArray[np.uint8]:
    """Levels that mean the same under a larger scale."""
    factor = np.sqrt(np.divide(scale, largest, out=np.zeros_like(scale), where=largest > 0))
    return np.rint(tiles * factor[:, None, None]).astype(np.uint8)


def _beside(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Heads of the same rows, in the order of their numbers."""
    whole = dict(parts[0])
    for name in ("position", "key_position"):
        if any(not np.array_equal(part[name], whole[name]) for part in parts):
            raise ValueError("attention: some ranks of a head's rows are missing, or looked at other rows")
    heads = np.concatenate([part["heads"] for part in parts])
    order = np.argsort(heads, kind="stable")
    whole["heads"] = heads[order]
    for name in (*_BY_ROW, "received", *(name for pair in _TILED for name in pair)):
        if name in whole:
            whole[name] = np.concatenate([part[name] for part in parts])[order]
    return whole
