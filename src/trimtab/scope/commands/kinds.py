"""Options that say how something is disturbed, and the perturbation that they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trimtab.scope.perturbation import Perturbation

Tap = Annotated[
    str, typer.Option("--tap", metavar="PATTERN", help="What is disturbed, for example layers.3.mlp.output.")
]
Kind = Annotated[
    str, typer.Option(help="gaussian, uniform, offset, bit-flip, zero, scale, mask, stuck, stale or delay.")
]
Microbatches = Annotated[str | None, typer.Option(metavar="0,1", help="Of each step, these.")]
Layers = Annotated[str | None, typer.Option(metavar="0-3", help="Only in these layers.")]
Ranks = Annotated[str | None, typer.Option(metavar="2", help="Only there, whatever other replicas hold.")]
Probability = Annotated[float, typer.Option(help="That it happens at a moment at which it may.")]
Seed = Annotated[int, typer.Option(help="Of all that is drawn.")]
Bits = Annotated[str | None, typer.Option(metavar="14", help="bit-flip: numbers, or sign, exponent, mantissa, random.")]
Std = Annotated[float | None, typer.Option(metavar="X", help="gaussian: standard deviation of what is added.")]
Low = Annotated[float | None, typer.Option(metavar="X", help="uniform: the smallest factor ...")]
High = Annotated[float | None, typer.Option(metavar="X", help="... and the largest.")]
Value = Annotated[float | None, typer.Option(metavar="X", help="offset, mask, stuck: this value.")]
Factor = Annotated[float | None, typer.Option(metavar="X", help="scale: times this.")]
Milliseconds = Annotated[float | None, typer.Option("--ms", metavar="X", help="delay: of a communication.")]
Relative = Annotated[bool, typer.Option("--relative", help="gaussian, offset: times the rms of what is there.")]
Fraction = Annotated[float | None, typer.Option(metavar="X", help="Of the elements, drawn.")]
Elements = Annotated[int | None, typer.Option(metavar="N", help="So many elements, drawn.")]
Indices = Annotated[str | None, typer.Option(metavar="0,7", help="These, in the flattened whole tensor.")]
Tokens = Annotated[str | None, typer.Option(metavar="0-3", help="Only at these positions in the sequence.")]
Heads = Annotated[str | None, typer.Option(metavar="0,1", help="Only these attention heads.")]
Channels = Annotated[str | None, typer.Option(metavar="5", help="Only these places of the last dimension.")]
Where = Annotated[str | None, typer.Option(help="Of parameters: copy, master or both.")]
PutBack = Annotated[bool, typer.Option("--put-back", help="Storage is restored after the last step.")]


def perturbation_of(
    tap: str,
    kind: str,
    first: int,
    last: int,
    *,
    listed: dict[str, str | None],
    particular: dict[str, Any],
    probability: float = 1.0,
    seed: int = 0,
) -> Perturbation:
    """What the options mean; ValueError, in one line, for what makes no sense. ``listed``: microbatches, layers and
    ranks; ``particular``: what was given of all other options, by name."""
    from trimtab.scope.fields import Fields
    from trimtab.scope.perturbation import KINDS, Perturbation
    from trimtab.scope.subscription import numbers

    Fields({"--kind": kind}, "scope").one_of("--kind", KINDS)
    given = {name: value for name, value in particular.items() if value is not None and value is not False}
    part: dict[str, Any] = {name: given.pop(name) for name in ("fraction", "elements") if name in given}
    for name in ("indices", "tokens", "heads", "channels"):
        if name in given:
            part[name] = list(numbers(given.pop(name), f"--{name}"))
    if "bits" in given:
        given["bits"] = [int(word) if word.strip().isdecimal() else word.strip() for word in given["bits"].split(",")]
    if part:
        given["part"] = part
    return Perturbation.from_dict(
        {
            "pattern": tap,
            "kind": kind,
            "first": first,
            "last": last,
            "probability": probability,
            "seed": seed,
            "parameters": given,
            **{name: None if text is None else list(numbers(text, f"--{name}")) for name, text in listed.items()},
        }
    )
