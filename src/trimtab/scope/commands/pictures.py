"""Frames as text and as arrays: lines of statistics, heat maps of characters, files of numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trimtab.output import replacing
from trimtab.scope.commands.common import number, ranges
from trimtab.scope.shards import Merged
from trimtab.scope.vector import derive, quantiles

COLUMNS: Final = ("n", "mean", "std", "rms", "absmax", "min", "max", "nan", "inf", "zero_share")
SHADES: Final = " .:-=+*#%@"
_WIDEST: Final = 128
_TALLEST: Final = 64
_NAME_WIDTH: Final = 34


def head(what: str) -> str:
    """Above lines of statistics."""
    names = [*COLUMNS[:-1], "zeros"] + (["p50", "p99"] if what == "histogram" else [])
    return f"{'step':>8} {'mb':>3}  {'tap':<{_NAME_WIDTH}}" + "".join(f" {name:>10}" for name in names)


def line(merged: Merged) -> str:
    """Statistics of one tensor at one moment."""
    said = statistics_of(merged)
    key = merged.key
    values = [number(said[name]) for name in COLUMNS[:-1]] + [_share(said["zero_share"])]
    if "quantiles" in said:
        values += [number(said["quantiles"]["0.5"]), number(said["quantiles"]["0.99"])]
    at = "-" if key.microbatch < 0 else str(key.microbatch)
    text = f"{key.step:>8} {at:>3}  {key.tap:<{_NAME_WIDTH}}" + "".join(f" {value:>10}" for value in values)
    return text + (f"  (parts of {len(merged.missing)} ranks missing)" if merged.missing else "")


def statistics_of(merged: Merged) -> dict[str, Any]:
    """What a merged vector says, as JSON; quantiles of |x| where there is a histogram."""
    vector, shift = merged.arrays["vector"], float(merged.arrays["shift"][0])
    said: dict[str, Any] = dict(derive(vector, shift).as_dict())
    exponents = merged.arrays.get("exponents")
    if exponents is not None:
        shares = (0.01, 0.5, 0.99)
        found = quantiles(exponents, shares, vector)
        said["quantiles"] = {f"{share:g}": float(value) for share, value in zip(shares, found, strict=True)}
    return said


def as_json(merged: Merged) -> dict[str, Any]:
    """One tensor at one moment; arrays as lists."""
    key = merged.key
    said: dict[str, Any] = {
        "event": "frame",
        "tap": key.tap,
        "what": key.what,
        "subscription": key.subscription,
        "step": key.step,
        "microbatch": key.microbatch,
        "ranks": list(merged.ranks),
        "missing": [[list(part) for part in shard] for shard in merged.missing],
    }
    if key.what in ("statistics", "histogram"):
        said["statistics"] = statistics_of(merged)
        if "exponents" in merged.arrays:
            said["exponents"] = merged.arrays["exponents"].tolist()
    else:
        said["arrays"] = {name: array.tolist() for name, array in floats(merged).items()}
    return said


def block(merged: Merged) -> list[str]:
    """Anything that is no statistics: a line, and a heat map or some values."""
    key = merged.key
    arrays = floats(merged)
    title = f"step {key.step}, microbatch {key.microbatch}: {key.what} of {key.tap}, ranks {ranges(merged.ranks)}"
    lines = [title + (f"; incomplete: {merged.lacks()}" if merged.missing else "")]
    if key.what == "tiles" and "values" in arrays:
        return lines + heat_map(arrays["values"])
    if key.what == "attention":
        return lines + attention_lines(arrays)
    for name, array in arrays.items():
        flat = array.reshape(-1)
        shown = " ".join(number(float(value)) for value in flat[:8]) + (" ..." if flat.size > 8 else "")
        lines.append(f"  {name} {'x'.join(map(str, array.shape)) or 'number'}: {shown}")
    return lines


def attention_lines(arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    """Entropy, sink and the keys that receive most, a line for each head."""
    lines: list[str] = []
    rows = max(int(arrays["queries"][0]), 1)
    for place, head_number in enumerate(arrays["heads"].tolist()):
        entropy, first = float(arrays["entropy"][place].mean()), float(arrays["first"][place].mean())
        received = arrays["received"][place] / rows
        best = np.argsort(-received, kind="stable")[:5]
        most = ", ".join(f"{int(arrays['key_position'][key])} ({received[key]:.3f})" for key in best)
        lines.append(f"  head {head_number}: entropy {entropy:.4f} nats, sink {first:.4f}, most received by key {most}")
    return lines


def attention_maps(arrays: Mapping[str, NDArray[Any]]) -> list[tuple[int, NDArray[np.float32]]]:
    """Head and its map: probabilities of chosen rows, or means of tiles."""
    from trimtab.scope.attention import levels_to_values

    maps = arrays["probabilities"] if "probabilities" in arrays else levels_to_values(arrays["tiles"], arrays["scale"])
    return [(int(head_number), maps[place]) for place, head_number in enumerate(arrays["heads"].tolist())]


def heat_map(values: NDArray[Any], *, square_root: bool = False) -> list[str]:
    """Characters from light to dark, from the smallest to the largest finite value; ``!`` for what is not finite."""
    shown = _smaller(values.astype(np.float64))
    finite = np.isfinite(shown)
    if not finite.any():
        return ["  nothing in it is finite"]
    low, high = float(shown[finite].min()), float(shown[finite].max())
    share = np.where(finite, (shown - low) / (high - low or 1.0), 0.0)
    if square_root:
        share = np.sqrt(share)
    places = np.clip((share * len(SHADES)).astype(int), 0, len(SHADES) - 1)
    shades = np.array(list(SHADES))
    drawn = np.where(finite, shades[places], "!")
    return [f"  from {number(low)} to {number(high)}", *("  |" + "".join(row) + "|" for row in drawn)]


def floats(merged: Merged) -> dict[str, NDArray[Any]]:
    """Arrays, those of types that numpy lacks as float32."""
    kinds: Mapping[str, str] = merged.meta.get("dtypes") or {}
    return {name: widened(array, kinds.get(name.partition("@")[0], "")) for name, array in merged.arrays.items()}


def widened(array: NDArray[Any], kind: str) -> NDArray[Any]:
    """The values whose bits are in ``array``, where ``kind`` is bfloat16 or a float8."""
    if kind == "bfloat16" and array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    if kind in _EIGHT and array.dtype == np.uint8:
        return _eight(*_EIGHT[kind])[array]
    return array


def write_npz(path: Path, found: Sequence[Merged]) -> int:
    """All arrays, named ``<tap>/<step>/<microbatch>/<array>``; how many."""
    arrays: dict[str, NDArray[Any]] = {}
    for merged in found:
        key = merged.key
        where = f"{key.tap}/{key.step}/{key.microbatch}" + "".join(f"/{axis}{index}" for axis, index, _ in key.data)
        for name, array in floats(merged).items():
            arrays[f"{where}/{name}"] = array
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    return len(arrays)


_EIGHT: Final = {"float8_e4m3fn": (4, 3, 7, False), "float8_e5m2": (5, 2, 15, True)}
"""Bits of exponent and mantissa, bias, and whether the largest exponent is for infinities."""


def _eight(exponents: int, mantissas: int, bias: int, infinities: bool) -> NDArray[np.float32]:
    """The value of each byte."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> mantissas) & ((1 << exponents) - 1), bits & ((1 << mantissas) - 1)
    fraction = mantissa / (1 << mantissas)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    largest = exponent == (1 << exponents) - 1
    if infinities:
        value = np.where(largest, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where(largest & (mantissa == (1 << mantissas) - 1), np.nan, value)
    return np.where(bits >> 7, -value, value).astype(np.float32)


def _smaller(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """At most as many rows and columns as a terminal shows: the largest of those that fall together."""
    matrix = np.atleast_2d(values)
    for axis, most in ((0, _TALLEST), (1, _WIDEST)):
        size = matrix.shape[axis]
        if size > most:
            starts = np.array([size * part // most for part in range(most)])
            matrix = np.fmax.reduceat(matrix, starts, axis=axis)
    return matrix


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
