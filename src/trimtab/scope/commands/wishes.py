"""From words of the command line to a subscription."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.scope.fields import Fields
from trimtab.scope.subscription import WHATS, Subscription, numbers, step_range


def subscription_of(
    pattern: str,
    what: str = "statistics",
    *,
    every: int = 1,
    steps: str | None = None,
    microbatches: str | None = None,
    layers: str | None = None,
    heads: str | None = None,
    ranks: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Subscription:
    """As the options say it; ValueError, in one line, for what makes no sense. ``parameters`` may hold None (not
    given); lists of numbers and grids (``64x64``) are texts."""
    Fields({"--what": what}, "scope").one_of("--what", WHATS)
    first, last = step_range(steps) if steps is not None else (0, None)
    listed = {"microbatches": microbatches, "layers": layers, "heads": heads, "ranks": ranks}
    chosen = {name: None if text is None else list(numbers(text, f"--{name}")) for name, text in listed.items()}
    particular = {name: _value(name, value) for name, value in (parameters or {}).items() if value is not None}
    return Subscription.from_dict(
        {
            "pattern": pattern,
            "what": what,
            "when": {"every": every, "first": first, "last": last, "microbatches": chosen.pop("microbatches")},
            "parameters": particular,
            **chosen,
        }
    )


def _value(name: str, value: Any) -> Any:
    if name in ("rows", "tokens"):
        return list(numbers(value, f"--{name}", negative=True))
    if name == "dims":
        return [label.strip() for label in value.split(",")]
    if name == "grid":
        rows, times, columns = value.partition("x")
        if not (times and rows.isdecimal() and columns.isdecimal()):
            raise ValueError(f"--grid {value!r}: expected rows and columns, for example 64x64")
        return [int(rows), int(columns)]
    return value
