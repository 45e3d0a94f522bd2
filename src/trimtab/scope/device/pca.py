"""Principal components of hidden states, followed from step to step on the device, without waiting for it.

What is kept of a tensor with h features is a mean (h), m axes (h, m; m is a few more than are shown) and the covariance
within these axes (m, m). A new block of tokens is merged with that by the exact formula for means and covariances; the
axes are then brought up to date by subspace iteration on the merged covariance, which is only ever multiplied with m
vectors, never formed (history PCA: Yang, Hsieh, Wang, arXiv 1802.05447), and turned to principal ones by Jacobi
rotations.

Axes stay what they were. The iteration begins at the last axes and keeps signs. A Jacobi rotation turns a pair by at
most 45 degrees, so that axes whose variances come to pass each other keep their places instead of swapping; and a pair
of nearly equal variance, whose directions within their plane mean nothing, hardly turns at all. An axis that is shown
gives way only to one of the spare ones that has come to carry 10 % more variance.

torch.linalg.eigh and svd would wait for the device; QR and products do not. No random numbers of the job are drawn.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

SPARE_AXES: Final = 5
"""Followed beside those that are shown: they hold what may come to matter, and make the iteration converge."""
MOST_TOKENS: Final = 2048
MOST_ELEMENTS: Final = 1 << 23
"""That are taken of a block, in evenly spaced tokens: bounds time, and memory to twice 32 MiB."""
MEMORY: Final = 50
"""A new block never weighs less than one of so many: what is older fades."""
_FIRST_ITERATIONS: Final = 12
_ITERATIONS: Final = 2
_FIRST_SWEEPS: Final = 6
_SWEEPS: Final = 2
_NEAR: Final = 0.2
"""Difference of two variances, as a share of their sum, below which their axes turn more slowly: by its square, since
there a pair's directions are mostly chance."""
_PROMOTION: Final = 1.1


class Projection(NamedTuple):
    """Of a block of tokens, on their device."""

    coordinates: Tensor
    """float32 (tokens, k): along each axis, from the mean; NaN for a token with a value that is not finite."""
    variance: Tensor
    """float32 (k,): along each axis. Not always descending: an axis keeps its place."""
    total: Tensor
    """float32 (1,): variance along all h directions together."""


class Components:
    """Follows the principal components of one tensor."""

    def __init__(self, features: int, shown: int, device: torch.device, memory: int = MEMORY) -> None:
        """``shown`` axes of the ``features``; more than there are features are not to be had."""
        self.shown = min(shown, features)
        self.followed = min(self.shown + SPARE_AXES, features)
        self._memory = memory
        self._blocks = 0
        self.mean = torch.zeros(features, device=device)
        self.axes = _start(features, self.followed, device)
        """float32 (h, m), orthonormal; the first ``shown`` are shown."""
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        """Tokens seen, as far as they are remembered."""
        self._within = torch.zeros(self.followed, self.followed, dtype=torch.float64, device=device)
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._rounds = _rounds(self.followed, device)

    def update(self, tokens: Tensor) -> None:
        """Learn from a block of tokens, (t, h) of any real type. Tokens that are not finite are passed over."""
        x = tokens[:: spacing(tokens)].to(torch.float32)
        valid = x.sum(1, keepdim=True).isfinite()
        count = valid.sum(dtype=torch.float64)
        x = torch.where(valid, x, 0.0)
        some = count.clamp(min=1.0)
        mean = (x.sum(0, dtype=torch.float64) / some).to(torch.float32)
        deviation = x.sub_(mean).mul_(valid)
        share = self._share(count)
        move = mean - self.mean
        spread = torch.linalg.vector_norm(deviation, dtype=torch.float64).square() / some
        apart = move.to(torch.float64).square().sum()
        self._total = (1 - share) * self._total + share * spread + share * (1 - share) * apart
        covariance = _Covariance(self.axes, self._within, deviation.div_(some.sqrt()), move, share)
        axes = self.axes
        for _ in range(_ITERATIONS if self._blocks else _FIRST_ITERATIONS):
            axes = _orthonormal(covariance.times(axes))
        within = axes.T.to(torch.float64) @ covariance.times(axes).to(torch.float64)
        self.mean = self.mean + share.to(torch.float32) * move
        self.count = torch.where(count > 0, torch.minimum(self.count + count, count * self._memory), self.count)
        self._turn(axes, (within + within.T) / 2)
        self._blocks += 1

    def project(self, tokens: Tensor, shown: int | None = None) -> Projection:
        """Where tokens (t, h) lie along the first ``shown`` axes (None: those that are shown)."""
        k = self.shown if shown is None else shown
        coordinates = (tokens.to(torch.float32) - self.mean) @ self.axes[:, :k]
        variance = self._within.diagonal()[:k].to(torch.float32)
        return Projection(coordinates, variance, self._total.to(torch.float32).reshape(1))

    def _share(self, count: Tensor) -> Tensor:
        """How much the new block weighs in mean and covariance: as its tokens do, or more where old ones fade."""
        share = count / (self.count + count).clamp(min=1.0)
        return torch.where(count > 0, share.clamp(min=1.0 / self._memory), 0.0)

    def _turn(self, axes: Tensor, within: Tensor) -> None:
        """Make the axes of a subspace the principal ones; which are first, is decided anew only at the first block."""
        first = not self._blocks
        turn, within = _diagonal(within, self._rounds, _FIRST_SWEEPS if first else _SWEEPS, 0.0 if first else _NEAR)
        order = within.diagonal().argsort(descending=True) if first else _promoted(within.diagonal(), self.shown)
        self.axes = (axes @ turn.to(torch.float32))[:, order]
        self._within = within[order][:, order]


class _Covariance(NamedTuple):
    """That of all tokens so far, the new block with them: as a product with a few vectors."""

    axes: Tensor
    within: Tensor
    block: Tensor
    """(t, h), deviations from the block's mean over the root of how many there are."""
    move: Tensor
    """From the old mean to the block's."""
    share: Tensor

    def times(self, vectors: Tensor) -> Tensor:
        share = self.share.to(torch.float32)
        old = self.axes @ (self.within.to(torch.float32) @ (self.axes.T @ vectors))
        new = self.block.T @ (self.block @ vectors)
        apart = self.move[:, None] * (self.move @ vectors)
        return (1 - share) * old + share * new + share * (1 - share) * apart


def spacing(tokens: Tensor) -> int:
    """From one token (t, h) to the next that is taken, so that they are not too many."""
    most = max(1, min(MOST_TOKENS, MOST_ELEMENTS // max(1, tokens.shape[1])))
    return max(1, -(-tokens.shape[0] // most))


def _start(features: int, axes: int, device: torch.device) -> Tensor:
    """Orthonormal directions, the same wherever they are made, without drawing random numbers."""
    rows = torch.arange(features, dtype=torch.float64, device=device)[:, None]
    columns = torch.arange(axes, dtype=torch.float64, device=device)
    # Fractions of multiples of irrational numbers: as good as random here.
    values = ((rows + 1) * (columns + 1) * math.pi**3 + (rows * 0.754877666) ** 2 * 31.7).frac() - 0.5
    return torch.linalg.qr(values.to(torch.float32)).Q


def _orthonormal(vectors: Tensor) -> Tensor:
    """Gram-Schmidt, each vector on the side on which it was."""
    q, r = torch.linalg.qr(vectors)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def _rounds(size: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """All pairs of ``size`` axes, in rounds of disjoint ones (a round-robin tournament)."""
    players = [*range(size), *([-1] if size % 2 else [])]
    half = len(players) // 2
    rounds: list[tuple[Tensor, Tensor]] = []
    for _ in range(len(players) - 1):
        pairs = [sorted(pair) for pair in zip(players[:half], reversed(players[half:]), strict=True) if -1 not in pair]
        if pairs:
            first, second = torch.tensor(pairs, device=device).T
            rounds.append((first, second))
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def _diagonal(a: Tensor, rounds: list[tuple[Tensor, Tensor]], sweeps: int, near: float) -> tuple[Tensor, Tensor]:
    """A rotation that makes a symmetric matrix diagonal (almost), and the matrix so rotated: cyclic Jacobi (Golub, Van
    Loan, Matrix Computations, 8.5), all disjoint pairs at once, by inner rotations only."""
    turn = torch.eye(a.shape[0], dtype=a.dtype, device=a.device)
    identity = turn
    for _ in range(sweeps):
        for p, q in rounds:
            x, y, c = a[p, p], a[q, q], a[p, q]
            slope = torch.where(c == 0, torch.inf, (y - x) / (2 * torch.where(c == 0, 1.0, c)))
            angle = torch.atan(torch.where(slope < 0, -1.0, 1.0) / (slope.abs() + (1 + slope.square()).sqrt()))
            if near:
                apart = ((y - x).square() + 4 * c.square()).sqrt() / (x + y).abs().clamp(min=1e-300)
                angle = angle * (apart / near).clamp(max=1.0).square()
            cos, sin = angle.cos(), angle.sin()
            rotation = identity.index_put((p, p), cos).index_put((q, q), cos)
            rotation = rotation.index_put((p, q), sin).index_put((q, p), -sin)
            a = rotation.T @ a @ rotation
            turn = turn @ rotation
    return turn, a


def _promoted(variance: Tensor, shown: int) -> Tensor:
    """The order of axes in which the strongest spare one takes the place of the weakest shown, if it clearly exceeds
    it."""
    order = torch.arange(variance.shape[0], device=variance.device)
    if shown == variance.shape[0]:
        return order
    # By min and max with dimensions: indexing with a tensor of one number would wait for the device.
    weak, weakest = variance[:shown].min(0, keepdim=True)
    strong, strongest = variance[shown:].max(0, keepdim=True)
    strongest = strongest + shown
    swap = strong > _PROMOTION * weak
    moved = order.scatter(0, weakest, torch.where(swap, strongest, weakest))
    return moved.scatter(0, strongest, torch.where(swap, weakest, strongest))
