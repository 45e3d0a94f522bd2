"""Measures a tensor as a subscription asks: a few small arrays, on the tensor's device, without waiting for it.

Attention has inputs of its own and is measured by :mod:`trimtab.scope.device.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from trimtab.scope.device import choice, tiles
from trimtab.scope.device.layout import local
from trimtab.scope.device.pca import Components, spacing
from trimtab.scope.device.statistics import Statistician, warm_up
from trimtab.scope.names import Tap
from trimtab.scope.subscription import RAW_BYTES, REDUCTIONS, Subscription

Arrays = dict[str, Tensor]
TOKEN_AXES: Final = ("sp", "cp")
"""Parallel axes over which ranks hold different tokens of the same features. (Those of other data are looked at rank by
rank.)"""


class MeasureState:
    """What is kept for one tap of one subscription from one moment to the next."""

    def __init__(self) -> None:
        self.labels: tuple[str, ...] = ()
        """What each dimension is."""
        self.tap: Tap | None = None
        self.meta: dict[str, Any] = {}
        """What a frame says about its arrays: the same at all steps."""
        self.statistician = Statistician()
        self.components: Components | None = None
        self._constants: dict[str, tuple[tuple[int, ...], Tensor]] = {}

    def constant(self, name: str, values: Sequence[int], like: Tensor) -> Tensor:
        """int64 values on the device of ``like``; brought there once, as long as they do not change."""
        key = tuple(values)
        kept = self._constants.get(name)
        if kept is None or kept[0] != key or kept[1].device != like.device:
            kept = key, torch.tensor(key, dtype=torch.int64).to(like.device, non_blocking=True)
            self._constants[name] = kept
        return kept[1]


def measure(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    """What the subscription asks for of ``x``: arrays by name, see docs/scope-measures.md.

    Nothing at all (no arrays) where none of the chosen heads or tokens is on this rank. Results are memory of their
    own, which later measurements leave alone. Under ``no_grad``.

    Raises:
        ValueError: it does not fit this tensor; what :func:`check` could not know.
    """
    if x.is_complex():
        raise ValueError("complex tensors cannot be measured; subscribe to a real one")
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return _measured(x, subscription, state)
    with torch.autocast(kind, enabled=False):  # products are to be as exact as they can be
        return _measured(x, subscription, state)


def _measured(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    chosen = _chosen_heads(local(x), subscription, state)
    return {} if chosen is None else _MEASURES[subscription.what](chosen, subscription, state)


def check(subscription: Subscription, tap: Tap) -> None:
    """Asked when a rank prepares.

    Raises:
        ValueError: this cannot be measured of that tap: what, where, and what can be done.
    """
    what, parameters = subscription.what, subscription.parameters
    if what not in _MEASURES:
        raise ValueError(f"{what} of {tap.name}: cannot be measured of a tensor; one of {', '.join(_MEASURES)} can")
    if subscription.heads is not None and (choice.head_dimension(tap) is None or tap.heads is None):
        raise ValueError(f"{what} of {tap.name}: it has no heads to choose from; leave them out")
    choice.check_heads(subscription.heads, tap)
    if what == "tiles":
        _check_tiles(parameters, tap)
    if what in ("tokens", "pca") and tap.kind not in ("activation", "gradient"):
        raise ValueError(f"{what} of {tap.name}: a {tap.kind} has no tokens; statistics, tiles, rows or raw can be had")
    if what == "pca" and tap.shape is not None and len(tap.shape) < 2:
        raise ValueError(f"pca of {tap.name}: it has one dimension, and a token needs features")
    if what in ("rows", "tiles", "tokens") and tap.shape == ():
        raise ValueError(f"{what} of {tap.name}: it is a single number; subscribe to its statistics")


def warm(subscription: Subscription, device: torch.device, dtype: torch.dtype) -> None:
    """Have compiled and loaded what measuring will need. Takes seconds: on a thread of its own, never on one that
    trains."""
    if subscription.what in ("statistics", "histogram"):
        warm_up(device, dtype, subscription.what == "histogram")
    elif subscription.what == "pca" and device.type == "cuda":
        # The libraries of linear algebra take their time when they are first used.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
            Components(32, 3, device).update(torch.zeros(16, 32, device=device))
            torch.cuda.current_stream().synchronize()


def _check_tiles(parameters: dict[str, Any], tap: Tap) -> None:
    reduction, dims = parameters.get("reduction", "mean"), parameters.get("dims")
    if reduction not in REDUCTIONS:
        raise ValueError(f"tiles of {tap.name}: reduction {reduction!r} is unknown; one of {', '.join(REDUCTIONS)}")
    if dims is not None and (len(dims) != 2 or dims[0] == dims[1] or not set(dims) <= set(tap.labels)):
        raise ValueError(f"tiles of {tap.name}: dims {','.join(dims)} are not two of its {', '.join(tap.labels)}")


def _statistics(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    histogram = subscription.what == "histogram"
    measured = state.statistician.measure(x, histogram)
    arrays = {"vector": measured.vector, "shift": measured.shift}
    return arrays if measured.exponents is None else arrays | {"exponents": measured.exponents}


def _tiles(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    parameters = subscription.parameters
    if not x.numel():
        return {}
    dims = parameters.get("dims")
    if dims is not None:
        state.meta["dims"] = list(dims)
    values = tiles.matrix(x, state.labels, dims)
    cut = tiles.extent(values.shape, parameters.get("grid", (64, 64)))
    shown, scale = tiles.tile(values, cut, parameters.get("reduction", "mean"))
    return {"tiles": shown, "scale": scale, "extent": state.constant("extent", cut, x)}


def _rows(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    if not x.numel():
        return {}
    matrix = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    wanted = [row + matrix.shape[0] if row < 0 else row for row in subscription.parameters.get("rows", (0,))]
    rows = [row for row in wanted if 0 <= row < matrix.shape[0]]
    if not rows:
        return {}
    index = state.constant("rows", rows, x)
    return {"values": _taken(matrix, 0, index), "index": index}


def _tokens(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    found = _chosen_tokens(x, subscription.parameters.get("tokens", (0,)), state)
    if found is None:
        return {}
    values, positions = found
    return {"values": values, "index": positions}


def _raw(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    if not x.numel():
        return {}
    values = choice.first_bytes(x, subscription.parameters.get("bytes", RAW_BYTES))
    return {"values": values, "shape": state.constant("shape", tuple(x.shape), x)}


def _pca(x: Tensor, subscription: Subscription, state: MeasureState) -> Arrays:
    if x.dim() < 2:
        raise ValueError(f"pca of a tensor of the shape {tuple(x.shape)}: a token needs features")
    if not x.numel():
        return {}
    block = x.reshape(-1, x.shape[-1])
    components = state.components
    if components is None or components.mean.shape[0] != x.shape[-1]:
        components = Components(x.shape[-1], subscription.parameters.get("components", 3), x.device)
        state.components = components
    components.update(block)
    tokens = subscription.parameters.get("tokens")
    if tokens is None:
        step = spacing(block)
        shown, index = block[::step], torch.arange(0, block.shape[0], step, device=x.device)
    else:
        found = _chosen_tokens(x, tokens, state)
        if found is None:
            shown, index = block[:0], state.constant("index", (), x)
        else:
            shown, index = found[0].movedim(_sequence(state, x), 0).reshape(-1, x.shape[-1]), found[1]
    apart = state.tap is not None and _tokens_elsewhere(state.tap)
    state.meta["components"] = components.shown
    coordinates, variance, total = components.project(shown, components.followed if apart else None)
    arrays = {"coordinates": coordinates, "variance": variance, "total": total, "index": index}
    if apart:
        arrays |= {"axes": components.axes, "mean": components.mean, "count": components.count.reshape(1)}
    return arrays


_MEASURES: Final[dict[str, Callable[[Tensor, Subscription, MeasureState], Arrays]]] = {
    "statistics": _statistics,
    "histogram": _statistics,
    "tiles": _tiles,
    "rows": _rows,
    "tokens": _tokens,
    "raw": _raw,
    "pca": _pca,
}


def _chosen_heads(x: Tensor, subscription: Subscription, state: MeasureState) -> Tensor | None:
    """``x`` with the wanted heads only; None where none of them is on this rank."""
    tap = state.tap
    if subscription.heads is None or tap is None or tap.heads is None or choice.head_dimension(tap) is None:
        return x
    heads = choice.local_heads(tap, subscription.heads)
    if not heads:
        return None
    if len(heads) == tap.heads[1]:
        return x
    split, dimension = choice.split_heads(x, tap)
    taken = _taken(split, dimension, state.constant("heads", heads, x))
    return taken if split is x else taken.flatten(-2)


def _chosen_tokens(x: Tensor, tokens: Sequence[int], state: MeasureState) -> tuple[Tensor, Tensor] | None:
    """The wanted tokens that are on this rank, and which positions of the whole sequence they are."""
    if not x.dim():
        raise ValueError("tokens of a single number; subscribe to its statistics")
    dimension = _sequence(state, x)
    shard = state.tap.shard if state.tap is not None else ()
    places, positions = choice.local_tokens(tokens, x.shape[dimension], shard)
    if not places:
        return None
    values = _taken(x, dimension, state.constant("places", places, x))
    return values, state.constant("positions", positions, x)


def _tokens_elsewhere(tap: Tap) -> bool:
    """Do other ranks hold other tokens of the same moment? Heads with a dimension of their own are tokens, too."""
    heads = choice.head_dimension(tap)
    axes = {*TOKEN_AXES, "tp"} if heads is not None and heads >= 0 else set(TOKEN_AXES)
    return any(axis in axes and count > 1 for axis, _, count in tap.shard)


def _sequence(state: MeasureState, x: Tensor) -> int:
    """Which dimension is the sequence."""
    return min(choice.sequence_dimension(state.labels), x.dim() - 1)


def _taken(x: Tensor, dimension: int, index: Tensor) -> Tensor:
    """Some places of a dimension, as a copy."""
    if x.element_size() == 1 and x.is_floating_point():  # float8 cannot be indexed everywhere: its bytes can
        return x.view(torch.uint8).index_select(dimension, index).view(x.dtype)
    return x.index_select(dimension, index)
