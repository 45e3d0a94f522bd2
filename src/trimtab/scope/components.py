"""Principal components of the shards of a tensor, made into those of the whole.

Ranks that hold different tokens of one tensor (sequence, context or data parallel) follow axes of their own, without
talking to each other. Beside the coordinates of their tokens they send these axes and their mean, from which the
covariance of the whole is put together: that within groups, and that of the groups' means. Its axes are the whole's,
and coordinates are turned into them.

What that leaves out is what the axes of a shard leave out of its tokens: nothing where these have no more directions
than there are axes (exact then, to the rounding of float32), and otherwise the part of the whole's axes that lies
outside a shard's. Shards that hold tokens alike differ by their sampling error only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard says: the arrays of its frame."""

    coordinates: NDArray[np.floating]
    """(t, m) of its tokens along its own axes, from its own mean."""
    variance: NDArray[np.floating]
    """(m,)"""
    axes: NDArray[np.floating]
    """(h, m) orthonormal"""
    mean: NDArray[np.floating]
    """(h,)"""
    total: float
    """Variance along all directions."""
    count: float
    """Tokens that mean and variance are of."""


@dataclass(frozen=True, slots=True)
class Whole:
    """Of all shards together."""

    coordinates: Array
    """(tokens, k): those of the first part, then of the next, from the mean of all."""
    variance: Array
    """(k,)"""
    axes: Array
    """(h, k) orthonormal"""
    mean: Array
    """(h,)"""
    total: float


def merge(parts: Sequence[Part], shown: int) -> Whole:
    """The whole of the parts, along its ``shown`` strongest axes.

    Axes have the places and signs that they have in the first part, whose own axes keep theirs from step to step: give
    the same shard first at each step.

    Raises:
        ValueError: there are no parts, or their axes are not of one size.
    """
    if not parts:
        raise ValueError("there is nothing to merge")
    features = parts[0].axes.shape[0]
    for part in parts:
        if part.axes.ndim != 2 or part.axes.shape[0] != features or part.mean.shape != (features,):
            raise ValueError("the axes of the parts do not belong to one tensor")
        if part.coordinates.ndim != 2 or not part.coordinates.shape[1] == part.axes.shape[1] == part.variance.size:
            raise ValueError("a part has not as many coordinates as axes")
    counts = np.array([max(part.count, 0.0) for part in parts])
    weights = counts / counts.sum() if counts.sum() else np.full(len(parts), 1 / len(parts))
    means = np.stack([np.asarray(part.mean, dtype=np.float64) for part in parts])
    mean = weights @ means
    axes, variance = _axes(parts, weights, means - mean, shown)
    return Whole(
        np.concatenate([_turned(part, axes, m - mean) for part, m in zip(parts, means, strict=True)]),
        variance,
        axes,
        mean,
        float(
            sum(w * (part.total + ((m - mean) ** 2).sum()) for part, w, m in zip(parts, weights, means, strict=True))
        ),
    )


def _axes(parts: Sequence[Part], weights: Array, apart: Array, shown: int) -> tuple[Array, Array]:
    """Strongest directions of the covariance of all, and the variance along them."""
    roots = [
        np.concatenate([part.axes * np.sqrt(np.maximum(part.variance, 0.0)), offset[:, None]], axis=1) * np.sqrt(weight)
        for part, weight, offset in zip(parts, weights, apart, strict=True)
    ]
    # The covariance is roots @ roots.T; its left singular vectors come from a small matrix.
    u, values, _ = np.linalg.svd(np.concatenate(roots, axis=1).astype(np.float64), full_matrices=False)
    k = min(shown, parts[0].axes.shape[1])
    order, signs = _alignment(u[:, :k].T @ np.asarray(parts[0].axes[:, :k], dtype=np.float64))
    return u[:, order] * signs, values[order] ** 2


def _alignment(overlap: Array) -> tuple[NDArray[np.intp], Array]:
    """Which row of the overlaps goes where, and with which sign: the best match first."""
    left = np.abs(overlap)
    order = np.zeros(left.shape[0], dtype=np.intp)
    for _ in range(left.shape[0]):
        row, column = np.unravel_index(int(left.argmax()), left.shape)
        order[column] = row
        left[row, :] = left[:, column] = -1.0
    signs = np.where(overlap[order, np.arange(order.size)] < 0, -1.0, 1.0)
    return order, signs


def _turned(part: Part, axes: Array, offset: Array) -> Array:
    """A part's coordinates along other axes, from a mean that is ``offset`` away from its own."""
    return np.asarray(part.coordinates, dtype=np.float64) @ (part.axes.T @ axes) + offset @ axes
